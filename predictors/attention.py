"""Sparse attention's far pages: what the engine hints, or else what its own past suggests.

With a hint for the layer to come, guesses its pages by their rank. Without one, weighs the pages
that layer used lately and those of the blocks, and their neighbours in the text, that the layers
just before it used. Chances are learned from what came true, and a source whose guesses
prove useless is cut further; what is left below a floor is not said at all. With no precision it
falls silent, but for a rare guess to find out whether that has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from prefetchd.hints import HintOdds, among
from prefetchd.history import UseHistory, one_turn, turns_of
from prefetchd.model import Access, Feedback, Geometry, Ids, PageHint, Scores, Verdict
from prefetchd.odds import Features, Odds
from prefetchd.predictor import Guess, Predictor

HINT, HISTORY = 0, 1
"""The numbers of its sources."""
FLOORS = (0.05, 0.15)
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
"""It learns from one demand in so many; a prime, so that every layer gets its share. Its hint is
compared with what came, or, where there was none, what its history made likely."""
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
        self._own = True  # nobody else tells the history
        self._layer = -1  # of the latest demand; -1 before the first
        self._marks = np.zeros(geometry.blocks, np.bool_)  # all False between calls
        self._near = np.zeros(geometry.blocks + 2, np.bool_)  # the same, with one on either side
        self._hinted: tuple[int, Ids, Scores] | None = None  # a layer's pages, until its turn
        self._sources = [np.full(128, source, np.uint8) for source in (HINT, HISTORY)]
        self._next_layer = (np.arange(layers) + 1) % layers
        self._recent = [deque[Ids](maxlen=RECENT_TURNS) for _ in range(layers)]  # blocks
        self._latest: deque[Ids] = deque(maxlen=RECENT_DEMANDS)
        self._odds = Odds(START, PRIOR_SAMPLES)
        self._right = np.full(2, START_RIGHT)
        self._ended = np.full(2, START_RIGHT)
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
        recorded = 0
        for number, access in enumerate(accesses):
            turns = self._turns(access.pages, alone=len(accesses) == 1)
            self._demands += 1
            if self._demands % LEARN_DEMANDS == 0 and turns:
                # Of many layers each has its turn.
                layer, blocks = turns[self._demands // LEARN_DEMANDS % len(turns)]
                if self._own and not self._hints.foretold(layer):
                    self._record(accesses[recorded:number])
                    recorded = number
                self._learn(layer, blocks)
            for layer, blocks in turns:
                self._follow(layer, blocks)
        if self._own:
            self._record(accesses[recorded:])

    def _turns(self, pages: Ids, *, alone: bool) -> list[tuple[int, Ids]]:
        """Layer and blocks of each turn in a demand: one, unless it came alone."""
        if not alone:
            layers = self.geometry.layers
            return [(int(pages[0]) % layers, pages // layers)] if len(pages) else []
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
        history = self._history
        if self._goes_on(layer):
            return
        if self._hints.foretold(layer):
            self._hints.learn(layer, blocks)
        elif 0 <= self._layer == history.layer:  # else it has not been told of the turns before
            weighed, features = self._weigh(layer)
            self._odds.learn(features, among(weighed, blocks, self._marks))

    def _goes_on(self, layer: int) -> bool:
        return layer == self._layer and self.geometry.layers > 1

    def _follow(self, layer: int, blocks: Ids) -> None:
        """Remember which layer follows which, and what the latest turns used."""
        if self._goes_on(layer):
            return
        if self._layer >= 0:
            self._next_layer[self._layer] = layer
        self._layer = layer
        self._recent[layer].append(blocks)
        self._latest.append(blocks)
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
        if self._layer < 0:
            return Guess()
        layer = int(self._next_layer[self._layer])
        blocks, features = self._weigh(layer)
        chance = self._odds.chance(features)
        order = np.argsort(-chance, kind="stable")
        pages = self.geometry.page_ids(blocks[order], layer)
        return self._guess(pages, chance[order], HISTORY, limit)

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
        """Blocks whose pages may come in the coming turn of `layer`, and what speaks for each.

        What it used in its latest turn is not among them: that is here if anything is.
        """
        history = self._history
        blocks = self._candidates(layer)
        places = history.places(blocks, layer)
        turns = history.turns_since(layer, places)
        unused = turns > 0
        blocks, places, turns = blocks[unused], places[unused], turns[unused]
        features = np.ones((len(blocks), 4))
        features[:, 1] = history.log_odds(layer, places)
        features[:, 2] = history.heat(blocks)
        features[:, 3] = (features[:, 2] > ALL_LAYERS_HEAT) & (turns > NEW_TURNS)
        return blocks, features

    def _candidates(self, layer: int) -> Ids:
        """Blocks that `layer` used lately, or that or whose neighbours are in use now."""
        marks, latest = self._near, np.concatenate(list(self._latest))
        for offset in range(3):
            marks[latest + offset] = True
        if self._recent[layer]:
            marks[np.concatenate(list(self._recent[layer])) + 1] = True
        marks[0] = marks[-1] = False
        found: Ids = np.flatnonzero(marks)
        marks[found] = False
        return found - 1
