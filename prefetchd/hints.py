"""How far to believe a hint: the chance that a hinted page is really demanded.

Decides it from the page's rank among the hinted, and learns from what came true how fast belief
falls with rank. Scores are used by order only, so an engine may give masses, logits or anything
that grows with importance. Knows nothing of slots or budgets.
"""

from __future__ import annotations

import numpy as np

from prefetchd.history import UseHistory
from prefetchd.model import Geometry, Ids, Scores
from prefetchd.odds import Odds, logistic

START = (1.5, -3.6)
"""Log odds: constant, and per rank (1 = as many ranked above as the layer demands)."""
RANK_MAX = 1.6
"""Beyond this rank the order of a hint says nothing more."""
PRIOR_SAMPLES = 200.0


class HintOdds:
    """The chance of hinted pages, layer by layer, learned as the layers' turns go by."""

    def __init__(self, geometry: Geometry, history: UseHistory) -> None:
        self._history = history
        self._odds = Odds(START, PRIOR_SAMPLES)
        self._pending: list[tuple[int, Ids, float] | None] = [None] * geometry.layers
        self._places = np.arange(1024, dtype=np.float32)

    def ranked(self, pages: Ids, scores: Scores, layer: int) -> tuple[Ids, Scores]:
        """Pages of `layer`, most likely first, and the chance (0..1, float32) of each that it is
        demanded at the layer's next turn.

        Remembered for `learn`; a later hint for the same layer replaces an earlier one.
        """
        count = len(pages)
        pages = pages[np.argsort(-scores, kind="stable")]
        expected = float(self._history.demand(layer) or 0.5 * count)
        self._pending[layer] = (self._history.turns(layer), pages, expected)
        bias, slope = self._odds.weights
        return pages, logistic(self._ranks(count, expected) * np.float32(slope) + np.float32(bias))

    def _ranks(self, count: int, expected: float) -> Scores:
        if count > len(self._places):
            self._places = np.arange(2 * count, dtype=np.float32)
        ranks: Scores = np.minimum(
            self._places[:count] * np.float32(1 / expected), np.float32(RANK_MAX)
        )
        return ranks

    def learn(self, layer: int) -> None:
        """Compare the hint for the turn that `layer` had with what was demanded, if there is one.

        May be called at any time after that turn and before the layer's next.
        """
        pending = self._pending[layer]
        if pending is None or pending[0] == self._history.turns(layer):
            return
        self._pending[layer] = None
        _, pages, expected = pending
        features = np.ones((len(pages), 2))
        features[:, 1] = self._ranks(len(pages), expected)
        self._odds.learn(features, self._history.used_this_turn(pages))
