"""How long demanded pages were waited for: a histogram a layer, with buckets that never change.

Decides the buckets. Refuses to know who asks and what is shown. Of pages that were here only the
number is kept; answers that were waited for are put aside as they come and counted some at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Ids, Ready

BOUNDS_NS: NDArray[np.int64] = np.array(
    [1_000, *(step * 10**power for power in range(4, 10) for step in (1, 2, 5)), 10**10], np.int64
)
"""A wait belongs to the first bound that is not below it, or behind the last one. No read takes a
microsecond: the first bound is where pages that were here are shown."""

_PENDING_MAX = 64


class WaitCounts(msgspec.Struct, frozen=True):
    """`here`: pages that were not waited for. `counts`: of the others, layer by layer, one a
    bucket; the last has no bound. `sums_ns`: of all waits, layer by layer."""

    bounds_ns: list[int]
    here: int
    counts: list[list[int]]
    sums_ns: list[int]

    def totals(self) -> list[int]:
        """Pages a bucket, over all layers, those that were here in the first."""
        first, *rest = (sum(column) for column in zip(*self.counts, strict=True))
        return [self.here + first, *rest]


class Waits:
    """The caller sees to it that one thread at a time is in here."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._buckets = len(BOUNDS_NS) + 1
        self._here = 0
        self._counts = np.zeros(layers * self._buckets, np.int64)
        self._sums_ns = np.zeros(layers, np.int64)
        self._pending: list[tuple[Ids, Ready]] = []

    def add(self, pages: Ids, ready: Ready) -> None:
        """The answer to a demand for these pages."""
        if np.count_nonzero(ready.waits_ns):
            self._pending.append((pages, ready))
            if len(self._pending) >= _PENDING_MAX:
                self._fold()
        elif len(pages) and ready.slots[0] >= 0:  # else it was given up while it waited
            self._here += len(pages)

    def add_here(self, pages: int) -> None:
        """So many were read without asking."""
        self._here += pages

    def _fold(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        pages = np.concatenate([pages for pages, _ in pending])
        waits_ns = np.concatenate([ready.waits_ns for _, ready in pending])
        slots = np.concatenate([ready.slots for _, ready in pending])
        self._here += int(np.count_nonzero((waits_ns == 0) & (slots >= 0)))
        pages, waits_ns = pages[waits_ns > 0], waits_ns[waits_ns > 0]
        layers = pages % self._layers
        places = layers * self._buckets + np.searchsorted(BOUNDS_NS, waits_ns)
        self._counts += np.bincount(places, minlength=len(self._counts))
        np.add.at(self._sums_ns, layers, waits_ns)

    def snapshot(self) -> Callable[[], WaitCounts]:
        """As it is now; to be told at leisure, by any thread."""
        self._fold()
        here, counts, sums_ns = self._here, self._counts.copy(), self._sums_ns.copy()

        def told() -> WaitCounts:
            rows: Any = counts.reshape(self._layers, -1).tolist()
            return WaitCounts(BOUNDS_NS.tolist(), here, rows, sums_ns.tolist())

        return told
