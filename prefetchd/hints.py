"""How far to believe a hint: the chance that a hinted page is really demanded.

Combines a page's rank within its layer's hint with its own history, and learns from every hint how
much either says. Scores are used by order only, so an engine may give masses, logits or anything
that grows with importance. Knows nothing of slots or budgets.
"""

from __future__ import annotations

import numpy as np

from prefetchd.history import UseHistory
from prefetchd.model import Geometry, Ids, Scores
from prefetchd.odds import Features, Odds

START = (3.9, -3.6, 0.63)
"""Log odds: constant, per rank (1 = as many ranked above as the layer demands), per history."""
RANK_MAX = 1.6
"""Beyond this rank the order of a hint says nothing more."""
PRIOR_SAMPLES = 200.0


class HintOdds:
    """The chance of hinted pages, layer by layer, learned as the layers' turns go by."""

    def __init__(self, geometry: Geometry, history: UseHistory) -> None:
        self._history = history
        self._odds = Odds(START, PRIOR_SAMPLES)
        self._pending: list[tuple[int, Ids, Features] | None] = [None] * geometry.layers

    def chance(self, pages: Ids, scores: Scores, layer: int) -> Scores:
        """The chance (0..1, float32) that pages of `layer` are demanded at its next turn.

        Remembered for `learn`; a later hint for the same layer replaces an earlier one.
        """
        features = np.ones((len(pages), 3))
        ranks = np.empty(len(pages))
        ranks[np.argsort(-scores, kind="stable")] = np.arange(len(pages))
        expected = self._history.demand(layer) or 0.5 * len(pages)
        features[:, 1] = np.minimum(ranks / expected, RANK_MAX)
        features[:, 2] = self._history.log_odds(pages)
        self._pending[layer] = (self._history.turns(layer), pages, features)
        return self._odds.chance(features)

    def learn(self, layer: int) -> None:
        """Compare the hint for the turn that `layer` had with what was demanded, if there is one.

        May be called at any time after that turn and before the layer's next.
        """
        pending = self._pending[layer]
        if pending is None or pending[0] == self._history.turns(layer):
            return
        self._pending[layer] = None
        _, pages, features = pending
        self._odds.learn(features, self._history.used_this_turn(pages))
