"""Which staged page goes first: the contract, and the policies behind it.

A policy orders slots; it owns no bytes, pins nothing and reads no clock. The staging tells it in
batches what came, what was demanded and what went, and asks for victims among the slots it allows.
"""

from __future__ import annotations

from typing import ClassVar

from prefetchd.model import Geometry, Ids, Mask, PageHint, Scores, Slots


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
