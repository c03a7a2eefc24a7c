"""A caller's idle time, given to the engine: learn, plan, collect; then just sleep.

Decides how much is done before the caller is due back, and whether one is expected back at all.
Refuses to know what a step does. A host thread that waits for its GPU anyway does here what the
pump would otherwise do beside it, at the price of the interpreter's lock going to and fro.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_TENDED_NS = 20_000_000  # so long after its last turn a caller is expected back
_COLLECT_NS = 150_000  # time to leave for taking note of what has arrived
_STARVED_MAX = 3  # calls too short for the step that is due, after which it is made all the same


class Tending:
    """`due_ns`: about how long the `step` that is wanted takes, 0 if none is; `reading`: whether
    anything is on its way; `arrival` waits for all of that, or so long (ns); `collect` takes note
    of what has arrived."""

    def __init__(
        self,
        clock: Callable[[], int],
        due_ns: Callable[[], int],
        step: Callable[[], None],
        reading: Callable[[], object],
        arrival: Callable[[int], None],
        collect: Callable[[], object],
    ) -> None:
        self._clock = clock
        self._due_ns = due_ns
        self._step = step
        self._reading = reading
        self._arrival = arrival
        self._collect = collect
        self._tended_ns = -_TENDED_NS
        self._starved = 0

    def until(self, until_ns: int) -> None:
        now_ns = self._clock()
        self._tended_ns = max(self._tended_ns, until_ns, now_ns)
        half_ns = (until_ns - now_ns) // 2
        self._starved += 1
        while due_ns := self._due_ns():
            fits = self._clock() < until_ns - min(due_ns, half_ns)
            if not fits and self._starved <= _STARVED_MAX:
                break
            self._starved = 0
            self._step()
        # Taken note of once, when all has come: in parts it costs as much for each. Something may
        # never come, so what is there is looked at in any case while there is time.
        while self._reading() and (left_ns := until_ns - self._clock()) > 0:
            self._arrival(max(0, left_ns - _COLLECT_NS))
            self._collect()
            if left_ns <= _COLLECT_NS:
                break
        left_ns = until_ns - self._clock()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)

    def lately(self) -> bool:
        return self._clock() < self._tended_ns + _TENDED_NS
