"""What goes wrong with one namespace in the daemon's loop ends no other, and nothing is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd.model import Idle
from prefetchd.sidecar import arrivals
from prefetchd.sidecar.namespace import Namespace, open_namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.place import Place
from prefetchd.sidecar.protocol import Demand
from prefetchd.sidecar.server import Server
from prefetchd.sidecar.wire import raw_of
from prefetchd.tickets import Ticket
from tests.runtime_bench import BLOCKS, content, keys
from tests.sidecar_bench import PATIENCE_S, Daemon, daemon, space
from tests.test_tenants import Raw, on_disk

WAIT_NS = 3 * 10**9


def breaks(served: Daemon, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in what the loop does next for the namespace "broken"."""
    engine = served.runtime("broken").engine

    def fault(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a fault")

    if where == "reads":
        monkeypatch.setattr(engine.driver, "verify", fault)
    elif where == "step":
        plain = engine.core.handle

        def handle(event: Any, now_ns: int) -> Any:
            return fault() if isinstance(event, Idle) else plain(event, now_ns)

        monkeypatch.setattr(engine.core, "handle", handle)
    else:
        monkeypatch.setattr(engine.driver, "start", fault)


@pytest.mark.parametrize("where", ["reads", "step", "drive"])
def test_a_fault_in_what_the_loop_does_for_one_namespace_ends_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    spaces = {"broken": on_disk(tmp_path / "broken"), "other": on_disk(tmp_path / "other")}
    with daemon(tmp_path, spaces) as served:
        kv, other = served.connect("broken"), served.connect("other")
        blocks = kv.put(keys(BLOCKS), content(BLOCKS)).wait().blocks
        theirs = other.put(keys(BLOCKS), content(BLOCKS)).wait().blocks
        namespace = served.server.namespaces.open["broken"]
        gate, engine = namespace.gate, namespace.runtime.engine
        assert gate is not None

        def provoke() -> None:
            namespace.waiting += 1  # the loop attends, and so makes the steps
            served.server._attend()
            breaks(served, where, monkeypatch)
            engine._plan_wanted = where == "step"
            if where == "drive":
                gate._wake()

        served.server.later(provoke)
        with kv.demand(kv.pages(blocks, 0)) as ticket:
            assert ticket.missing.all()
        with other.demand(other.pages(theirs, 0)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), content(BLOCKS)[:, 0])
        assert served.thread.is_alive()
        assert gate.drives[0].gates == [served.server.namespaces.open["other"].gate]
        monkeypatch.undo()


@contextmanager
def standing(folder: Path) -> Iterator[tuple[Server, Namespace, Ticket]]:
    """A server whose loop goes round only when it is asked to, that attends to a namespace of which
    pages are demanded; these have been read, but not reaped."""
    namespaces = Namespaces({"one": space()}, os.geteuid())
    namespace = open_namespace("one", namespaces.settings["one"])
    namespaces.open["one"] = namespace
    server = Server(Place(folder / "s.sock"), namespaces)
    runtime = namespace.runtime
    blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).wait().blocks
    namespace.waiting += 1
    server._attend()
    ticket = runtime.demand(runtime.pages(blocks, 0))
    assert not ticket.done
    yield server, namespace, ticket
    assert ticket.done
    assert not ticket.missing.any()
    assert not runtime._parts.driver.blame.failures


def ends(server: Server, namespace: Namespace, how: str) -> None:
    if how == "close":
        server.stop()
        assert server.close() == []
        return
    server.part(namespace, "it is erased")
    assert namespace.runtime.engine.foreground.attending == 0
    namespace.close()
    server.stop()
    server.close()


@pytest.mark.parametrize("how", ["close", "part"])
def test_what_was_reaped_is_told_before_the_loop_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(arrivals, "PART_PAGES", 2)
    with standing(tmp_path) as (server, namespace, ticket):
        device = namespace.runtime.engine.driver.device
        device.wait(WAIT_NS, device.in_flight)
        namespace.arrivals.reap(in_parts=True)
        namespace.arrivals.go_on()
        assert namespace.arrivals
        assert not ticket.done
        ends(server, namespace, how)


def test_a_close_leaves_the_device_to_the_opener_that_waits_for_it(tmp_path: Path) -> None:
    with standing(tmp_path) as (server, namespace, ticket):
        engine, ended = namespace.runtime.engine, list[bool]()
        until_ns = engine.clock() + WAIT_NS

        def opener() -> None:
            ended.append(engine.wait(lambda: ticket.done, until_ns))

        server.aside(opener)
        while engine.foreground.count < 2:
            threading.Event().wait(0.001)
        ends(server, namespace, "close")
        assert ended == [True]


def test_reads_that_the_device_never_had_are_answered_by_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor tells of them: nothing but the loop's own look does."""
    with daemon(tmp_path) as served:
        kv, runtime = served.connect(), served.runtime()
        blocks = kv.put(keys(BLOCKS), content(BLOCKS)).wait().blocks
        client, collectors = Raw(served, "default"), list[str]()
        reap = runtime.engine.driver.reap

        def reaps(now_ns: int) -> Any:
            if runtime.engine.driver.ended:
                collectors.append(threading.current_thread().name)
            return reap(now_ns)

        namespace = served.server.namespaces.open["default"]

        def provoke() -> None:
            namespace.waiting += 1  # as if a demand waited that does not end
            runtime._parts.driver.paths.lose(0)
            monkeypatch.setattr(runtime.engine.driver, "reap", reaps)
            monkeypatch.setattr(runtime.engine, "_turn", lambda: False)  # the pump would do it, too

        served.server.later(provoke)
        served.until(lambda: namespace.attended)
        pages = kv.pages(blocks, 0)
        for number in range(1, 4):
            client.say(Demand(number, raw_of(pages, np.int64), timeout_ns=int(PATIENCE_S * 1e9)))
            told = client.hear()
            assert told.id == number
            assert (np.frombuffer(told.slots, np.int64) == -1).all()
        assert set(collectors) == {"daemon"}
        namespace.waiting -= 1
