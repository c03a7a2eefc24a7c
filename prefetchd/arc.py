"""ARC in batches: a list for pages used once, one for pages used again, and ghosts of both.

After Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). It
decides how much room each list deserves from hits on the ghosts; it knows nothing of layers or
hints.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import NO_IDS, Geometry, Ids, Mask, Scores, Slots
from prefetchd.policy import Eviction, oldest

EMPTY, ONCE, AGAIN = 0, 1, 2


class Arc(Eviction):
    """Adaptive replacement: `_target` slots for pages used once, moved by hits on either ghost.

    Told of a demand of one page before room is made for it, this is the paper's algorithm to the
    page. A batch is judged as a whole: the target moves by the sum of what its ghost hits would
    have moved it, at the ghost sizes before the batch; and where victims are chosen before the
    demand has been told, as the core does, with the target as it stood until then. The paper knows
    no prefetch: a page enters as used once, unless it has a ghost, and its first demand after that
    is not yet a second use; only demands move the target, since a prefetch of a ghost is a guess.
    """

    name: ClassVar[str] = "arc"

    def __init__(self, slots: int, geometry: Geometry) -> None:
        super().__init__(slots, geometry)
        self._empty = np.arange(-slots, 0, dtype=np.int64)
        self._used = self._empty.copy()
        self._clock = 0
        self._list = np.zeros(slots, np.int8)
        self._awaited = np.zeros(slots, np.bool_)  # inserted, and not demanded since
        self._target = 0.0
        self._told = NO_IDS  # ghosts of the demand at hand, which have moved the target
        self._tie_to_once = False  # at the target, since the demand at hand is of ghosts of AGAIN
        # Ghosts: per page which list it left, and per list the pages, the longest gone first.
        self._ghost_of = np.zeros(geometry.pages, np.int8)
        self._ghosts: dict[int, Ids] = {ONCE: NO_IDS, AGAIN: NO_IDS}

    def demanded(self, pages: Ids, scores: Scores | None) -> None:
        self._told = pages[self._ghost_of[pages] != EMPTY]
        self._tie_to_once = self._adapt(self._ghost_of[self._told])

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        left = self._ghost_of[pages]
        if not prefetched and left.any():
            self._adapt(left[~np.isin(pages, self._told)])
        self._list[slots] = np.where(left == EMPTY, ONCE, AGAIN)
        self._awaited[slots] = True
        self._stamp(slots)
        if left.any():
            self._ghost_of[pages] = EMPTY
            for which, ghosts in self._ghosts.items():
                self._ghosts[which] = ghosts[self._ghost_of[ghosts] == which]
        self._bound()

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        self._list[slots[~self._awaited[slots]]] = AGAIN
        self._awaited[slots] = False
        self._stamp(slots)
        self._told, self._tie_to_once = NO_IDS, False

    def returns(self, slots: Slots) -> None:
        self._stamp(slots)

    def removed(self, slots: Slots, pages: Ids) -> None:
        which = self._list[slots]
        self._ghost_of[pages] = which
        for kind in (ONCE, AGAIN):
            self._ghosts[kind] = np.concatenate([self._ghosts[kind], pages[which == kind]])
        self._list[slots] = EMPTY
        self._awaited[slots] = False
        self._used[slots] = self._empty[slots]
        self._bound()

    def victims(self, count: int, allowed: Mask) -> Slots:
        once = np.flatnonzero(allowed & (self._list == ONCE))
        again = np.flatnonzero(allowed & (self._list == AGAIN))
        empty = np.flatnonzero(allowed & (self._list == EMPTY))[:count]
        count = min(count - len(empty), len(once) + len(again))
        beyond = np.count_nonzero(self._list == ONCE) - self._target
        excess = int(np.floor(beyond)) + 1 if self._tie_to_once else int(np.ceil(beyond))
        from_once = min(count, len(once), max(excess, count - len(again), 0))
        return np.concatenate(
            [
                empty,
                oldest(once, self._used, from_once),
                oldest(again, self._used, count - from_once),
            ]
        )

    def _stamp(self, slots: Slots) -> None:
        self._used[slots] = np.arange(self._clock, self._clock + len(slots))
        self._clock += len(slots)

    def _adapt(self, left: NDArray[np.int8]) -> bool:
        """Move the target for demanded pages, given the lists that their ghosts are of. Whether
        any is of pages used again."""
        once_hits, again_hits = int(np.sum(left == ONCE)), int(np.sum(left == AGAIN))
        once, again = len(self._ghosts[ONCE]), len(self._ghosts[AGAIN])
        if once_hits:
            self._target += once_hits * max(1.0, again / once)
        if again_hits:
            self._target -= again_hits * max(1.0, once / again)
        self._target = min(max(self._target, 0.0), float(self.slots))
        return again_hits > 0

    def _bound(self) -> None:
        """Pages used once and their ghosts fit the slots; all pages and ghosts fit twice that."""
        once = int(np.count_nonzero(self._list == ONCE))
        held = int(np.count_nonzero(self._list))
        self._trim(ONCE, self.slots - once)
        self._trim(AGAIN, 2 * self.slots - held - len(self._ghosts[ONCE]))

    def _trim(self, which: int, room: int) -> None:
        ghosts = self._ghosts[which]
        if len(ghosts) > room:
            cut = len(ghosts) - max(room, 0)
            self._ghost_of[ghosts[:cut]] = EMPTY
            self._ghosts[which] = ghosts[cut:]
