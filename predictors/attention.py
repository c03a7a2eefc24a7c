"""Sparse attention's far pages: what the engine hints, or else what its own past suggests.

With a hint for the layer to come, guesses its pages by their rank. Without one, weighs the pages
that layer used lately and those of the blocks, and their neighbours in the text, that the layers
just before it used. Chances are learned from what came true, and a source whose guesses
prove useless is cut further; what is left below a floor is not said at all. With no precision it
falls silent, but for a rare guess to find out whether that has changed.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np

from prefetchd.hints import HintOdds
from prefetchd.history import UseHistory, by_layer
from prefetchd.model import Access, Feedback, Geometry, Ids, PageHint, Scores, Verdict
from prefetchd.odds import Features, Odds
from prefetchd.predictor import Guess, Predictor

HINT, HISTORY = 0, 1
"""The numbers of its sources."""
FLOORS = (0.08, 0.15)
"""A guess less likely than this is not made, by source. A hint covers nearly all that is needed, so
its tail still pays at one use in many reads; the tail of a mere history has no end."""
RECENT_TURNS = 8
"""Turns of a layer whose pages are weighed again."""
RECENT_DEMANDS = 3
"""Latest demands, of whatever layer, whose blocks are weighed for the next."""
NEW_TURNS = 64
"""A page unused for so many turns is as good as never used."""
ALL_LAYERS_HEAT = 0.8
"""The heat of a block that the last eight layers all used, as they do with the newest text."""
START = (0.0, 1.0, 0.0, 2.0)
"""Log odds of a page without a hint: constant, its history, its block's heat, and whether it is a
new page of a block that all layers use."""
LEARN_DEMANDS = 7
"""It learns from one demand in so many; a prime, so that every layer gets its share."""
PRIOR_SAMPLES = 200.0
PRECISION_ENOUGH = (0.05, 0.12)
"""A source right less often than this has its confidence cut in proportion. Even good hints are
right only once in eight where staging is roomy, as most of what they say is there already."""
START_RIGHT = 4.0
MEMORY = 0.998
"""Per verdict: the last 500 count."""
TRIAL_DEMANDS = 32
"""A distrusted source may make one guess in so many demands."""


class Attention(Predictor):
    name: ClassVar[str] = "attention"

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        layers = geometry.layers
        self._history = UseHistory(geometry)
        self._hints = HintOdds(geometry, self._history)
        self._hinted: tuple[int, Ids, Scores] | None = None  # a layer's pages, until its turn
        self._sources = [np.full(128, source, np.uint8) for source in (HINT, HISTORY)]
        self._next_layer = (np.arange(layers) + 1) % layers
        self._recent = [deque[Ids](maxlen=RECENT_TURNS) for _ in range(layers)]
        self._latest: deque[Ids] = deque(maxlen=RECENT_DEMANDS)
        self._odds = Odds(START, PRIOR_SAMPLES)
        self._right = np.full(2, START_RIGHT)
        self._ended = np.full(2, START_RIGHT)
        self._demands = 0

    def on_access(self, access: Access) -> None:
        self._demands += 1
        for layer, mine in by_layer(access.pages, self.geometry):
            self._demanded(access.pages[mine], layer)

    def _demanded(self, pages: Ids, layer: int) -> None:
        history, before = self._history, self._history.layer
        if layer == before and self.geometry.layers > 1:
            history.used(pages)
            return
        learning = before >= 0 and self._demands % LEARN_DEMANDS == 0
        weighed = self._weigh(layer) if learning else None
        if before >= 0:
            self._next_layer[before] = layer
        history.turn_to(layer)
        history.used(pages)
        if self._hinted is not None and self._hinted[0] == layer:
            self._hinted = None
        self._recent[layer].append(pages)
        self._latest.append(self.geometry.block_of(pages))
        if self._demands % LEARN_DEMANDS == 0:
            self._hints.learn(layer)
        if weighed is not None:
            self._odds.learn(weighed[1], history.used_this_turn(weighed[0]))

    def on_page_hint(self, hint: PageHint) -> None:
        """Only the latest hint counts: what an older one foretold has been demanded by now, or was
        already read for; demands may be shown a few layers late."""
        pages = hint.pages
        if len(pages) == 0:
            return
        layer = int(pages[0]) % self.geometry.layers
        self._hinted = (layer, pages, self._hints.chances(pages, layer))

    def on_feedback(self, feedback: Feedback) -> None:
        right = feedback.verdicts != Verdict.WASTED
        for source in (HINT, HISTORY):
            mine = feedback.sources == source
            ended = int(np.count_nonzero(mine))
            if ended:
                fade = MEMORY**ended
                self._ended[source] = self._ended[source] * fade + ended
                self._right[source] = self._right[source] * fade + np.count_nonzero(right & mine)

    def predict(self, now_ns: int, limit: int) -> Guess:
        if self._hinted is not None:
            _, pages, chance = self._hinted
            return self._guess(pages, chance, HINT, limit)
        if self._history.layer < 0:
            return Guess()
        pages, features = self._weigh(int(self._next_layer[self._history.layer]))
        chance = self._odds.chance(features)
        order = np.argsort(-chance, kind="stable")
        return self._guess(pages[order], chance[order], HISTORY, limit)

    def _guess(self, pages: Ids, chance: Scores, source: int, limit: int) -> Guess:
        """As many of `pages` (most likely first) as are likely enough to be said."""
        trust = min(1.0, self._right[source] / self._ended[source] / PRECISION_ENOUGH[source])
        likely = int(np.count_nonzero(chance >= np.float32(FLOORS[source] / trust)))
        if likely == 0 and self._demands % TRIAL_DEMANDS == 0:
            likely = 1
        likely = min(likely, limit)
        confidence = chance[:likely]
        if trust < 1.0:
            confidence = confidence * np.float32(trust)
        if likely > len(self._sources[source]):
            self._sources[source] = np.full(2 * likely, source, np.uint8)
        return Guess(pages[:likely], confidence, sources=self._sources[source][:likely])

    def _weigh(self, layer: int) -> tuple[Ids, Features]:
        """Candidates for the coming turn of `layer`, and what speaks for each.

        What it used in its latest turn is not among them: that is here if anything is.
        """
        history = self._history
        pages = self._candidates(layer)
        turns = history.turns_since_use(pages)
        pages, turns = pages[turns > 0], turns[turns > 0]
        features = np.ones((len(pages), 4))
        features[:, 1] = history.log_odds(pages)
        features[:, 2] = history.heat(self.geometry.block_of(pages))
        features[:, 3] = (features[:, 2] > ALL_LAYERS_HEAT) & (turns > NEW_TURNS)
        return pages, features

    def _candidates(self, layer: int) -> Ids:
        """Pages of `layer` that it used lately, or whose block or its neighbour is in use now."""
        layers, blocks = self.geometry.layers, np.concatenate(list(self._latest))
        near = np.concatenate([blocks - 1, blocks, blocks + 1])
        near = near[(near >= 0) & (near < self.geometry.blocks)]
        found: Ids = np.unique(np.concatenate([near * layers + layer, *self._recent[layer]]))
        return found
