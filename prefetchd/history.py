"""How likely is a page to be demanded at its layer's next turn? Learned from its past alone.

Decides what is remembered of a page (fading averages of its use over one, four and 32 turns of its
layer), of a block (its use by the layers just computed) and how these add up to a chance. Knows
nothing of slots, hints or budgets: eviction and prediction build on the same estimate.

A *turn* is one visit of a layer, which decode makes once a step; a new turn starts whenever the
demanded layer changes. Memory is 20 bytes a page. A turn costs a few passes over the blocks of one
layer, all in a row in memory; after it, the estimate of any page is one look-up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Geometry, Ids, Mask, Scores
from prefetchd.odds import logistic

HALF_LIVES = (1.0, 4.0, 32.0)
"""Turns of a page's layer after which a use counts half."""
HEAT_LAYERS = 5.0
"""Layers after which a block's use counts 1/e: neighbouring layers look at the same text."""

# The estimate is a logistic sum, fitted once on recorded decode attention; weights that were fitted
# on one text served the other equally well, so they are kept few and round.
BIAS = -4.0
USE_WEIGHTS = (0.4, 3.6, 1.1)
HEAT_WEIGHT = 1.4
NEIGHBOUR_WEIGHT = 0.3
RANK_WEIGHT = 2.4
PLAIN_RANK = 0.4
"""The rank of a demanded page whose scores the engine did not give."""

_NEVER = -(1 << 30)


class UseHistory:
    """What was demanded when, and the chance that it is demanded again."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        layers, blocks = geometry.layers, geometry.blocks
        # One column of padding on either side lets every block look at those before and after it.
        self._use = np.zeros((layers, len(HALF_LIVES), blocks + 2), np.float32)
        self._odds = np.full(layers * blocks, BIAS, np.float32)  # without heat, by layer
        self._stale: list[int] = []  # layers whose odds are to be reckoned again
        self._turn = np.full(geometry.pages, _NEVER, np.int32)
        self._turns = np.zeros(layers, np.int32)
        self._heat = np.zeros(blocks, np.float32)
        self._demand = np.zeros(layers, np.int64)
        self.layer = -1
        """The layer whose turn it is; -1 before the first."""

        keep = np.exp2(-1.0 / np.array(HALF_LIVES))
        self._keep = keep.astype(np.float32)[:, None]
        self._gain = (1.0 - keep).astype(np.float32)[:, None]
        self._weights = np.array(USE_WEIGHTS, np.float32)
        self._cooling = np.float32(np.exp(-1.0 / HEAT_LAYERS))
        self._heat_gain = np.float32(1.0) - self._cooling

    def turn_to(self, layer: int) -> None:
        """The layer's next turn begins: what it does not demand now fades by one turn."""
        self.layer = layer
        self._turns[layer] += 1
        self._demand[layer] = 0
        self._use[layer] *= self._keep
        self._heat *= self._cooling
        self._changed(layer)

    def used(self, pages: Ids) -> None:
        """These pages of the layer whose turn it is are demanded. A repeat in one turn is free."""
        turn = self._turns[self.layer]
        new = self._turn[pages] != turn
        if not new.all():
            pages = pages[new]
        blocks = pages // self.geometry.layers
        self._use[self.layer][:, blocks + 1] += self._gain
        self._turn[pages] = turn
        self._heat[blocks] += self._heat_gain
        self._demand[self.layer] += len(blocks)
        self._changed(self.layer)

    def _changed(self, layer: int) -> None:
        if layer not in self._stale:
            self._stale.append(layer)

    def used_this_turn(self, pages: Ids) -> Mask:
        """Which of these pages were demanded in the latest turn of their layer."""
        used: Mask = self._turn[pages] == self._turns[pages % self.geometry.layers]
        return used

    def turns_since_use(self, pages: Ids) -> NDArray[np.int32]:
        """Turns of its layer since each page was demanded, 0 in the turn of its demand."""
        turns: NDArray[np.int32] = self._turns[pages % self.geometry.layers] - self._turn[pages]
        return turns

    def turns(self, layer: int) -> int:
        """How many turns the layer has had, the one that is on included."""
        return int(self._turns[layer])

    def demand(self, layer: int) -> int:
        """How many pages the layer demanded in its latest turn, so far."""
        return int(self._demand[layer])

    def chance(self, pages: Ids, ranks: Scores | float = 0.0) -> Scores:
        """The chance (0..1, float32) that each page is demanded at its layer's next turn.

        `ranks`: for pages demanded in this turn, the share of the batch that scored lower.
        """
        return logistic(self.log_odds(pages) + np.float32(RANK_WEIGHT) * ranks)

    def log_odds(self, pages: Ids) -> Scores:
        """The same estimate before the logistic curve, without the rank."""
        for layer in self._stale:
            self._reckon(layer)
        self._stale.clear()
        layers, count = self.geometry.layers, self.geometry.blocks
        blocks = pages // layers
        odds: Scores = self._odds.take((pages - blocks * layers) * count + blocks)
        odds += np.float32(HEAT_WEIGHT) * self._heat.take(blocks)
        return odds

    def _reckon(self, layer: int) -> None:
        use, count = self._use[layer], self.geometry.blocks
        odds = self._odds[layer * count : (layer + 1) * count]
        np.matmul(self._weights, np.sqrt(use[:, 1:-1]), out=odds)
        middle = use[1]
        odds += np.float32(NEIGHBOUR_WEIGHT) * np.sqrt(middle[:-2] + middle[2:])
        odds += np.float32(BIAS)

    def heat(self, blocks: Ids) -> Scores:
        """How much the layers just computed used each block: 0 to 1, float32."""
        heat: Scores = self._heat.take(blocks)
        return heat


def by_layer(pages: Ids, geometry: Geometry) -> list[tuple[int, Mask | slice]]:
    """Each layer found among `pages`, in rising order, and which of them are its."""
    if len(pages) == 0:
        return []
    layers = geometry.layer_of(pages)
    first = int(layers[0])
    if (layers == first).all():
        return [(first, slice(None))]
    return [(layer, layers == layer) for layer in np.unique(layers).tolist()]
