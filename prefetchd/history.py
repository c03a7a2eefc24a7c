"""How likely is a page to be demanded at its layer's next turn? Learned from its past alone.

Decides what is remembered of a page (fading averages of its use over one, four and 32 turns of its
layer), of a block (its use by the layers just computed) and how these add up to a chance. Knows
nothing of slots, hints or budgets: eviction and prediction build on the same estimate.

A *turn* is one visit of a layer, which decode makes once a step; a new turn starts whenever the
demanded layer changes. Memory is 20 bytes a page; the cost of a call depends on its batch only.
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

_FADE_TURNS = 512  # after so many turns the longest average has faded to 1e-5
_FADE_TICKS = 128


class UseHistory:
    """What was demanded when, and the chance that it is demanded again."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        # One row of padding on either side lets every page look at the blocks before and after it.
        padded = geometry.pages + 2 * geometry.layers
        self._use = np.zeros((padded, len(HALF_LIVES)), np.float32)
        self._middle_use = np.zeros(padded, np.float32)  # the middle column, alone
        self._turn = np.full(padded, -_FADE_TURNS, np.int32)  # never
        self._turns = np.zeros(geometry.layers, np.int32)
        self._heat = np.zeros(geometry.blocks, np.float32)
        self._heat_tick = np.zeros(geometry.blocks, np.int64)
        self._tick = 0
        self._demand = np.zeros(geometry.layers, np.int64)
        self.layer = -1
        """The layer whose turn it is; -1 before the first."""

        keep = np.exp2(-1.0 / np.array(HALF_LIVES))
        self._gain = (1.0 - keep).astype(np.float32)
        self._fade = (keep ** np.arange(_FADE_TURNS)[:, None]).astype(np.float32)
        self._middle_fade = self._fade[:, 1].copy()
        self._weights = np.array(USE_WEIGHTS, np.float32)
        cooling = np.exp(-1.0 / HEAT_LAYERS)
        self._heat_gain = np.float32(1.0 - cooling)
        self._cooling = (cooling ** np.arange(_FADE_TICKS)).astype(np.float32)
        self._cooling[-1] = 0.0

    def turn_to(self, layer: int) -> None:
        """The layer's next turn begins: what it does not demand now fades by one turn."""
        self.layer = layer
        self._turns[layer] += 1
        self._demand[layer] = 0
        self._tick += 1

    def used(self, pages: Ids) -> None:
        """These pages of the layer whose turn it is are demanded. A repeat in one turn is free."""
        layers = self.geometry.layers
        rows = pages + layers
        turn = self._turns[self.layer]
        age = turn - self._turn[rows]
        if not age.all():
            pages = pages[age > 0]
            rows, age = pages + layers, age[age > 0]
        use = self._use.take(rows, axis=0)
        use *= self._fade.take(age, axis=0, mode="clip")
        use += self._gain
        self._use[rows] = use
        self._middle_use[rows] = use[:, 1]
        self._turn[rows] = turn
        blocks = pages // layers
        self._heat[blocks] = self.heat(blocks) + self._heat_gain
        self._heat_tick[blocks] = self._tick
        self._demand[self.layer] += len(blocks)

    def used_this_turn(self, pages: Ids) -> Mask:
        """Which of these pages were demanded in the latest turn of their layer."""
        layers = self.geometry.layers
        used: Mask = self._turn[pages + layers] == self._turns[pages % layers]
        return used

    def turns_since_use(self, pages: Ids) -> NDArray[np.int32]:
        """Turns of its layer since each page was demanded, 0 in the turn of its demand."""
        layers = self.geometry.layers
        turns: NDArray[np.int32] = self._turns[pages % layers] - self._turn[pages + layers]
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
        layers = self.geometry.layers
        blocks = pages // layers
        turns = self._turns.take(pages - blocks * layers)
        rows = pages + layers
        use = self._use.take(rows, axis=0)
        use *= self._fade.take(turns - self._turn.take(rows), axis=0, mode="clip")
        odds: Scores = np.sqrt(use, out=use) @ self._weights
        odds += np.float32(NEIGHBOUR_WEIGHT) * np.sqrt(self._beside(pages, turns))
        odds += np.float32(HEAT_WEIGHT) * self.heat(blocks)
        odds += np.float32(BIAS)
        return odds

    def _beside(self, pages: Ids, turns: NDArray[np.int32]) -> Scores:
        """The middle average of the blocks before and after, added up."""
        rows = np.concatenate([pages, pages + 2 * self.geometry.layers]).reshape(2, len(pages))
        use = self._middle_use.take(rows)
        use *= self._middle_fade.take(turns - self._turn.take(rows), mode="clip")
        beside: Scores = use[0] + use[1]
        return beside

    def heat(self, blocks: Ids) -> Scores:
        """How much the layers just computed used each block: 0 to 1, float32."""
        age = self._tick - self._heat_tick.take(blocks)
        heat: Scores = self._heat.take(blocks) * self._cooling.take(age, mode="clip")
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
