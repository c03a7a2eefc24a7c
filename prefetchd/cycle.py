"""Eviction that knows decode's cycle: layers come round in order, once a step.

A page just used is needed a whole step later at the earliest, so recency alone says little. This
policy keeps what is likely to be demanded at its layer's next turn, the sooner the turn the better.
It takes the likelihood from the page's history and from what a predictor expects; it knows
nothing of devices or time.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefetchd.history import PLAIN_RANK, Turns, UseHistory, turns_of
from prefetchd.model import NO_IDS, Geometry, Ids, Mask, Scores, Slots
from prefetchd.policy import Eviction

UNHINTED_CHANCE = 0.5
"""What a prefetched page is held for until its layer's turn, when no hint speaks of it."""
WAIT_WEIGHT = 0.25
"""How much a whole step's wait takes from a page's worth: 1 / (1 + weight x steps)."""
LOSS_SHARE = 0.25
"""Of the pages pushed out by a prefetch, the share not fetched back in time before their demand."""
DEMANDED, PREFETCHED = 1, 2
"""Why a page came, until it has been looked at."""


class Cycle(Eviction):
    """Evicts the page with the lowest chance of use, discounted by the wait until its turn."""

    name: ClassVar[str] = "cycle"

    def __init__(self, slots: int, geometry: Geometry) -> None:
        super().__init__(slots, geometry)
        layers = geometry.layers
        self._history = UseHistory(geometry)
        self._page = np.full(slots, -1, np.int64)
        self._place = np.zeros(slots, np.int64)  # of the page here, as the history keeps it
        self._layer = np.full(slots, layers, np.int64)  # `layers` where the slot is empty
        self._new = np.zeros(slots, np.uint8)  # DEMANDED or PREFETCHED where a page is new
        self._chance = np.zeros(slots, np.float32)
        self._stale = np.zeros(layers + 1, np.bool_)  # layers whose chances are to be reckoned
        rows = layers, self._history.columns
        self._promise = np.zeros(rows, np.float32)  # by guesses for the layer's turn
        self._rank = np.zeros(rows, np.float32)  # in the latest turn of its layer
        # discount[now, layer]: 1 for the layer that comes next, least for one a whole step away.
        turns = np.arange(layers)
        wait = (turns[None, :] - turns[:, None] - 1) % layers / layers
        self._discount = np.zeros((layers, layers + 1), np.float32)
        self._discount[:, :layers] = 1.0 / (1.0 + WAIT_WEIGHT * wait)

    def demanded(self, pages: Ids, scores: Scores | None) -> None:
        self._take_in()
        for turns, mine in turns_of(pages, self.geometry):
            places, begun = self._history.demanded(turns)
            self._promise[begun] = 0.0
            self._rank[begun] = 0.0
            self._stale[turns.layers] = True
            ranks = PLAIN_RANK if scores is None else rank_shares(scores[mine], turns)
            self._rank.reshape(-1)[places] = ranks

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        self._page[slots] = pages
        self._new[slots] = PREFETCHED if prefetched else DEMANDED

    def _take_in(self) -> None:
        """Look at all that came since the last time, before anything depends on it."""
        slots = np.flatnonzero(self._new)
        if len(slots) == 0:
            return
        promise = self._promise.reshape(-1)
        layers, places = self._history.locate(self._page[slots])
        self._place[slots] = places
        self._layer[slots] = layers
        self._stale[layers] = True
        # A page that came for a demand is wanted, too, until the demand has been shown.
        wanted = self._history.turns_since(layers, places) > 0
        wanted |= self._new[slots] == PREFETCHED
        wanted &= promise[places] == 0.0
        promise[places[wanted]] = UNHINTED_CHANCE
        self._new[slots] = 0

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        """Nothing new: `demanded` has told it."""

    def removed(self, slots: Slots, pages: Ids) -> None:
        self._layer[slots] = self.geometry.layers
        self._new[slots] = 0

    def expected(self, pages: Ids, chances: Scores) -> None:
        self._take_in()
        layers, places = self._history.locate(pages)
        self._promise[np.flatnonzero(np.bincount(layers))] = 0.0
        self._promise.reshape(-1)[places] = chances
        self._stale[layers] = True

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

    def _reckon(self) -> None:
        """Bring the chances of all pages here up to date: not before somebody asks for victims."""
        self._take_in()
        if not self._stale.any():
            return
        slots = np.flatnonzero(self._stale[self._layer])
        places = self._place[slots]
        chance = self._history.chance(places, self._rank.take(places))
        self._chance[slots] = np.maximum(chance, self._promise.take(places))
        self._stale[:] = False


def rank_shares(scores: Scores, turns: Turns) -> Scores:
    """For each score the share of its turn's scores that are below it (float32, 0 to 1)."""
    if len(turns) == 1:
        return (np.searchsorted(np.sort(scores), scores) / len(scores)).astype(np.float32)
    # As whole numbers in the same order, the turn in front, all turns are ranked by one fast sort.
    bits = np.ascontiguousarray(scores, np.float32).view(np.int32)
    keys = (turns.which << 32) + (bits ^ (bits >> 31 & 0x7FFFFFFF))
    order = keys.argsort()
    keys = keys[order]
    places = np.arange(len(keys))
    places[1:][keys[1:] == keys[:-1]] = 0  # equal ones share the place of the first
    below = np.empty_like(places)
    below[order] = np.maximum.accumulate(places)
    below -= turns.starts[turns.which]
    shares: Scores = (below / turns.counts[turns.which]).astype(np.float32)
    return shares
