"""Who waits for an engine drives it, unless a loop does; then nobody takes its turns from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident

import pytest

from prefetchd import EngineError, foreground
from prefetchd.bell import Bell
from prefetchd.foreground import Foreground
from prefetchd.model import ChainHint, Hinted, Idle
from tests.runtime_bench import BLOCKS, content, keys, open_plain

PATIENCE_S = 30.0


class Driven:
    """An engine of which only the driving is there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.device = Bell()
        self.collectors: list[int] = []
        self.done = False
        self.broken = False
        self.front = Foreground(
            self.lock, self.device.fileno, self.collect, lambda: None, self.check
        )
        self.pool = ThreadPoolExecutor(1)

    def collect(self) -> bool:
        self.collectors.append(get_ident())
        self.done = True
        return True

    def check(self) -> None:
        if self.broken:
            raise EngineError("over")

    def waiter(self) -> Callable[[], bool]:
        """Of a thread that waits, beside a loop that attends."""
        wait = self.front.wait
        waiting = self.pool.submit(wait, lambda: self.done, None, time.monotonic_ns)
        while self.front.count < 2:
            threading.Event().wait(0.001)
        return lambda: waiting.result(PATIENCE_S)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Driven:
    monkeypatch.setattr(foreground, "_SHARED_NAP_NS", 3600 * 10**9)
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


def test_who_waits_drives_once_the_loop_does_not(driven: Driven) -> None:
    ended = driven.waiter()
    driven.front.neglect()
    assert ended()
    assert driven.collectors
    assert get_ident() not in driven.collectors
    assert driven.front.count == 0


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
        for _ in range(9):
            engine._pace.note(2_000_000)
        handled.clear()
        runtime.hint(ChainHint(1, blocks))
        assert (Hinted, get_ident()) not in handled, "others wait for this thread"
        assert not engine.step_due
        engine.leave()
