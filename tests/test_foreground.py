"""Who waits for an engine drives it, unless a loop does; then nobody takes its turns from it."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from prefetchd import EngineError, foreground
from prefetchd.bell import Bell
from prefetchd.foreground import Foreground
from prefetchd.model import ChainHint, DoneHint, Hinted, Idle, PlanSoon
from tests.runtime_bench import BLOCKS, content, keys, open_plain

PATIENCE_S = 30.0


class Driven:
    """An engine of which only the driving is there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.device = Bell()
        self.collectors: list[int] = []
        self.done = False
        self.collected = True
        """What a look at the device finds."""
        self.broken = False
        self.unheard: list[int] = []
        self.front = Foreground(
            self.lock,
            self.device.fileno,
            self.collect,
            lambda: None,
            self.check,
            self.unheard,
        )
        self.pool = ThreadPoolExecutor(1)

    def collect(self) -> bool:
        self.collectors.append(get_ident())
        self.done = self.collected
        return self.collected

    def check(self) -> None:
        if self.broken:
            raise EngineError("over")

    def waiter(self, count: int = 2) -> Callable[[], bool]:
        """Of a thread that waits, beside a loop that attends, if there are two of them."""
        wait = self.front.wait
        waiting = self.pool.submit(wait, lambda: self.done, None, time.monotonic_ns)
        while self.front.count < count:
            threading.Event().wait(0.001)
        return lambda: waiting.result(PATIENCE_S)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Driven:
    monkeypatch.setattr(foreground, "_SHARED_NAP_NS", 60 * 10**9)
    made = Driven()
    made.front.attend()
    return made


def test_who_waits_beside_a_loop_leaves_the_device_to_it_and_hears_of_writes(
    driven: Driven,
) -> None:
    ended = driven.waiter()
    with driven.lock:
        driven.front.resolved()
        driven.done = True
        driven.front.wrote()
    assert ended()
    assert driven.collectors == []


def test_who_waits_beside_a_loop_takes_what_no_descriptor_tells_of(driven: Driven) -> None:
    driven.unheard.append(1)
    assert driven.waiter(count=1)()
    assert driven.collectors
    assert driven.front.attending


def test_who_waits_drives_once_the_loop_does_not(driven: Driven) -> None:
    ended = driven.waiter()
    driven.front.neglect()
    assert ended()
    assert driven.collectors
    assert get_ident() not in driven.collectors
    assert driven.front.count == 0


def test_who_slept_on_the_device_when_the_loop_came_hears_of_writes(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone he sleeps for long; the loop that comes tells him to sleep on the writes instead."""
    monkeypatch.setattr(foreground, "_NAP_NS", 60 * 10**9)
    monkeypatch.setattr(driven, "collected", False)
    driven.front.neglect()
    polls = threading.Event()

    class Poller:
        def __init__(self) -> None:
            poller = select.poll()
            self.register, self._poll = poller.register, poller.poll

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            polls.set()
            return self._poll(timeout_ms)

    monkeypatch.setattr(foreground, "select", SimpleNamespace(poll=Poller, POLLIN=select.POLLIN))
    ended = driven.waiter(1)
    assert polls.wait(PATIENCE_S)
    driven.front.attend()
    with driven.lock:
        driven.done = True
        driven.front.wrote()
    assert ended()


def test_an_engine_that_ends_lets_who_waits_beside_a_loop_go(driven: Driven) -> None:
    ended = driven.waiter()
    driven.broken = True
    driven.front.end()
    with pytest.raises(EngineError, match="over"):
        ended()


def test_a_loop_that_attends_takes_hints_and_makes_steps_unless_they_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_plain() as runtime:
        blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).wait().blocks
        engine, handled = runtime.engine, list[tuple[type, int]]()
        plain = engine.core.handle

        def handle(event: object, now_ns: int) -> object:
            handled.append((type(event), get_ident()))
            return plain(event, now_ns)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.core, "handle", handle)
        engine.attend()
        while not engine._pump.inbox.empty():
            threading.Event().wait(0.001)
        handled.clear()
        runtime.hint(ChainHint(1, blocks))
        assert (Hinted, get_ident()) in handled, "here and now"
        assert engine.step_due
        while engine.step_due:
            engine.step()
        assert (Idle, get_ident()) in handled
        for _ in range(9):  # and what there is to learn after each takes next to no time
            engine._pace.note(5_000_000)
            engine._pace.note(50_000)
        handled.clear()
        runtime.hint(ChainHint(1, blocks))
        assert (Hinted, get_ident()) not in handled, "others wait for this thread"
        assert not engine.step_due
        engine.leave()


def test_a_hint_does_not_overtake_one_that_the_pump_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_plain() as runtime:
        blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).wait().blocks
        engine, handled = runtime.engine, list[type]()
        plain = engine.core.handle

        def handle(event: Any, now_ns: int) -> Any:
            if isinstance(event, Hinted):
                handled.append(type(event.hint))
            return plain(event, now_ns)

        taken, goes_on = threading.Event(), threading.Event()

        def gives_way(_: object) -> None:
            if engine._pump.hints and engine._pump.inbox.empty():
                taken.set()
                goes_on.wait(PATIENCE_S)

        monkeypatch.setattr(engine.core, "handle", handle)
        monkeypatch.setattr("prefetchd.engine.give_way", gives_way)
        runtime.hint(ChainHint(1, blocks))
        assert taken.wait(PATIENCE_S)
        engine.attend()
        runtime.hint(DoneHint(1, "", None, blocks))
        assert handled == [], "the pump has the first one in hand"
        goes_on.set()
        while engine._pump.hints:
            threading.Event().wait(0.001)
        assert handled == [ChainHint, DoneHint]
        engine.leave()


def test_the_pump_goes_on_where_steps_take_the_loop_too_much_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_plain() as runtime:
        engine, spent_ns, calls = runtime.engine, [0], list[bool]()
        monkeypatch.setattr(time, "thread_time_ns", lambda: spent_ns[0])
        monkeypatch.setattr(engine, "_turn", lambda: False)  # the pump only has hints to do
        monkeypatch.setattr(engine._pump, "call", lambda: calls.append(True))
        cost_ns = 0

        def handle(*_: Any) -> list[Any]:
            spent_ns[0] += cost_ns
            return [PlanSoon()]

        monkeypatch.setattr(engine.core, "handle", handle)
        engine.attend()
        monkeypatch.setattr(engine, "clock", iter(range(0, 10**12, 10**7)).__next__)
        for cost_ns in [0] * 20 + [2_000_000] * 5:  # noqa: B007  (it is what `handle` costs)
            assert calls == [], "a step that waits long is not a long one"
            engine.step()
            engine.wake()
        assert calls == [True]
        assert not engine.step_due
        engine.leave()
