"""Belady's optimum: the fewest misses any eviction without prefetch can have. A control.

Knows all demands beforehand. Tells nothing of time: a miss is a page that was not staged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Ids


def belady_misses(demands: Sequence[Ids], slots: int) -> NDArray[np.int64]:
    """How many pages of each demand were absent (int64, one a demand), staging empty at first.

    Every demand must be served from the slots as a whole: room for its absent pages is made among
    the pages it does not ask for, those demanded latest in the future (or never) first. The pages
    of one demand are distinct. Raises ValueError for a demand of more pages than there are slots.

    After Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
    """
    pages = 1 + max((int(demand.max()) for demand in demands if len(demand)), default=-1)
    next_use = _next_uses(demands, pages)
    slot_of = np.full(pages, -1, np.int64)
    page_of = np.full(slots, -1, np.int64)
    due = np.full(slots, len(demands) + 1, np.int64)  # an empty slot is better than any page
    misses = np.zeros(len(demands), np.int64)
    for number, demand in enumerate(demands):
        if len(demand) > slots:
            raise ValueError(f"demand {number} asks for {len(demand)} pages of {slots} slots")
        due[slot_of[demand][slot_of[demand] >= 0]] = -1  # asked for now: never a victim
        absent = demand[slot_of[demand] < 0]
        count = misses[number] = len(absent)
        if count:
            victims = np.argpartition(-due, count - 1)[:count]
            gone = page_of[victims]
            slot_of[gone[gone >= 0]] = -1
            page_of[victims] = absent
            slot_of[absent] = victims
        due[slot_of[demand]] = next_use[number]
    return misses


def _next_uses(demands: Sequence[Ids], pages: int) -> list[Ids]:
    """For each page of each demand, the number of the next demand that asks for it."""
    coming = np.full(pages, len(demands), np.int64)
    next_use: list[Ids] = []
    for number in range(len(demands) - 1, -1, -1):
        next_use.append(coming[demands[number]])
        coming[demands[number]] = number
    return next_use[::-1]
