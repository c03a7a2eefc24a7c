"""Eviction that knows decode's cycle: layers come round in order, once a step.

A page just used is needed a whole step later at the earliest, so recency alone says little. This
policy keeps what is likely to be demanded at its layer's next turn, the sooner the turn the better.
It takes the likelihood from the page's history and from what a predictor expects; it knows
nothing of devices or time.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefetchd.history import PLAIN_RANK, UseHistory, by_layer
from prefetchd.model import NO_IDS, Geometry, Ids, Mask, Scores, Slots
from prefetchd.policy import Eviction

UNHINTED_CHANCE = 0.5
"""What a prefetched page is held for until its layer's turn, when no hint speaks of it."""
WAIT_WEIGHT = 0.25
"""How much a whole step's wait takes from a page's worth: 1 / (1 + weight x steps)."""
LOSS_SHARE = 0.25
"""Of the pages pushed out by a prefetch, the share not fetched back in time before their demand."""


class Cycle(Eviction):
    """Evicts the page with the lowest chance of use, discounted by the wait until its turn."""

    name: ClassVar[str] = "cycle"

    def __init__(self, slots: int, geometry: Geometry) -> None:
        super().__init__(slots, geometry)
        layers = geometry.layers
        self._history = UseHistory(geometry)
        self._page = np.full(slots, -1, np.int64)
        self._layer = np.full(slots, layers, np.int64)  # `layers` where the slot is empty
        self._chance = np.zeros(slots, np.float32)
        self._stale = np.zeros(layers + 1, np.bool_)  # layers whose chances are to be reckoned
        self._promise = np.zeros(geometry.pages, np.float32)  # by guesses for the layer's turn
        self._promised: list[list[Ids]] = [[] for _ in range(layers)]
        self._rank = np.zeros(geometry.pages, np.float32)  # in the latest turn of its layer
        self._ranked: list[list[Ids]] = [[] for _ in range(layers)]
        self._told = False  # of the demand that is being served, before its `touched`
        # discount[now, layer]: 1 for the layer that comes next, least for one a whole step away.
        turns = np.arange(layers)
        wait = (turns[None, :] - turns[:, None] - 1) % layers / layers
        self._discount = np.zeros((layers, layers + 1), np.float32)
        self._discount[:, :layers] = 1.0 / (1.0 + WAIT_WEIGHT * wait)

    def demanded(self, pages: Ids, scores: Scores | None) -> None:
        self._demand(pages, scores)
        self._told = True

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        layers = self.geometry.layer_of(pages)
        self._page[slots] = pages
        self._layer[slots] = layers
        self._stale[layers] = True
        if not prefetched:
            if not self._told:
                self._demand(pages, None)
                self._told = True
            return
        unhinted = self._promise[pages] == 0.0
        if unhinted.any():
            some = pages[unhinted]
            self._promise[some] = UNHINTED_CHANCE
            for layer, mine in by_layer(some, self.geometry):
                self._promised[layer].append(some[mine])

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        if not (self._told and self._history.used_this_turn(pages).all()):
            self._demand(pages, scores)
        self._told = False

    def removed(self, slots: Slots, pages: Ids) -> None:
        self._page[slots] = -1
        self._layer[slots] = self.geometry.layers

    def expected(self, pages: Ids, chances: Scores) -> None:
        for layer, mine in by_layer(pages, self.geometry):
            self._forget(self._promise, self._promised[layer])
            self._promised[layer].append(pages[mine])
            self._promise[pages[mine]] = chances[mine]
            self._stale[layer] = True

    @staticmethod
    def _forget(values: Scores, pages: list[Ids]) -> None:
        for some in pages:
            values[some] = 0.0
        pages.clear()

    def victims(self, count: int, allowed: Mask) -> Slots:
        candidates = np.flatnonzero(allowed)
        count = min(count, len(candidates))
        if count <= 0:
            return NO_IDS
        self._reckon()
        worth = self._discounted(candidates)
        worst = np.argpartition(worth, count - 1)[:count]
        order = np.argsort(worth[worst], kind="stable")
        return candidates[worst[order]]

    def worth(self, slots: Slots) -> Scores:
        return self._discounted(slots) * np.float32(LOSS_SHARE)

    def _discounted(self, slots: Slots) -> Scores:
        discount = self._discount[self._history.layer]
        worth: Scores = self._chance[slots] * discount[self._layer[slots]]
        return worth

    def _demand(self, pages: Ids, scores: Scores | None) -> None:
        for layer, mine in by_layer(pages, self.geometry):
            ranks = PLAIN_RANK if scores is None else rank_shares(scores[mine])
            self._demand_layer(pages[mine], layer, ranks)

    def _demand_layer(self, pages: Ids, layer: int, ranks: Scores | float) -> None:
        """Pages of one layer are demanded, in a new turn of it or in the one that is on."""
        if layer != self._history.layer or self.geometry.layers == 1:
            self._history.turn_to(layer)
            self._forget(self._rank, self._ranked[layer])
            self._forget(self._promise, self._promised[layer])
        self._history.used(pages)
        self._rank[pages] = ranks
        self._ranked[layer].append(pages)
        self._stale[layer] = True

    def _reckon(self) -> None:
        """Bring the chances of all pages here up to date: not before somebody asks for victims."""
        if not self._stale.any():
            return
        slots = np.flatnonzero(self._stale[self._layer])
        pages = self._page[slots]
        chance = self._history.chance(pages, self._rank[pages])
        self._chance[slots] = np.maximum(chance, self._promise[pages])
        self._stale[:] = False


def rank_shares(scores: Scores) -> Scores:
    """For each score the share of all that are below it (float32, 0 to 1)."""
    ranks = np.searchsorted(np.sort(scores), scores).astype(np.float32)
    return ranks / np.float32(len(scores))
