"""Least recently used first: the plainest eviction, and what the others are measured against.

Decides by the order of use alone, and what rests goes before what does not; it knows nothing of
how often, of layers or of hints.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefetchd.model import Geometry, Ids, Mask, Scores, Slots
from prefetchd.policy import Eviction, oldest

_RESTS = -(1 << 62)  # stamps from here on are of pages at rest


class Lru(Eviction):
    """Least recently used first; within one batch the first page asked for counts as the oldest."""

    name: ClassVar[str] = "lru"

    def __init__(self, slots: int, geometry: Geometry) -> None:
        super().__init__(slots, geometry)
        # Empty slots are older than anything, and distinct, so that every order is a strict one.
        self._empty = np.arange(-slots, 0, dtype=np.int64)
        self._used = self._empty.copy()
        self._clock = 0
        self._rest_clock = _RESTS

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        self._stamp(slots)

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        self._stamp(slots)

    def returns(self, slots: Slots) -> None:
        self._stamp(slots)

    def rests(self, slots: Slots) -> None:
        """Older than all that was used, in the order in which they came to rest."""
        self._used[slots] = np.arange(self._rest_clock, self._rest_clock + len(slots))
        self._rest_clock += len(slots)

    def removed(self, slots: Slots, pages: Ids) -> None:
        self._used[slots] = self._empty[slots]

    def victims(self, count: int, allowed: Mask) -> Slots:
        candidates = np.flatnonzero(allowed)
        return oldest(candidates, self._used, count)

    def _stamp(self, slots: Slots) -> None:
        self._used[slots] = np.arange(self._clock, self._clock + len(slots))
        self._clock += len(slots)
