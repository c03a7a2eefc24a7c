"""How guesses of several sources become one: order, duplicates, and who said what.

Decides nothing about anybody's worth; pure functions over arrays.
"""

from __future__ import annotations

import numpy as np

from prefetchd.model import NO_IDS, Codes, Ids, Scores

SOURCES_MAX = 16  # a page's source code is this x the source's own code + the source's number


def source_codes(number: int, own: Codes | None, count: int) -> Codes:
    """What tells the source of each page, and the source's own code in it."""
    if own is None:
        return np.full(count, number, np.uint8)
    return own[:count] % SOURCES_MAX * np.uint8(SOURCES_MAX) + np.uint8(number)


def best_first(pages: Ids, scores: Scores) -> Ids:
    """Places in `pages` by falling score, each page at its best place only."""
    order = np.argsort(-scores, kind="stable")
    _, first = np.unique(pages[order], return_index=True)
    best: Ids = order[np.sort(first)]
    return best


def each_once(parts: list[Ids]) -> Ids:
    """All pages in the order given, each at its first place only."""
    if len(parts) < 2:
        return parts[0] if parts else NO_IDS
    every = np.concatenate(parts)
    _, first = np.unique(every, return_index=True)
    return every[np.sort(first)]
