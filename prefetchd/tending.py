"""A caller's idle time, given to the engine: learn, plan, collect; then just sleep.

Decides how much is done before the caller is due back, and whether one is expected back at all.
Refuses to know what a step does. A host thread that waits for its GPU anyway does here what the
pump would otherwise do beside it, at the price of the interpreter's lock going to and fro.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TENDED_NS = 20_000_000  # so long after its last turn a caller is expected back
_STARVED_MAX = 8  # calls too short for any step, after which one is made all the same
_STEP_NS, _COLLECT_NS = 250_000, 150_000  # time to leave for a step, and for what has arrived


class Tending:
    """`wanted`: whether a `step` is; `collect` takes note of what has arrived."""

    def __init__(
        self,
        clock: Callable[[], int],
        wanted: Callable[[], bool],
        step: Callable[[], None],
        collect: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._wanted = wanted
        self._step = step
        self._collect = collect
        self._tended_ns = -_TENDED_NS
        self._starved = 0

    def until(self, until_ns: int) -> None:
        now_ns = self._clock()
        self._tended_ns = max(self._tended_ns, until_ns, now_ns)
        last_ns = until_ns - min(_STEP_NS, (until_ns - now_ns) // 2)
        self._starved += 1
        while self._wanted() and (self._clock() < last_ns or self._starved > _STARVED_MAX):
            self._starved = 0
            self._step()
        self._sleep_until(until_ns - _COLLECT_NS)
        if self._clock() < until_ns:
            self._collect()
        self._sleep_until(until_ns)

    def lately(self) -> bool:
        return self._clock() < self._tended_ns + _TENDED_NS

    def _sleep_until(self, when_ns: int) -> None:
        left_ns = when_ns - self._clock()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
