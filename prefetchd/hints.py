"""How far to believe a hint: the chance that a hinted page is really demanded.

Combines a page's rank within its layer's hint with its own history, and learns from every hint how
much either says. Scores are used by order only, so an engine may give masses, logits or anything
that grows with importance. Knows nothing of slots or budgets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.history import UseHistory, logistic
from prefetchd.model import Geometry, Ids, Scores

START = (3.5, -3.6, 0.63)
"""Log odds: constant, per rank (1 = as many ranked above as the layer demands), per history."""
RANK_MAX = 1.6
"""Beyond this rank the order of a hint says nothing more."""
PRIOR_SAMPLES = 200.0
MEMORY = 0.999
"""Per hint: about the last 1,000 hints count."""


class HintOdds:
    """An online logistic regression (Newton steps with fading curvature) on three features."""

    def __init__(self, geometry: Geometry, history: UseHistory) -> None:
        self._history = history
        self._weights = np.array(START)
        # Curvature of the prior: as if that many even bets with uncorrelated features were seen.
        self._curvature = np.diag([0.25, 0.25, 0.5]) * PRIOR_SAMPLES
        self._pending: list[tuple[Ids, NDArray[np.float64]] | None] = [None] * geometry.layers

    def chance(self, pages: Ids, scores: Scores, layer: int) -> Scores:
        """The chance (0..1, float32) that pages of `layer` are demanded at its next turn.

        Remembered until `learn` is told that the turn is over; a later hint for the same layer
        replaces an earlier one.
        """
        features = np.ones((len(pages), 3))
        ranks = np.empty(len(pages))
        ranks[np.argsort(-scores, kind="stable")] = np.arange(len(pages))
        expected = self._history.demand(layer) or 0.5 * len(pages)
        features[:, 1] = np.minimum(ranks / expected, RANK_MAX)
        features[:, 2] = self._history.log_odds(pages)
        self._pending[layer] = (pages, features)
        return self._rate(features)

    def learn(self, layer: int) -> None:
        """The turn of `layer` is over: compare its hint with what was demanded."""
        pending = self._pending[layer]
        if pending is None:
            return
        self._pending[layer] = None
        pages, features = pending
        chance = self._rate(features).astype(np.float64)
        error = self._history.used_this_turn(pages) - chance
        weight = chance * (1.0 - chance)
        self._curvature *= MEMORY
        self._curvature += (features * weight[:, None]).T @ features
        self._weights += np.linalg.solve(self._curvature, error @ features)

    def _rate(self, features: NDArray[np.float64]) -> Scores:
        return logistic((features @ self._weights).astype(np.float32))
