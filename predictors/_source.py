"""One source of `auto`: a predictor, and how far it has proved right.

Decides what a source's guesses are worth. Knows nothing of the other sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prefetchd.model import NO_IDS, Ids
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors._merging import Weighed, source_codes
from prefetchd.predictors._restraint import Holding

ENDED_DECAY = 0.998  # per prefetch that ended: the last 500 count
PRECISION_MIN = 1e-6  # however long it has been wrong: gains that only decay come to nothing


@dataclass(slots=True)
class Source:
    """One predictor, what became of its guesses (decayed), and how it uses its holding."""

    predictor: Predictor
    holding: Holding
    gains: float = 2.0
    ended: float = 4.0
    recent_gains: float = 0.0  # decayed by time and not by what ended, to compare volumes
    kept: Ids = field(default_factory=lambda: NO_IDS)  # what it asked to hold at the last pass,
    asked: Ids = field(default_factory=lambda: NO_IDS)  # and the sample's numbers of that

    @property
    def precision(self) -> float:
        return max(self.gains / self.ended, PRECISION_MIN)

    def count(self, ended: int, gains: int) -> None:
        decay = ENDED_DECAY**ended
        self.gains = self.gains * decay + gains
        self.ended = self.ended * decay + ended
        self.recent_gains += gains

    def weighed(self, number: int, guess: Guess, room: int) -> Weighed:
        """At most `room` pages of its guess, their scores, and codes that tell it apart."""
        pages = guess.pages[:room]
        sure = np.float32(0.5) if guess.confidence is None else guess.confidence[:room]
        return Weighed(
            pages,
            np.full(len(pages), self.precision, np.float32) * sure,
            source_codes(number, guess.sources, len(pages)),
            guess.deadline_ns,
            self.holding.earned(guess.keep),
        )
