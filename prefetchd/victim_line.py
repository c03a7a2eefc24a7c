"""Victims lined up ahead of their need, worst first.

Decides which of them go when some have come into use since they were chosen, and whether a page is
worth more than the next of them. Empties no slots, and refuses to know why one may not go.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prefetchd.eviction import Eviction
from prefetchd.line_length import LineLength
from prefetchd.masks import every
from prefetchd.model import NO_IDS, Mask, Scores, Slots

_SPARE = 8


class VictimLine:
    def __init__(self, slots: int) -> None:
        self.length = LineLength(slots)
        self._slots: Slots = NO_IDS
        self._worth: Scores | None = None  # one a victim, if the policy has an opinion

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def stale(self) -> bool:
        """Whether others may be worse than those that are left."""
        return self.length.stale(len(self._slots))

    def choose(self, eviction: Eviction, count: int, allowed: Mask) -> None:
        """Anew: `count` beside as many as are wanted ahead."""
        self._slots = eviction.victims(count + self.length.wanted, allowed)
        self.length.chosen(len(self._slots))
        self._worth = eviction.worth(self._slots)

    def take(self, count: int, may_go: Callable[[Slots], Mask]) -> Slots:
        """The first `count` that may go, or fewer."""
        # A few more than needed, since some may have come into use since they were chosen.
        line = self._slots[: count + _SPARE]
        good = may_go(line)
        victims, used = line[:count], count
        if not every(good[:count]):
            places = np.flatnonzero(good)[:count]
            victims = line[places]
            used = int(places[-1]) + 1 if len(places) else len(line)
        self._slots = self._slots[used:]
        if self._worth is not None:
            self._worth = self._worth[used:]
        return victims

    def worth_less(self, confidence: Scores) -> int:
        """How many pages, wanted with these chances, best first, are worth more than the next
        victims."""
        if self._worth is None:
            return len(confidence)
        count = min(len(confidence), len(self._worth))
        return _first_lower(confidence[:count], self._worth[:count], len(confidence))


def worse(eviction: Eviction, victims: Slots, confidence: Scores) -> Slots:
    """The first of `victims` (worst first) that are worth less than what would replace them."""
    worth = eviction.worth(victims)
    if worth is None:
        return victims
    return victims[: _first_lower(confidence[: len(victims)], worth, len(victims))]


def _first_lower(confidence: Scores, worth: Scores, otherwise: int) -> int:
    """Where a confidence is not above the worth beside it for the first time."""
    better = confidence > worth
    return otherwise if every(better) else int(np.argmin(better))
