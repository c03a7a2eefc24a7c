"""Sparse attention's far pages: what the engine hints, by rank.

Decides how likely each hinted page is, from what came true of earlier hints, and leaves unsaid what
is too unlikely; a predictor whose guesses prove useless is cut further, down to a rare trial.
Refuses to guess without a hint: what a page's past says of it is the eviction's business, and to
read pages by it costs more bytes than the misses it spares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from prefetchd.hints import HintOdds
from prefetchd.history import UseHistory
from prefetchd.layer_turns import one_turn, turns_of
from prefetchd.model import Access, Feedback, Geometry, Ids, PageHint, Scores, Verdict
from prefetchd.predictor import Guess, Predictor

FLOOR = 0.05
"""A guess less likely than this is not made. A hint covers nearly all that is needed, so its tail
still pays at one use in many reads."""
LEARN_DEMANDS = 7
"""It learns from one demand in so many; a prime, so that every layer gets its share."""
PRECISION_ENOUGH = 0.05
"""Right less often than this, its confidence is cut in proportion. Even good hints are right only
once in eight where staging is roomy, as most of what they say is there already."""
START_RIGHT = 4.0
MEMORY = 0.998
"""Per verdict: the last 500 count."""
TRUST_MIN = 0.01
"""However long it has been wrong: far too little to guess by, and still a number."""
TRIAL_DEMANDS = 32
"""When distrusted it may make one guess in so many demands."""


class Attention(Predictor):
    name: ClassVar[str] = "attention"

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self._history = UseHistory(geometry)
        self._hints = HintOdds(geometry, self._history)
        self._own = True  # nobody else tells the history
        self._layer = -1  # of the latest demand; -1 before the first
        self._hinted: tuple[int, Ids, Scores] | None = None  # a layer's pages, until its turn
        self._right = self._ended = START_RIGHT
        self._demands = 0

    def share(self, history: UseHistory) -> None:
        self._history = history
        self._hints = HintOdds(self.geometry, history)
        self._own = False

    def on_access(self, access: Access) -> None:
        self._told((access,))

    def on_accesses(self, accesses: Sequence[Access]) -> None:
        self._told(accesses)

    def _told(self, accesses: Sequence[Access]) -> None:
        """A history of its own is told in batches, and before it is asked; one that is shared is
        told by whoever keeps it, afterwards."""
        for access in accesses:
            self._demands += 1
            learns = self._demands % LEARN_DEMANDS == 0
            if len(accesses) > 1 and not learns:  # of one layer, and nobody asks which blocks
                if len(access.pages):
                    self._follow(int(access.pages[0]) % self.geometry.layers)
                continue
            turns = self._turns(access.pages)
            if learns and turns:
                # Of many layers each has its turn.
                layer, blocks = turns[self._demands // LEARN_DEMANDS % len(turns)]
                self._learn(layer, blocks)
            for layer, _ in turns:
                self._follow(layer)
        if self._own:
            self._record(accesses)

    def _turns(self, pages: Ids) -> list[tuple[int, Ids]]:
        """Layer and blocks of each turn in a demand."""
        if one := one_turn(pages, self.geometry):
            return [one]
        return [one for turns, _ in turns_of(pages, self.geometry) for one in turns.each()]

    def _record(self, accesses: Sequence[Access]) -> None:
        if not accesses:
            return
        for turns, _ in turns_of(np.concatenate([a.pages for a in accesses]), self.geometry):
            self._history.demanded(turns)

    def _learn(self, layer: int, blocks: Ids) -> None:
        """Compare what was thought with what the turn that begins now demands."""
        if not self._goes_on(layer) and self._hints.foretold(layer):
            self._hints.learn(layer, blocks)

    def _goes_on(self, layer: int) -> bool:
        return layer == self._layer and self.geometry.layers > 1

    def _follow(self, layer: int) -> None:
        self._layer = layer
        if self._hinted is not None and self._hinted[0] == layer:
            self._hinted = None

    def on_page_hint(self, hint: PageHint) -> None:
        """Only the latest hint counts: what an older one foretold has been demanded by now, or was
        already read for; demands may be shown a few layers late."""
        pages = hint.pages
        if len(pages) == 0:
            return
        layer = int(pages[0]) % self.geometry.layers
        self._hinted = (layer, pages, self._hints.chances(pages, layer))

    def on_feedback(self, feedback: Feedback) -> None:
        right = feedback.verdicts != np.uint8(Verdict.WASTED)
        ended = len(right)
        if ended:
            fade = MEMORY**ended
            self._ended = self._ended * fade + ended
            self._right = self._right * fade + int(np.count_nonzero(right))

    def predict(self, now_ns: int, limit: int) -> Guess:
        """As many hinted pages (most likely first) as are likely enough to be said."""
        if self._hinted is None:
            return Guess()
        _, pages, chance = self._hinted
        trust = min(1.0, max(self._right / self._ended / PRECISION_ENOUGH, TRUST_MIN))
        if trust < 1.0:
            chance = chance * np.float32(trust)
        likely = int(np.count_nonzero(chance >= np.float32(FLOOR)))
        if likely == 0 and self._demands % TRIAL_DEMANDS == 0:
            likely = 1
        likely = min(likely, limit)
        return Guess(pages[:likely], chance[:likely])
