"""What a flood has read is dealt with in parts: between two, another tenant's request is heard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefetchd import foreground
from prefetchd.driver import RawReads
from prefetchd.engine import Engine
from prefetchd.model import Completed
from prefetchd.sidecar import arrivals, loop_turns
from prefetchd.sidecar.arrivals import Arrivals
from prefetchd.sidecar.loop_turns import LoopTurns
from prefetchd.sidecar.protocol import Ping
from prefetchd.sidecar.replies import Pong
from prefetchd.sidecar.session import Session
from tests.runtime_bench import BLOCKS, content, keys
from tests.sidecar_bench import Daemon, daemon, space
from tests.test_tenants import Raw, on_disk


class Watched:
    """What the loop does for a namespace that floods, in order; `first` is called before it."""

    def __init__(
        self, served: Daemon, monkeypatch: pytest.MonkeyPatch, first: Callable[[], None]
    ) -> None:
        self.log: list[str] = []
        engine = served.runtime("flood").engine
        reap, go_on, handle, told = (
            Arrivals.reap,
            Arrivals.go_on,
            Session.handle,
            engine.core.handle,
        )

        def reaps(arrivals: Arrivals, *, in_parts: bool) -> int:
            engine.driver.device.wait(30 * 10**9, engine.driver.device.in_flight)  # for all
            return reap(arrivals, in_parts=in_parts)

        def goes_on(arrivals: Arrivals) -> int:
            if not self.log:
                first()
            self.log.append("part")
            return go_on(arrivals)

        def handles(session: Session, request: Any) -> None:
            if session.namespace.name == "quiet":
                self.log.append("quiet")
            handle(session, request)

        def tell(event: Any, now_ns: int) -> Any:
            if isinstance(event, Completed):
                self.log.append(f"told of {len(event.slots)}")
            return told(event, now_ns)

        monkeypatch.setattr(Arrivals, "reap", reaps)
        monkeypatch.setattr(Arrivals, "go_on", goes_on)
        monkeypatch.setattr(Session, "handle", handles)
        monkeypatch.setattr(engine.core, "handle", tell)


def test_between_two_parts_of_a_flood_anothers_request_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "PART_PAGES", 4)
    monkeypatch.setattr(loop_turns, "_SHARED_SLICE_COST", 1)
    pages = content(BLOCKS)
    spaces = {"flood": on_disk(tmp_path / "flood"), "quiet": space()}
    with daemon(tmp_path, spaces) as served:
        kv = served.connect("flood")
        blocks = kv.put(keys(BLOCKS), pages).wait().blocks
        quiet = Raw(served, "quiet")
        quiet.say(Ping(1))
        assert quiet.hear() == Pong(1)
        watched = Watched(served, monkeypatch, lambda: quiet.say(Ping(2)))
        with kv.demand(kv.pages(blocks[:6], 0)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), pages[:6, 0])
        assert quiet.hear() == Pong(2)
        assert watched.log == ["part", "quiet", "part", "told of 6"]
        watched.log[:] = ["alone"]
        quiet.close()
        served.until(lambda: served.server.namespaces.open["quiet"].clients == 0)
        with kv.demand(kv.pages(blocks, 1)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), pages[:, 1])
        assert watched.log == ["alone", "part", "told of 8"], "with nobody else there, all at once"


def test_who_waits_for_what_came_first_is_told_before_all_has_been_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More is reaped at every turn than is verified in it, so there is always more to verify."""
    told, device, size = list[Completed](), SimpleNamespace(in_flight=0), loop_turns.PART_PAGES
    numbers = iter(range(0, 1 << 20, 3 * size))

    def reap() -> tuple[RawReads, bool]:
        first = next(numbers)
        slots = np.arange(first, first + 3 * size)
        return RawReads(slots, slots, slots, slots >= 0), False

    driver = SimpleNamespace(
        device=device, verify=lambda reads: Completed(reads.slots, reads.generations, reads.whole)
    )
    engine: Any = SimpleNamespace(driver=driver, reap=reap, handle=told.append)
    coming = Arrivals(engine, 4096)
    costs = []
    for _ in range(40):
        coming.reap(in_parts=True)
        costs.append(coming.go_on())
    most = 8 * size
    assert [len(part.slots) for part in told] == [most] * 5
    dearest = loop_turns.READS_COST + loop_turns.READ_COST * most
    assert [max(costs) - min(costs), costs.index(max(costs))] == [dearest, 7]
    coming.finish()
    assert not coming
    slots = np.concatenate([part.slots for part in told])
    assert slots.tolist() == list(range(40 * 3 * size)), "in the order in which they came"


def test_puts_beside_demands_leave_the_device_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts that have to make room, while the loop attends: their threads collect nothing."""
    monkeypatch.setattr(foreground, "_SHARED_NAP_NS", 10**7)
    with daemon(tmp_path, {"one": on_disk(tmp_path / "one")}) as served:
        kv, pages = served.connect("one"), content(4 * BLOCKS)
        engine, plain = served.runtime("one").engine, Engine.collect
        collectors: list[str] = []

        def collect(self: Engine) -> bool:
            collectors.append(threading.current_thread().name)
            return plain(self)

        monkeypatch.setattr(engine.foreground, "_collect", lambda: collect(engine))
        namespace = served.server.namespaces.open["one"]
        namespace.waiting += 1  # as if a demand waited all the time
        served.until(lambda: namespace.attended)
        for first in range(0, 4 * BLOCKS, BLOCKS):
            put = kv.put(keys(BLOCKS, first), pages[first : first + BLOCKS]).wait()
            assert not put.failures
            with kv.demand(kv.pages(put.blocks, 0)) as ticket:
                assert np.array_equal(np.stack(ticket.views()), pages[first : first + BLOCKS, 0])
        assert collectors == []
        namespace.waiting -= 1


def test_a_shared_slice_ends_with_the_task_that_fills_it() -> None:
    turns, log = LoopTurns(), list[int]()
    for number in range(6):
        turns.offer("flood", 1, number, lambda number=number: log.append(number) or 160)  # type: ignore[misc,func-returns-value]
    turns.work(shared=True)
    assert log == [0]
    turns.work()
    assert log == [0, 1, 2, 3, 4]
