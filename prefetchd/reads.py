"""Reads in flight: how one begins, which completions still count, which have taken too long.

Decides what of a completion is news and when a read is given up. Refuses to know why a page is
read, who waits for it and what becomes of a failure; the core decides that. Holds no clock.
"""

from __future__ import annotations

import numpy as np

from prefetchd.counters import Counters
from prefetchd.masks import every, some
from prefetchd.model import Cancel, Completed, Ids, IoClass, Mask, Read, Slots
from prefetchd.planner import Planner
from prefetchd.read_meter import ReadMeter
from prefetchd.staging import ABANDONED, READING, READY, Staging


class Reads:
    """`timeout_ns`: after it, a read is given up."""

    def __init__(
        self, staging: Staging, planner: Planner, counters: Counters, timeout_ns: int
    ) -> None:
        self._staging = staging
        self._planner = planner
        self._counters = counters
        self.timeout_ns = timeout_ns
        self.meter = ReadMeter()
        self.in_flight = 0
        """Reads that are waited for."""
        self.given_up = 0
        """Reads that nobody waits for any more, yet their slots are the device's."""
        self.prefetching = 0
        """Those of `in_flight` that nobody has asked for."""
        self.look_ns = 0
        """When `overdue` is to be asked next."""

    def begin(self, pages: Ids, slots: Slots, io_class: IoClass, now_ns: int) -> Read:
        staging = self._staging
        generations = staging.generation[slots] + 1
        staging.generation[slots] = generations
        staging.issued_ns[slots] = now_ns
        staging.ahead[slots] = np.arange(self.in_flight + 1, self.in_flight + 1 + len(slots))
        if not self.in_flight:
            self.meter.begin(now_ns)
        self.in_flight += len(slots)
        self._planner.spend(len(slots))
        deadline_ns = now_ns + self.timeout_ns
        self.look_ns = min(self.look_ns, deadline_ns)
        return Read(pages, slots, generations, io_class, deadline_ns)

    def end(self, event: Completed, now_ns: int) -> tuple[Slots, Mask]:
        """Those slots whose read has ended and still counts, and which of them are verified; the
        verified ones are readable from here on. What was given up returns to the free slots."""
        staging = self._staging
        slots, verified = event.slots, event.verified
        state = staging.state[slots]
        ours = staging.generation[slots] == event.generations
        current = ours & (state == READING)
        if not every(current):
            self._counters.stale += int(np.count_nonzero(~current))
            given_up = slots[ours & (state == ABANDONED)]
            self.given_up -= len(given_up)
            staging.free(given_up)
            slots, verified = slots[current], verified[current]
        self._planner.advance(now_ns)
        self.in_flight -= len(slots)
        # Only what somebody waits for is noticed at once; other completions may have lain about.
        pinned = staging.pins[slots] > 0
        awaiting = some(pinned)
        if awaiting:
            awaited = slots[pinned]
            self._planner.observe_reads(staging.ahead[awaited], now_ns - staging.issued_ns[awaited])
        if self.prefetching:
            self.prefetching -= int(np.count_nonzero(staging.prefetched[slots]))
            staging.prefetched[slots] = False
        whole = every(verified)
        staging.state[slots if whole else slots[verified]] = READY
        come = len(slots) if whole else int(np.count_nonzero(verified))
        self.meter.moved(come, now_ns, idle=not self.in_flight, awaited=awaiting)
        if self._counters.retried:
            staging.attempts[slots[verified]] = 0
        return slots, verified

    def overdue(self, now_ns: int) -> Slots:
        """Slots whose reads have not ended in time."""
        reading = np.flatnonzero(self._staging.state == READING)
        return reading[self._staging.issued_ns[reading] + self.timeout_ns <= now_ns]

    def give_up(self, slots: Slots) -> Cancel:
        """Forget these pages; nobody may wait for them any more."""
        self._counters.abandoned += len(slots)
        self.prefetching -= int(np.count_nonzero(self._staging.prefetched[slots]))
        self.in_flight -= len(slots)
        self.given_up += len(slots)
        self.meter.drop()
        self._staging.abandon(slots)
        return Cancel(slots)
