"""How long a core takes to decide, on this machine. The one thing in the lab that reads a clock.

Decides what counts: processor time of hints and idle turns, that is of guessing, planning and
learning, so that other work on the machine does not. Changes nothing.
"""

from __future__ import annotations

import time

from prefetchd.core import Core
from prefetchd.model import Command, Demanded, Event, Hinted, Idle


class DecisionClock:
    """Put before a core's `handle`. `spent_ns` over `demands` demands of `pages` pages in all."""

    def __init__(self, core: Core) -> None:
        self.spent_ns = 0
        self.demands = 0
        self.pages = 0
        self._handle = core.handle
        setattr(core, "handle", self._timed)  # noqa: B010  (a method, which mypy will not assign)

    def _timed(self, event: Event, now_ns: int) -> list[Command]:
        if isinstance(event, Demanded):
            self.demands += 1
            self.pages += len(event.pages)
        if not isinstance(event, Hinted | Idle):
            return self._handle(event, now_ns)
        begun_ns = time.thread_time_ns()
        commands = self._handle(event, now_ns)
        self.spent_ns += time.thread_time_ns() - begun_ns
        return commands
