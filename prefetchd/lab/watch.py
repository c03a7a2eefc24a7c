"""What a simulation's events tell beyond its counters: how early or late prefetches were.

Decides the buckets. Sees events and commands as they pass, changes none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import (
    Command,
    Completed,
    Demanded,
    Event,
    Geometry,
    Ids,
    IoClass,
    Mask,
    Outcome,
    Read,
    Ready,
    Used,
)

EDGES_MS = (-100.0, -10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)
"""Slack of a prefetched page: readable so long before its demand, or, below 0, after it."""


class Watch:
    """`counts` (int64): prefetched pages that were demanded, by slack; one more than `EDGES_MS`,
    the first below its first edge, the last above its last."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        self.counts: NDArray[np.int64] = np.zeros(len(EDGES_MS) + 1, np.int64)
        self._page_of: Ids = np.zeros(slots, np.int64)
        self._arrived_ns: Ids = np.zeros(geometry.pages, np.int64)
        self._fresh = np.zeros(geometry.pages, np.bool_)  # last read ahead, not demanded since
        self._asked: dict[int, tuple[int, Ids, Mask]] = {}

    def __call__(self, now_ns: int, event: Event, commands: list[Command]) -> None:
        if isinstance(event, Demanded):
            self._asked[event.ticket] = now_ns, event.pages, self._fresh[event.pages]
            self._fresh[event.pages] = False
        elif isinstance(event, Used):
            timely = event.pages[self._fresh[event.pages]]
            self._count(now_ns - self._arrived_ns[timely])
            self._fresh[timely] = False
        elif isinstance(event, Completed):
            self._arrived_ns[self._page_of[event.slots]] = now_ns
        for command in commands:
            if isinstance(command, Read):  # whatever it is for: its slot is no other page's now
                self._page_of[command.slots] = command.pages
                self._fresh[command.pages] = command.io_class == IoClass.PREFETCH
            elif isinstance(command, Ready):
                self._answered(command)

    def _answered(self, ready: Ready) -> None:
        asked_ns, pages, fresh = self._asked.pop(ready.ticket)
        timely = ready.outcomes == Outcome.TIMELY
        # Others that were on their way had been asked for by another demand.
        late = (ready.outcomes == Outcome.LATE) & fresh
        slack_ns = np.concatenate(
            [asked_ns - self._arrived_ns[pages[timely]], -ready.waits_ns[late]]
        )
        self._count(slack_ns)

    def _count(self, slack_ns: NDArray[np.int64]) -> None:
        places = np.searchsorted(EDGES_MS, slack_ns / 1e6, side="right")
        self.counts += np.bincount(places, minlength=len(self.counts))
