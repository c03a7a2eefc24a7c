"""The contract of an eviction policy: which staged page goes first.

A policy orders slots; it owns no bytes, pins nothing and reads no clock. The staging tells it in
batches what came, what was demanded and what went, and asks for victims among the slots it allows.

One demand is told in this order: `touched` with the pages that are resident, `victims` for the
rest, `removed` for those, `inserted` with the rest and `prefetched=False`. Being inserted that way
*is* that page's demand; a second `touched` in the same demand is allowed and changes little.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefetchd.model import NO_IDS, Geometry, Ids, Mask, PageHint, Scores, Slots


class Eviction:
    """Base class of eviction policies.

    The caller guarantees: a slot is inserted before it is touched, removed before it is inserted
    again, and appears at most once in a call; `pages[i]` is what `slots[i]` holds.
    """

    name: ClassVar[str] = ""

    def __init__(self, slots: int, geometry: Geometry) -> None:
        self.slots = slots
        self.geometry = geometry

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        """Pages were given slots (their bytes may still be on the way)."""
        raise NotImplementedError

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        """Resident pages were demanded, all in one batch of one layer as a rule."""
        raise NotImplementedError

    def removed(self, slots: Slots, pages: Ids) -> None:
        """Slots were emptied, by eviction or otherwise."""
        raise NotImplementedError

    def hinted(self, hint: PageHint) -> None:
        """The engine has scored pages it will soon demand (optional to use)."""

    def victims(self, count: int, allowed: Mask) -> Slots:
        """Up to `count` distinct slots for which `allowed` (bool, one a slot) holds, worst first.

        MUST return `min(count, allowed.sum())` slots.
        """
        raise NotImplementedError

    def worth(self, slots: Slots) -> Scores | None:
        """What is lost when each of these slots is emptied, on the scale of `Guess.confidence`.

        float32, one a slot: the chance that its page is demanded at its next turn, less a discount
        for the wait until then, so at most 1. None: the policy has no opinion. A prefetch is worth
        its slot when its confidence is above the worth of the victim it would push out.
        """
        return None


def oldest(slots: Slots, stamps: Ids, count: int) -> Slots:
    """The `count` slots with the smallest stamps (distinct, indexed by slot), smallest first."""
    count = min(count, len(slots))
    if count <= 0:
        return NO_IDS
    ages = stamps[slots]
    chosen = np.argpartition(ages, count - 1)[:count]
    return slots[chosen[np.argsort(ages[chosen])]]
