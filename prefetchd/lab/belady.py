"""Belady's optimum: the fewest misses any eviction without prefetch can have. A control.

Knows all demands beforehand. Tells nothing of time: a miss is a page that was not staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Ids, Mask

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
    pages, sizes = columns(demands)
    kept = belady_kept(pages, sizes, slots, first_is_put=first_is_put)
    missed = ~kept
    if first_is_put:
        missed[first_uses(pages)] = False
    return np.bincount(np.arange(len(sizes)).repeat(sizes)[missed], minlength=len(sizes))


def columns(demands: Demands) -> tuple[Ids, NDArray[np.int64]]:
    """All pages in one array, and how many each demand asks for."""
    if isinstance(demands, np.ndarray):
        return demands, np.ones(len(demands), np.int64)
    sizes = np.array([len(demand) for demand in demands], np.int64)
    return np.concatenate([np.zeros(0, np.int64), *demands]), sizes


def next_uses(pages: Ids) -> NDArray[np.int64]:
    """For each use the number of the next use of its page; NEVER where there is none."""
    order = np.argsort(pages, kind="stable")
    again = pages[order[1:]] == pages[order[:-1]]
    following = np.full(len(pages), NEVER, np.int64)
    following[order[:-1][again]] = order[1:][again]
    return following


def first_uses(pages: Ids) -> Ids:
    """The number of the first use of every page."""
    first: Ids = np.unique(pages, return_index=True)[1]
    return first


def belady_kept(
    pages: Ids,
    sizes: NDArray[np.int64],
    slots: int,
    *,
    first_is_put: bool,
    wanted: Mask | None = None,
    until: NDArray[np.int64] | None = None,
) -> Mask:
    """For which uses (bool, one a use) the optimum has kept the page since its use before.

    `wanted`: uses for which that is of any value; it keeps as many of these as can be. `until`: for
    each use the number of the use, itself or an earlier one, from which on its page takes no slot.

    From one use to the next a page takes a slot, or is not kept; what is kept over a demand fits
    the slots beside what that demand asks for. Letting go of what takes its slot longest leaves the
    most kept, whatever the moment one looks.
    """
    following = next_uses(pages)
    again = following < NEVER
    if wanted is not None:
        again[again] = wanted[following[again]]
    following[~again] = -1
    frees = following if until is None else np.where(again, until[following], -1)
    takes = np.ones(len(pages), np.bool_)
    if first_is_put:
        takes[first_uses(pages)] = False
    ends = np.cumsum(sizes)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(takes)])
    room = slots - (before[ends] - before[ends - sizes])
    if len(room) and room.min() < 0:
        number = int(np.argmin(room))
        raise ValueError(f"demand {number} asks for {slots - room[number]} pages of {slots} slots")
    flags = _keep(following.tolist(), frees.tolist(), ends.tolist(), room.tolist(), slots)
    return np.frombuffer(flags, np.bool_).copy()


def _keep(
    following: list[int], frees: list[int], ends: list[int], room: list[int], slots: int
) -> bytearray:
    """Which uses find their page kept. The heap holds what is kept, by when it frees its slot,
    latest first; what has freed it stays in there, below all that still counts, so the top is
    always one that counts while any is left."""
    uses = len(following)
    flags, freed = bytearray(uses), [0] * uses
    heap: list[int] = []
    count = start = 0
    # Room for the demand itself; what it leaves for later fits the slots as well.
    for end, fits in zip(ends, room, strict=True):
        for use in range(start, end):
            count -= freed[use]
        count = _let_go(heap, flags, freed, count, fits)
        for use in range(start, end):
            due, at = following[use], frees[use]
            if due < 0:
                continue
            flags[due] = 1
            if at >= end:
                heappush(heap, -(at * uses + due))
                freed[at] += 1
                count += 1
        count = _let_go(heap, flags, freed, count, slots)
        start = end
    return flags


def _let_go(heap: list[int], flags: bytearray, freed: list[int], count: int, fits: int) -> int:
    while count > fits:
        at, due = divmod(-heappop(heap), len(flags))
        flags[due] = 0
        freed[at] -= 1
        count -= 1
    return count
