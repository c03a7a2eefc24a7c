"""A small online logistic regression: chances that are corrected by what came true.

Decides nothing about pages; it maps features to a chance and learns from outcomes, in batches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Mask, Scores

Features = NDArray[np.float64]  # [samples, 2], the first of them 1

MEMORY = 0.999
"""Per batch: about the last 1,000 count."""


class Odds:
    """Newton steps on a fading sum of curvature, from `start` weights.

    `prior` is how many even bets, with features of size one, the start is believed to rest on. They
    do not fade: else, while all comes true that was sure to, nothing would be left to divide by,
    and then a surprise would move the weights by any distance.
    """

    def __init__(self, start: tuple[float, float], prior: float) -> None:
        self._weights = np.array(start, np.float64)
        self._prior = np.eye(len(start)) * 0.25 * prior
        self._curvature = self._prior.copy()

    def chance(self, features: Features) -> Scores:
        """float32, 0 to 1, one a sample."""
        return logistic((features @ self._weights).astype(np.float32))

    def learn(self, features: Features, came_true: Mask) -> None:
        chance: NDArray[np.float64] = self.chance(features).astype(np.float64)
        weight = chance * (1.0 - chance)
        self._curvature *= MEMORY
        self._curvature += self._prior * (1.0 - MEMORY)
        self._curvature += (features * weight[:, None]).T @ features
        slope = (came_true - chance) @ features
        # Two equations: solved here in a tenth of the time that a library takes to begin.
        (a, b), (c, d) = self._curvature.tolist()
        constant, by_feature = slope.tolist()
        step = d * constant - b * by_feature, a * by_feature - c * constant
        self._weights = self._weights + np.array(step) / (a * d - b * c)


def logistic(odds: Scores) -> Scores:
    """1 / (1 + e^-x), kept in float32."""
    result: Scores = np.maximum(odds, np.float32(-80.0))  # beyond it e^-x leaves float32
    np.negative(result, out=result)
    np.exp(result, out=result)
    result += np.float32(1.0)
    np.reciprocal(result, out=result)
    return result
