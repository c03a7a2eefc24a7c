"""Eviction that knows decode's cycle: layers come round in order, once a step.

A page just used is needed a whole step later at the earliest, so recency alone says little; this
policy keeps what is likely to be demanded at its layer's next turn, the sooner the turn the better.
The likelihood comes from `UseHistory` and, where the engine hints, from the hint.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefetchd.hints import HintOdds
from prefetchd.history import PLAIN_RANK, UseHistory
from prefetchd.model import NO_IDS, Geometry, Ids, Mask, PageHint, Scores, Slots
from prefetchd.policy import Eviction

UNHINTED_CHANCE = 0.5
"""What a prefetched page is held for until its layer's turn, when no hint speaks of it."""


class Cycle(Eviction):
    """Evicts the page with the lowest chance of use, discounted by the wait until its turn."""

    name: ClassVar[str] = "cycle"

    def __init__(self, slots: int, geometry: Geometry) -> None:
        super().__init__(slots, geometry)
        layers = geometry.layers
        self._history = UseHistory(geometry)
        self._page = np.full(slots, -1, np.int64)
        self._layer = np.zeros(slots, np.int64)
        self._chance = np.full(slots, -1.0, np.float32)
        self._promise = np.zeros(geometry.pages, np.float32)
        self._promised: list[Ids] = [NO_IDS] * layers
        self._slot_of = np.full(geometry.pages, -1, np.int64)
        self._hints = HintOdds(geometry, self._history)
        self._scores = np.zeros(0, np.float32)
        # discount[now, layer]: 1 for the layer that comes next, 1/2 for the one a whole step away.
        wait = (np.arange(layers)[None, :] - np.arange(layers)[:, None] - 1) % layers
        self._discount = (1.0 / (1.0 + wait / layers)).astype(np.float32)

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        layers = pages % self.geometry.layers
        self._page[slots] = pages
        self._layer[slots] = layers
        self._slot_of[pages] = slots
        if prefetched:
            promise = self._promise[pages]
            promise[promise == 0.0] = UNHINTED_CHANCE
            self._chance[slots] = np.maximum(self._history.chance(pages), promise)
            return
        for layer in _distinct(layers):
            mine = layers == layer
            self._demanded(slots[mine], pages[mine], layer, None, anew=False)

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        layers = pages % self.geometry.layers
        for layer in _distinct(layers):
            mine = layers == layer
            part = None if scores is None else scores[mine]
            anew = self.geometry.layers == 1
            self._demanded(slots[mine], pages[mine], layer, part, anew=anew)

    def _demanded(
        self, slots: Slots, pages: Ids, layer: int, scores: Scores | None, *, anew: bool
    ) -> None:
        history = self._history
        if anew or layer != history.layer:
            self._turn_to(layer)
        history.used(pages)
        ranks: Scores | float = PLAIN_RANK
        if scores is not None:
            if not len(self._scores):
                self._scores = np.sort(scores)
            ranks = np.searchsorted(self._scores, scores).astype(np.float32)
            ranks /= len(self._scores)
        self._rate(layer)
        self._chance[slots] = history.chance(pages, ranks)

    def _turn_to(self, layer: int) -> None:
        if self._history.layer >= 0:
            self._hints.learn(self._history.layer)
        self._history.turn_to(layer)
        self._scores = np.zeros(0, np.float32)
        self._promise[self._promised[layer]] = 0.0
        self._promised[layer] = NO_IDS

    def _rate(self, layer: int) -> None:
        here = np.flatnonzero((self._layer == layer) & (self._page >= 0))
        self._chance[here] = self._history.chance(self._page[here])

    def removed(self, slots: Slots, pages: Ids) -> None:
        self._page[slots] = -1
        self._chance[slots] = -1.0
        self._slot_of[pages] = -1

    def hinted(self, hint: PageHint) -> None:
        layers = hint.pages % self.geometry.layers
        for layer in _distinct(layers):
            mine = layers == layer
            self._promised_by(hint.pages[mine], hint.scores[mine], layer)

    def _promised_by(self, pages: Ids, scores: Scores, layer: int) -> None:
        self._promise[self._promised[layer]] = 0.0
        self._promised[layer] = pages
        promise = self._hints.chance(pages, scores, layer)
        self._promise[pages] = promise
        slots = self._slot_of[pages]
        here = slots >= 0
        slots = slots[here]
        self._chance[slots] = np.maximum(self._chance[slots], promise[here])

    def victims(self, count: int, allowed: Mask) -> Slots:
        count = min(count, int(np.count_nonzero(allowed)))
        if count == 0:
            return NO_IDS
        worth = self._chance * self._discount[self._history.layer][self._layer]
        worth[~allowed] = np.inf
        worst = np.argpartition(worth, count - 1)[:count]
        order = np.argsort(worth[worst], kind="stable")
        return worst[order]

    def worth(self, slots: Slots) -> Scores:
        worth: Scores = (
            self._chance[slots] * self._discount[self._history.layer][self._layer[slots]]
        )
        return worth


def _distinct(layers: Ids) -> list[int]:
    if len(layers) and (layers == layers[0]).all():
        return [int(layers[0])]
    found: list[int] = np.unique(layers).tolist()
    return found
