"""Belady's optimum: the fewest misses any eviction without prefetch can have. A control.

Knows all demands beforehand. Tells nothing of time: a miss is a page that was not staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Ids
from prefetchd.predictors.oracle import earlier_positions

Demands = Sequence[Ids] | Ids
"""One array of distinct pages a demand, or one flat array (int64) where each asks for one page."""
NEVER = np.iinfo(np.int64).max


def belady_misses(demands: Demands, slots: int, *, first_is_put: bool = False) -> NDArray[np.int64]:
    """How many pages of each demand were absent (int64, one a demand), staging empty at first.

    Every demand must be served from the slots as a whole: room for its absent pages is made among
    the pages it does not ask for, those demanded latest in the future (or never) first. With
    `first_is_put` the first use of a page is not a demand but brings it: it is no miss, and it may
    be staged or not. Raises ValueError for a demand of more pages than there are slots.

    After Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
    """
    pages, sizes = _columns(demands)
    kept = _kept(pages, sizes, slots, first_is_put=first_is_put)
    missed = ~kept
    if first_is_put:
        missed[first_uses(pages)] = False
    return np.bincount(np.arange(len(sizes)).repeat(sizes)[missed], minlength=len(sizes))


def _columns(demands: Demands) -> tuple[Ids, NDArray[np.int64]]:
    """All pages in one array, and how many each demand asks for."""
    if isinstance(demands, np.ndarray):
        return demands, np.ones(len(demands), np.int64)
    sizes = np.array([len(demand) for demand in demands], np.int64)
    return np.concatenate([np.zeros(0, np.int64), *demands]), sizes


def next_uses(pages: Ids) -> NDArray[np.int64]:
    """For each use the number of the next use of its page; NEVER where there is none."""
    following = earlier_positions(pages[::-1])[::-1]  # counted from the end
    return np.where(following < 0, NEVER, len(pages) - 1 - following)


def first_uses(pages: Ids) -> Ids:
    """The number of the first use of every page."""
    first: Ids = np.unique(pages, return_index=True)[1]
    return first


def _kept(
    pages: Ids, sizes: NDArray[np.int64], slots: int, *, first_is_put: bool
) -> NDArray[np.bool_]:
    """For which uses (bool, one a use) the optimum has kept the page since its use before.

    From one use to the next a page takes a slot, or is not kept; what is kept over a demand fits
    the slots beside what that demand asks for. Letting go of what takes its slot longest leaves the
    most kept, whatever the moment one looks.
    """
    following = next_uses(pages)
    takes = np.ones(len(pages), np.bool_)
    if first_is_put:
        takes[first_uses(pages)] = False
    ends = np.cumsum(sizes)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(takes)])
    room = slots - (before[ends] - before[ends - sizes])
    if len(room) and room.min() < 0:
        number = int(np.argmin(room))
        raise ValueError(f"demand {number} asks for {slots - room[number]} pages of {slots} slots")
    flags = _keep(following.tolist(), ends.tolist(), room.tolist(), slots)
    return np.frombuffer(flags, np.bool_).copy()


def _keep(following: list[int], ends: list[int], room: list[int], slots: int) -> bytearray:
    """Which uses find their page kept. The heap holds what is kept, by its next use, latest first;
    what has been used stays in there, below all that still counts, so the top is always one that
    counts while any is left."""
    flags = bytearray(len(following))
    heap: list[int] = []
    count = start = 0
    # Room for the demand itself; what it leaves for later fits the slots as well.
    for end, fits in zip(ends, room, strict=True):
        count = _let_go(heap, flags, count - sum(flags[start:end]), fits)
        for due in following[start:end]:
            if due < NEVER:
                flags[due] = 1
                heappush(heap, -due)
                count += 1
        count = _let_go(heap, flags, count, slots)
        start = end
    return flags


def _let_go(heap: list[int], flags: bytearray, count: int, fits: int) -> int:
    while count > fits:
        flags[-heappop(heap)] = 0
        count -= 1
    return count
