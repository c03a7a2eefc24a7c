"""Staged pages that come from callers instead of the device, and pages that have to go.

Decides whether there is room for what callers bring: never beyond its share of the slots, and not
while a demand lacks any. What came so stays until somebody says that it need not. Copies no bytes
and refuses to know what is written where; whoever offers pages does.
"""

from __future__ import annotations

import numpy as np

from prefetchd.demands import Demands
from prefetchd.foresight import Foresight
from prefetchd.model import Cleaned, Command, Fill, Filled, Forgotten, Ids, IoClass, StoreEvent
from prefetchd.observer import Observer
from prefetchd.staging import READY, Staging

_NEVER_NS = 1 << 62  # when a read began that cannot be overdue, since it is none


class Fills:
    """`slots_max`: how many slots may be kept."""

    def __init__(
        self,
        staging: Staging,
        demands: Demands,
        observer: Observer,
        foresight: Foresight,
        slots_max: int,
    ) -> None:
        self._staging = staging
        self._demands = demands
        self._observer = observer
        self._foresight = foresight
        self.slots_max = slots_max
        self.kept = 0
        """Slots that are kept for pages brought by callers."""

    def handle(self, event: StoreEvent) -> list[Command]:
        """Raises ValueError for pages offered that are here already."""
        if isinstance(event, Forgotten):
            self._foresight.forget(event.pages)
            self._observer.evicted(self._staging.forget(event.pages), by_prefetch=False)
            return []
        slots = self._staging.slot_of[event.pages]
        if isinstance(event, Filled):
            self._staging.state[slots] = READY
            self._demands.arrived(slots.astype(np.int64))
        elif isinstance(event, Cleaned):
            self._staging.pins[slots] -= 1
            self.kept -= len(slots)
        elif (slots >= 0).any():
            raise ValueError(f"page {event.pages[slots >= 0][0]} is offered, but here already")
        else:
            return self._offered(event.pages)
        return []

    def _offered(self, pages: Ids) -> list[Command]:
        """Slots that are like those of a read which can neither fail nor be overdue."""
        staging = self._staging
        too_many = self.kept + len(pages) > self.slots_max
        if too_many or self._demands.lacking() or not staging.has_room(len(pages)):
            return []
        slots, evicted = staging.place(pages, IoClass.WRITE_BACK)
        self._observer.evicted(evicted, by_prefetch=False)
        if len(slots) < len(pages):  # somebody reads what was to go
            staging.free(slots)
            return []
        staging.generation[slots] += 1
        staging.issued_ns[slots] = _NEVER_NS
        staging.pins[slots] += 1
        self.kept += len(slots)
        return [Fill(pages, slots)]
