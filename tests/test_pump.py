"""The pump looks around less often the less there is, and wakes at once when it is called."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from prefetchd import pump as module
from prefetchd.pump import Pump


def naps(rounds: int, found: set[int], open_ended: set[int], called: set[int]) -> list[float]:
    """How long it slept, round by round, in which it found something to do, something was under
    way, or somebody called."""
    slept: list[float] = []

    class Inbox:
        def get(self, timeout: float) -> None:
            slept.append(timeout)
            if len(slept) >= rounds:
                pump._stopping = True
            if len(slept) not in called:
                raise queue.Empty

    def failed(error: BaseException) -> None:
        raise error

    pump = Pump(lambda _: len(slept) in found, failed, lambda: len(slept) in open_ended)
    inbox: Any = Inbox()
    pump.inbox = inbox
    pump._run()
    return slept


def test_it_sleeps_ever_longer_and_longest_when_nothing_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOKS_BEFORE", 20)
    slept = naps(100, found={1}, open_ended=set(range(40, 60)), called={95})
    assert slept[1:4] == [module._NAP_S, 2 * module._NAP_S, 4 * module._NAP_S]
    assert slept[15] == module._IDLE_S
    assert slept[30] == module._ASLEEP_S
    assert set(slept[41:75]) == {module._IDLE_S}, "what is under way is looked at"
    assert slept[90] == module._ASLEEP_S
    assert slept[95:97] == [module._NAP_S, 2 * module._NAP_S]
