"""How likely is a page to be demanded at its layer's next turn? Learned from its past alone.

Decides what is remembered of a page (fading averages of its use over one, four and 32 turns of its
layer), of a block (its use by the layers just computed) and how these add up to a chance. Knows
nothing of slots, hints or budgets: eviction and prediction build on the same estimate.

A *turn* is one visit of a layer, which decode makes once a step; a new turn starts whenever the
demanded layer changes. Memory is 20 bytes a page. A turn costs a few passes over the blocks of one
layer, all in a row in memory; after it, the estimate of any page is one look-up. Several turns told
together cost little more than one: what is slow is not the arithmetic but the number of calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Turns:
    """Demands of one layer each, one after the other, no layer twice.

    `blocks` (int64) of all pages demanded, and `which` (int64): the number of the turn that each
    belongs to, never falling. One entry a turn (int64): `layers`, and where its pages start in
    `blocks` and how many they are.
    """

    blocks: Ids
    which: Ids
    layers: Ids
    starts: Ids
    counts: Ids

    def __len__(self) -> int:
        return len(self.layers)

    def each(self) -> Iterator[tuple[int, Ids]]:
        """Layer and blocks of one turn after the other."""
        starts = self.starts.tolist()
        ends = [*starts[1:], len(self.blocks)]
        for layer, start, end in zip(self.layers.tolist(), starts, ends, strict=True):
            yield layer, self.blocks[start:end]


def turns_of(pages: Ids, geometry: Geometry) -> list[tuple[Turns, Mask | slice]]:
    """All of `pages` as turns in the order given, and which of the pages these are.

    One entry, or none, unless a layer comes in pieces: then one a layer, in rising order.
    """
    if len(pages) == 0:
        return []
    blocks = geometry.block_of(pages)
    of_page = pages - blocks * geometry.layers
    (changes,) = (of_page[1:] != of_page[:-1]).nonzero()
    starts = np.zeros(len(changes) + 1, np.int64)
    starts[1:] = changes + 1
    layers = of_page[starts]
    if len(set(layers.tolist())) == len(layers):
        counts = np.empty_like(starts)
        counts[:-1], counts[-1] = starts[1:], len(pages)
        counts -= starts
        which = np.arange(len(starts)).repeat(counts)
        return [(Turns(blocks, which, layers, starts, counts), slice(None))]
    pieces = [of_page == layer for layer in np.unique(layers)]
    return [(turns, mine) for mine in pieces for turns, _ in turns_of(pages[mine], geometry)]


def rows_of(layers: Ids) -> Ids | slice:
    """An index of these layers (distinct) among rows: a slice if they follow each other, since what
    is done to a slice is done in place."""
    numbers = layers.tolist()
    first, last = min(numbers, default=0), max(numbers, default=-1)
    return slice(first, last + 1) if last - first == len(numbers) - 1 else layers


class UseHistory:
    """What was demanded when, and the chance that it is demanded again.

    It keeps things by *place*, all blocks of a layer in a row (`locate`).
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        layers = geometry.layers
        # One column of padding on either side lets every block look at those before and after it.
        self.columns = geometry.blocks + 2
        self._use = np.zeros((len(HALF_LIVES), layers, self.columns), np.float32)
        self._odds = np.full(layers * self.columns, BIAS, np.float32)  # without heat
        self._stale = np.zeros(layers, np.bool_)  # layers whose odds are to be reckoned again
        self._turn = np.full(layers * self.columns, _NEVER, np.int32)
        self._turns = np.zeros(layers, np.int32)
        self._heat = np.zeros(geometry.blocks, np.float32)
        self._demand = np.zeros(layers, np.int64)
        self.layer = -1
        """The layer whose turn it is; -1 before the first."""

        keep = np.exp2(-1.0 / np.array(HALF_LIVES))
        self._keep = keep.astype(np.float32)[:, None, None]
        self._gain = (1.0 - keep).astype(np.float32)[:, None]
        self._kinds = np.arange(len(HALF_LIVES))[:, None] * self._odds.size  # where `_use` has each
        self._weights = np.array(USE_WEIGHTS, np.float32)
        # What is left of a layer's heat, and of a use in it, by the layers computed since.
        cooled = np.exp(-np.arange(layers + 1) / HEAT_LAYERS)
        self._cooled = cooled.astype(np.float32)
        self._heat_gains = ((1.0 - cooled[1]) * cooled).astype(np.float32)

    def locate(self, pages: Ids) -> tuple[Ids, Ids]:
        """The layer of each page, and its place in an array that has `columns` entries a layer."""
        blocks = self.geometry.block_of(pages)
        layers = pages - blocks * self.geometry.layers
        return layers, self.places(blocks, layers)

    def places(self, blocks: Ids, layers: Ids | int) -> Ids:
        return layers * self.columns + 1 + blocks

    def going_on(self, turns: Turns) -> int:
        """How many of the turns, none or the first, do not begin but go on with the latest one."""
        return int(turns.layers[0] == self.layer and self.geometry.layers > 1)

    def demanded(self, turns: Turns) -> tuple[Ids, Ids | slice]:
        """These turns were made since the last call, the first of them perhaps before it. Returns
        the places of their pages, and the layers (as an index) whose turn has begun.

        In a turn that begins, what is not demanded fades by one turn; a repeat in it is free.
        """
        going_on, which = self.going_on(turns), turns.which
        places = self.places(turns.blocks, turns.layers[which])
        begun = rows_of(turns.layers[going_on:])
        self._turns[begun] += 1
        self._demand[begun] = 0
        self._use[:, begun] *= self._keep
        self._heat *= self._cooled[len(turns) - going_on]

        new, blocks, counts = places, turns.blocks, turns.counts
        numbers = self._turns[turns.layers][which]
        if going_on:
            unused = self._turn[places] != numbers
            new, blocks, which, numbers = (x[unused] for x in (places, blocks, which, numbers))
            counts = np.bincount(which, minlength=len(turns))
        self._use.reshape(-1)[new + self._kinds] += self._gain
        self._turn[new] = numbers
        np.add.at(self._heat, blocks, self._heat_gains[: len(turns)][::-1][which])
        self._demand[turns.layers] += counts
        self._stale[turns.layers] = True
        self.layer = int(turns.layers[-1])
        return places, begun

    def used_this_turn(self, pages: Ids) -> Mask:
        """Which of these pages were demanded in the latest turn of their layer."""
        used: Mask = self.turns_since_use(pages) == 0
        return used

    def turns_since_use(self, pages: Ids) -> NDArray[np.int32]:
        """Turns of its layer since each page was demanded, 0 in the turn of its demand."""
        return self.turns_since(*self.locate(pages))

    def turns_since(self, layers: Ids | int, places: Ids) -> NDArray[np.int32]:
        """The same for pages that have been located."""
        turns: NDArray[np.int32] = self._turns[layers] - self._turn[places]
        return turns

    def turns(self, layer: int) -> int:
        """How many turns the layer has had, the one that is on included."""
        return int(self._turns[layer])

    def demand(self, layer: int) -> int:
        """How many pages the layer demanded in its latest turn, so far."""
        return int(self._demand[layer])

    def chance(self, places: Ids, ranks: Scores | float = 0.0) -> Scores:
        """The chance (0..1, float32) that the page of each place is demanded at its layer's next
        turn.

        `ranks`: for pages demanded in this turn, the share of the turn's that scored lower.
        """
        return logistic(self.log_odds(places) + np.float32(RANK_WEIGHT) * ranks)

    def log_odds(self, places: Ids) -> Scores:
        """The same estimate before the logistic curve, without the rank."""
        if self._stale.any():
            self._reckon()
        odds: Scores = self._odds.take(places)
        odds += np.float32(HEAT_WEIGHT) * self._heat.take(places % self.columns - 1)
        return odds

    def _reckon(self) -> None:
        stale = rows_of(np.flatnonzero(self._stale))
        use = self._use[:, stale]
        middle = use[1]
        odds = (self._weights @ np.sqrt(use).reshape(len(use), -1)).reshape(middle.shape)
        near = np.sqrt(middle[:, :-2] + middle[:, 2:])
        odds[:, 1:-1] += np.float32(NEIGHBOUR_WEIGHT) * near
        odds += np.float32(BIAS)
        self._odds.reshape(-1, self.columns)[stale] = odds
        self._stale[:] = False

    def heat(self, blocks: Ids) -> Scores:
        """How much the layers just computed used each block: 0 to 1, float32."""
        heat: Scores = self._heat.take(blocks)
        return heat
