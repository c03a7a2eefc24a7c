"""Which slots may be victims: those of least chance, a few times as many as are wanted at once.

Decides who is looked at when victims are chosen, so that not all slots are. The bound is found from
a sample of all; from then on the slots below it are kept up to date as chances change, and all are
looked at again only when these are too few or too many. Knows neither pages nor what makes a
chance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import NO_IDS, Mask, Scores, Slots
from prefetchd.policy import SAMPLE_SPARE, SAMPLED

SOME = 4
"""So many times the victims that are wanted are below a new bound, about."""
TOO_MANY, TOO_MANY_ANYWAY = 24, 2 * SAMPLE_SPARE * SAMPLED
"""Times the victims that are wanted, and so many besides: then a new bound is found."""
ROUNDED = np.float32(1.00001)


class Lowest:
    """`chance` (float32, one a slot) is the policy's, which changes it and says so."""

    def __init__(self, chance: Scores) -> None:
        self._chance = chance
        self._below: Slots = NO_IDS  # in order
        self.bound = np.float32(-1.0)
        """Every slot whose chance is not above it is among `below`."""

    @property
    def bounded(self) -> bool:
        """Whether any slot is left out."""
        return bool(self.bound < np.inf)

    def below(self, allowed: Mask) -> Slots:
        """Slots of least chance that are allowed, in order."""
        if not self.bounded:
            return allowed.nonzero()[0]
        return self._below.take(allowed.take(self._below).nonzero()[0])

    def changed(self, changed: Mask, slots: Slots, layer: NDArray[np.unsignedinteger]) -> None:
        """New chances of all slots of some layers (`changed`, by layer) that may be below.

        `layer`: of each slot.
        """
        if not self.bounded or self.bound < 0:
            return
        stay = (~changed).take(layer.take(self._below)).nonzero()[0]
        come = (self._chance.take(slots) <= self.bound).nonzero()[0]
        self._below = np.concatenate([self._below.take(stay), slots.take(come)])
        self._below.sort()

    def search(self, worth: Scores, count: int, least: np.float32) -> None:
        """Find a bound for so many victims. `worth` (of a sample): chances times a discount that is
        nowhere below `least`."""
        rank = SOME * count // SAMPLED + SAMPLE_SPARE
        if rank >= len(worth):
            self.take_all()
        else:
            # No discount is less than the least, so what is worth no more is among these.
            self.bound = np.partition(worth, rank)[rank] / least * ROUNDED
            (self._below,) = (self._chance <= self.bound).nonzero()

    def too_many(self, near: Slots, count: int) -> bool:
        """Whether these are more than is worth looking at for so many victims."""
        return len(near) > TOO_MANY * count + TOO_MANY_ANYWAY

    def forget(self) -> None:
        """Keep no list: where very many chances are the same, it is longer than it is worth."""
        self._below, self.bound = NO_IDS, np.float32(-1.0)

    def take_all(self) -> None:
        self._below, self.bound = NO_IDS, np.float32(np.inf)
