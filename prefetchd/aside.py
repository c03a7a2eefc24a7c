"""Slots that need not be looked at for some turns, since their pages are sure to be no victims.

Decides for how long a slot is left alone, and when it is looked at again. Knows no pages; what is
known of their odds is what lasts of them, which halves in `LASTING` turns at the soonest.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from prefetchd.history import BIAS, LASTING
from prefetchd.model import NO_IDS, Ids, Scores, Slots

WAITS = (8, 2)
"""Turns of its layer for which a slot is put aside: the most of these that it can be."""
LASTING_MIN = 0.05
"""At least so much of the log odds has to be left above what any page has."""


class Aside:
    """A turn of every layer comes once in `layers` turns."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        # By wait, in order: until after which turn, and which slots.
        self._queues: list[deque[tuple[int, Slots]]] = [deque() for _ in WAITS]

    def put(self, slots: Slots, lasting: Scores, chance: float, now: int) -> tuple[Slots, Ids]:
        """Put aside those of `slots` that keep more than this chance for long enough, and return
        these, and the places of the others. `now`: turns so far."""
        needed = max(math.log(chance / (1.0 - chance)) - BIAS, LASTING_MIN)
        parts = []
        others = np.arange(len(slots))
        for wait, queue in zip(WAITS, self._queues, strict=True):
            enough = lasting.take(others) >= np.float32(needed * 2.0 ** (wait / LASTING))
            mine = slots.take(others.take(enough.nonzero()[0]))
            queue.append((now + wait * self._layers, mine))
            parts.append(mine)
            others = others.take((~enough).nonzero()[0])
        return np.concatenate(parts), others

    def back(self, now: int) -> Slots:
        """Slots to be looked at again, perhaps some that hold another page by now."""
        back = []
        for queue in self._queues:
            while queue and queue[0][0] < now:
                back.append(queue.popleft()[1])
        return np.concatenate(back) if back else NO_IDS
