"""The contract of a predictor: what it is told, and what it may say.

A predictor only guesses. It issues nothing, owns no slots, reads no clock and no file; the planner
drops what is already there, applies the budget and the bandwidth guard, and the core fetches.

The smallest predictor is a file with one class:

    from prefetchd.model import NO_IDS
    from prefetchd.predictor import Guess, Predictor

    class NextBlock(Predictor):
        last = NO_IDS
        def on_access(self, access):
            self.last = access.pages
        def predict(self, now_ns, limit):
            after = self.last + self.geometry.layers
            return Guess(after[after < self.geometry.pages][:limit])

`prefetchd predictor check ./mine.py` tries a file against all that stands here, and says what is
wrong; in tests it is `prefetchd.testing.check_predictor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from prefetchd.history import UseHistory
from prefetchd.model import (
    NO_IDS,
    Access,
    ChainHint,
    Codes,
    DoneHint,
    Feedback,
    Geometry,
    Ids,
    PageHint,
    Scores,
)


@dataclass(frozen=True, slots=True)
class Guess:
    """Pages that will be wanted, each once, best first; those that are resident are passed over.

    `confidence` (float32, 0..1, same length): the chance that the page will be demanded soon;
    None = no opinion. It falls, except with `restores`, where the order is that of need.
    `deadline_ns`: when they will be wanted, on the clock of `now_ns`.
    `sources` (uint8): which of several sub-predictors guessed each page, for feedback.
    `keep`: pages to hold in staging while they are there, each once, at most as many as slots
    (and bounded further by the planner).
    `restores`: requests that come back will need all of these in any case, or, as what chains of
    earlier requests foretell, so likely that a burst's budget would cost more than it spares. They
    are read as fast as the device goes, without budgets for bursts and leads, and also while
    another demand waits, as far as it leaves the device idle.

    The arrays are the receiver's: never write to them afterwards.
    """

    pages: Ids = field(default_factory=lambda: NO_IDS)
    confidence: Scores | None = None
    deadline_ns: int | None = None
    sources: Codes | None = None
    keep: Ids = field(default_factory=lambda: NO_IDS)
    restores: bool = False


class Predictor:
    """Base class: override what you need. Every hook gets whole batches of pages.

    `geometry` is the page space, `slots` the staging's size in pages: take memory in proportion
    to these and no more, however many requests come. Hooks must be deterministic: the same calls
    give the same guesses, in any process and under any hash seed. They read no clock and no file,
    and draw from no generator but a seeded one of their own. A file may be read in `__init__`.

    Ids that a hook is given are in range. Batches may be empty, a request may never be said to
    have ended, and `predict` may come before anything else. Arrays that a hook is given may be
    kept, as nobody writes to them: nor may the hook.
    """

    name: ClassVar[str] = ""
    """How it is chosen and reported; the class's name in lower case when empty."""

    by_past_use: ClassVar[bool] = False
    """Whether it guesses pages for having been used, and nothing else: an eviction policy that
    keeps a history makes up for that without reads."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        self.geometry = geometry
        self.slots = slots

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "on_access" in vars(cls) and "on_accesses" not in vars(cls):
            # An inherited short cut would pass by the new hook.
            cls.on_accesses = Predictor.on_accesses  # type: ignore[method-assign]

    def share(self, history: UseHistory) -> None:
        """Called before all else, where the eviction policy keeps such a history: read it instead
        of keeping one alike. It is told of a demand right after `on_access` of the same demand, or
        `on_accesses` of the same batch."""

    def on_access(self, access: Access) -> None:
        """Distinct pages were demanded: of one layer in decode, of any in a restore."""

    def on_accesses(self, accesses: Sequence[Access]) -> None:
        """Demands, oldest first: a single one, or several of one layer each and no layer twice.

        Override it only to be faster: what comes of it must be what would have come of
        `on_access` for each of them, but for rounding in confidences.
        """
        for access in accesses:
            self.on_access(access)

    def on_page_hint(self, hint: PageHint) -> None:
        """The engine has scored pages it will soon demand."""

    def on_chain_hint(self, hint: ChainHint) -> None:
        """The engine expects a request whose blocks are these."""

    def on_done_hint(self, hint: DoneHint) -> None:
        """A request has ended."""

    def on_feedback(self, feedback: Feedback) -> None:
        """Earlier guesses have turned out useful, late or wasted. `sources` are the guesses' own,
        0 where they had none."""

    def predict(self, now_ns: int, limit: int) -> Guess:
        """Return at most `limit` pages (0 or more), best first. Must not change what later calls
        see: the same call again gives the same guess, and any number of calls leave no trace. What
        was only worked out anew may be remembered; arrays that were given out stay as they are."""
        return Guess()


def in_range(guess: Guess, pages: int) -> Guess:
    """The guess without ids that no page has; they are the predictor's fault, not an error."""
    # A negative id is a huge one, seen so.
    if np.maximum.reduce(guess.pages.view(np.uint64)) < pages:
        return guess
    real = (guess.pages >= 0) & (guess.pages < pages)
    return Guess(
        guess.pages[real],
        None if guess.confidence is None else guess.confidence[real],
        guess.deadline_ns,
        None if guess.sources is None else guess.sources[real],
        guess.keep,
        guess.restores,
    )
