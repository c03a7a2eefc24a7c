"""What came into staging and went out of it, until the eviction policy is told.

Decides that whoever brings a page does not wait for the policy. Refuses to know slots' states.
"""

from __future__ import annotations

from prefetchd.eviction import Eviction
from prefetchd.model import Ids, Slots


class Untold:
    def __init__(self) -> None:
        self._changes: list[tuple[Slots, Ids, bool | None]] = []  # None: gone; else if prefetched

    def came(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        self._changes.append((slots, pages, prefetched))

    def gone(self, slots: Slots, pages: Ids) -> None:
        self._changes.append((slots, pages, None))

    def tell(self, eviction: Eviction) -> None:
        """In the order in which it happened."""
        for slots, pages, prefetched in self._changes:
            if prefetched is None:
                eviction.removed(slots, pages)
            else:
                eviction.inserted(slots, pages, prefetched=prefetched)
        self._changes.clear()
