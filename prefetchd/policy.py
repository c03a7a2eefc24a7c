"""The contract of an eviction policy: which staged page goes first.

A policy orders slots; it owns no bytes, pins nothing and reads no clock. The staging tells it in
batches what came, what was demanded and what went, and asks for victims among the slots it allows.

It is told late, in batches, when nothing urgent waits. A batch is one demand, or several of one
layer each and no layer twice, one after the other in one array. The order for a batch: `demanded`;
`removed` and `inserted`, with `prefetched=False`, for what made room and what came; `touched` with
all its pages that are here, those just inserted among them. What came may also be told before its
demand, where victims are wanted at once.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.history import UseHistory
from prefetchd.model import NO_IDS, Geometry, Ids, Mask, Scores, Slots

SAMPLED, SAMPLE_SPARE = 64, 8  # every so many values make the sample; ranks above the wanted one


class Eviction:
    """Base class of eviction policies.

    The caller guarantees: a slot is inserted before it is touched, removed before it is inserted
    again, and appears at most once in a call; `pages[i]` is what `slots[i]` holds.
    """

    name: ClassVar[str] = ""
    by_touch: bool = True
    """Whether `touched` tells it anything that `demanded` does not."""
    history: UseHistory | None = None
    """What it keeps of all demands, if it does, for a predictor to read as well."""

    def __init__(self, slots: int, geometry: Geometry) -> None:
        self.slots = slots
        self.geometry = geometry

    def demanded(self, pages: Ids, scores: Scores | None) -> None:
        """A batch was demanded: all its pages, resident or not (optional to use)."""

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        """Pages were given slots (their bytes may still be on the way)."""
        raise NotImplementedError

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        """Resident pages were demanded, in the order given."""
        raise NotImplementedError

    def returns(self, slots: Slots) -> None:
        """A request has ended and is likely to be back: these are its pages that are here, the
        deepest of its prefix first, which is the order in which they may go (optional to use)."""

    def rests(self, slots: Slots) -> None:
        """As `returns`, of one that is likely to be back later than any that `returns` (optional
        to use)."""

    def removed(self, slots: Slots, pages: Ids) -> None:
        """Slots were emptied, by eviction or otherwise."""
        raise NotImplementedError

    def expected(self, pages: Ids, chances: Scores) -> None:
        """A predictor gives these pages such chances (0..1) to be demanded at the next turn of
        their layer, whether they are here or not (optional to use). Replaces what it said before
        of the same layer."""

    def victims(self, count: int, allowed: Mask) -> Slots:
        """Up to `count` distinct slots for which `allowed` (bool, one a slot) holds, worst first.

        MUST return `min(count, allowed.sum())` slots.
        """
        raise NotImplementedError

    def worth(self, slots: Slots) -> Scores | None:
        """What is lost when a prefetch empties each of these slots, on a scale of 0 to 1.

        float32, one a slot, as things stood when `victims` was last asked: the chance that its
        page is demanded at its next turn, discounted for
        the wait and for being fetched back in time. None: the policy has no opinion. A prefetch is
        worth a slot while its `Guess.confidence` exceeds this: with guesses best first and victims
        worst first, the prefetches to make are `confidence > worth(victims)`, a prefix.
        """
        return None


def oldest(slots: Slots, stamps: Ids, count: int) -> Slots:
    """The `count` slots with the smallest stamps (distinct, indexed by slot), smallest first."""
    return slots[smallest(stamps[slots], count)]


def least(chances: Scores, count: int) -> Ids:
    """The places of the `count` smallest chances (none is negative), as of `smallest`."""
    # Seen as whole numbers, with its place below it, each is another, and sorted fast.
    keys = chances.view(np.int32).astype(np.int64)
    keys <<= 32
    keys += np.arange(len(keys))
    if count < len(keys):
        keys = np.partition(keys, count - 1)[:count]
    keys.sort()
    keys &= (1 << 32) - 1
    return keys


def smallest(values: NDArray[np.int64], count: int) -> Ids:
    """The places of the `count` smallest values, smallest first; of equal ones the first.

    To order all slots for a few victims is what costs. A sample tells a bound that a few times as
    many values as wanted lie below, and only those are looked at; if they prove too few, all are.
    """
    count = min(count, len(values))
    if count <= 0:
        return NO_IDS
    places: Ids | None = None
    if count < len(values) // SAMPLED:
        sample = values[::SAMPLED]
        rank = min(2 * count // SAMPLED + SAMPLE_SPARE, len(sample) - 1)
        near = np.flatnonzero(values <= np.partition(sample, rank)[rank])
        if count <= len(near) < len(values):
            places, values = near, values[near]
    most = np.partition(values, count - 1)[count - 1]
    below = np.flatnonzero(values < most)
    equal = np.flatnonzero(values == most)[: count - len(below)]
    chosen = np.concatenate([below[np.argsort(values[below], kind="stable")], equal])
    return chosen if places is None else places[chosen]
