"""How far to believe a hint: the chance that a hinted page is really demanded.

Decides it from the page's rank among the hinted, and learns from what came true how fast belief
falls with rank. Scores are used by order only, so an engine may give masses, logits or anything
that grows with importance. Knows nothing of slots or budgets.
"""

from __future__ import annotations

import numpy as np

from prefetchd.history import UseHistory
from prefetchd.model import Geometry, Ids, Mask, Scores
from prefetchd.odds import Features, Odds

START = (1.5, -3.6)
"""Log odds: constant, and per rank (1 = as many ranked above as the layer demands)."""
RANK_MAX = 1.6
"""Beyond this rank the order of a hint says nothing more."""
PRIOR_SAMPLES = 200.0
KEPT_MAX = 64
SAMPLES_MAX = 256
"""Of a longer hint, ranks at even distances are learned from: a curve of two weights needs no
more."""


class HintOdds:
    """The chance of hinted pages, layer by layer, learned as the layers' turns go by."""

    def __init__(self, geometry: Geometry, history: UseHistory) -> None:
        self._history = history
        self._odds = Odds(START, PRIOR_SAMPLES)
        self._pending: list[tuple[int, Ids, int] | None] = [None] * geometry.layers
        self._marks = np.zeros(geometry.blocks, np.bool_)  # all False between calls
        self._curves: dict[int, Scores] = {}  # chance by rank, by pages expected
        self._kept: dict[int, Features] = {}  # likewise

    def chances(self, pages: Ids, layer: int) -> Scores:
        """The chance (0..1, float32, falling) that each of `pages` of `layer`, best first, is
        demanded at the layer's next turn.

        Remembered for `learn`; a later hint for the same layer replaces an earlier one.
        """
        expected = self._history.demand(layer) or (len(pages) + 1) // 2
        expected += -expected % max(4, expected // 32)  # few enough different curves to keep
        self._pending[layer] = (self._history.turns(layer), pages, expected)
        curve = self._curves.get(expected)
        if curve is None or len(curve) < len(pages):
            curve = self._odds.chance(self._features(len(pages) * 9 // 8, expected))
            self._curves[expected] = curve
        return curve[: len(pages)]

    def foretold(self, layer: int) -> bool:
        """Whether there is a hint for the turn of `layer` that comes next."""
        pending = self._pending[layer]
        return pending is not None and pending[0] == self._history.turns(layer)

    def learn(self, layer: int, blocks: Ids) -> None:
        """Compare the hint for the turn of `layer` that comes next with what it demands: `blocks`.

        Only where `foretold`. May be called at any time before the layer's next hint.
        """
        pending = self._pending[layer]
        assert pending is not None
        self._pending[layer] = None
        _, pages, expected = pending
        every = -(-len(pages) // SAMPLES_MAX)
        hinted = pages[::every] // self._history.geometry.layers
        came_true = among(hinted, blocks, self._marks)
        self._odds.learn(self._features(len(pages), expected)[::every], came_true)
        self._curves.clear()

    def _features(self, count: int, expected: int) -> Features:
        """What the first `count` of a hint are judged by. Weights change, these do not."""
        kept = self._kept.get(expected)
        if kept is None or len(kept) < count:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            kept = self._kept[expected] = _features(count, expected)
        return kept[:count]


def among(blocks: Ids, wanted: Ids, marks: Mask) -> Mask:
    """Which of `blocks` are in `wanted`. `marks`: room to work in, one a block, all False."""
    marks[wanted] = True
    found: Mask = marks[blocks]
    marks[wanted] = False
    return found


def _features(count: int, expected: int) -> Features:
    features = np.ones((count, 2))
    features[:, 1] = np.minimum(np.arange(count) / expected, RANK_MAX)
    return features
