"""Eviction that knows decode's cycle: layers come round in order, once a step.

A page just used is needed a whole step later at the earliest, so recency alone says little. This
policy keeps what is likely to be demanded at its layer's next turn, the sooner the turn the better.
It takes the likelihood from the page's history and from what a predictor expects; it knows
nothing of devices or time.

With one layer there is no cycle: whole blocks are restored, the next turn is another request's, and
how many turns ago a block was used says only how requests were cut into demands. Then the least
recently used goes first.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.aside import Aside
from prefetchd.history import PLAIN_RANK, UseHistory
from prefetchd.layer_turns import one_turn, turns_of
from prefetchd.lowest import ROUNDED, Lowest
from prefetchd.lru import Lru
from prefetchd.model import NO_IDS, Geometry, Ids, Mask, Scores, Slots
from prefetchd.policy import SAMPLED, Eviction, least
from prefetchd.promises import Promises
from prefetchd.ranks import rank_shares, rank_shares_of

UNHINTED_CHANCE = 0.5
"""What a prefetched page is held for until its layer's turn, when no hint speaks of it."""
FORETOLD_WEIGHT = 1.0
"""What the root of the chance that a guess gave a page adds to its log odds at the next turn,
whether it was demanded then or not: a page at the edge of being needed may be needed next time."""
WAIT_WEIGHT = 0.25
"""How much a whole step's wait takes from a page's worth: 1 / (1 + weight x steps)."""
LOSS_SHARE = 0.25
"""Of the pages pushed out by a prefetch, the share not fetched back in time before their demand."""
DEMANDED, PREFETCHED = 1, 2
"""Why a page came, until it has been looked at."""
ABOVE_VICTIMS = 2.0
"""What is not reckoned at each turn has so many times the chance of the likeliest victim."""
ASIDE_SLOTS = 4096
"""With fewer slots all are reckoned: victims are too many of them to be told by a sample."""


class Cycle(Eviction):
    """Evicts the page with the lowest chance of use, discounted by the wait until its turn."""

    name: ClassVar[str] = "cycle"

    def __init__(self, slots: int, geometry: Geometry) -> None:
        super().__init__(slots, geometry)
        layers = geometry.layers
        self.history: UseHistory = UseHistory(geometry)
        self._recency = Lru(slots, geometry) if layers == 1 else None
        self.by_touch = layers == 1
        # Where the page here is, as the history keeps it; the page itself while it is new.
        places = layers * self.history.columns
        self._place = np.zeros(slots, np.int32 if places < 2**30 else np.int64)
        few = layers < np.iinfo(np.uint8).max
        # `layers` where the slot is empty.
        self._layer: NDArray[np.uint8 | np.uint16]
        self._layer = np.full(slots, layers, np.uint8 if few else np.uint16)
        self._new = np.zeros(slots, np.uint8)  # DEMANDED or PREFETCHED where a page is new
        self._came: list[Slots] = []  # where they are, and where some were
        self._chance = np.zeros(slots, np.float32)
        self._lowest = Lowest(self._chance)
        self._stale = np.zeros(layers, np.bool_)  # layers whose chances are to be reckoned
        # Where the page's own past keeps its chance above `_above` for some turns, whatever comes,
        # it is no victim, and not reckoned before then: `layers` stands there, as in empty slots.
        self._looked_at = self._layer if slots < ASIDE_SLOTS else self._layer.copy()
        self._aside = Aside(layers)
        self._above = 1.0
        self._turns = 0
        self._promises = Promises(layers, geometry.blocks)
        # In the latest turn of its layer, in 255ths; of pages that it did not demand, whatever.
        self._rank = np.zeros(places, np.uint8)
        # discount[now, layer]: 1 for the layer that comes next, least for one a whole step away.
        turns = np.arange(layers)
        wait = (turns[None, :] - turns[:, None] - 1) % layers / layers
        self._discount = np.zeros((layers, layers + 1), np.float32)
        self._discount[:, :layers] = 1.0 / (1.0 + WAIT_WEIGHT * wait)
        self._discount_least = self._discount[:, :layers].min()

    def demanded(self, pages: Ids, scores: Scores | None) -> None:
        self._take_in()
        one = one_turn(pages, self.geometry)
        if one is not None:
            layer, blocks = one
            places, begun = self.history.demanded_one(layer, blocks)
            if begun:
                self._turns += 1
                self._promises.turned(layer)
            self._stale[layer] = True
            self._rank[places] = PLAIN_RANK if scores is None else rank_shares(scores)
            return
        for turns, mine in turns_of(pages, self.geometry):
            begun = turns.layers[self.history.going_on(turns) :].tolist()
            places = self.history.demanded(turns)
            self._turns += len(begun)
            for layer in begun:
                self._promises.turned(layer)
            self._stale[turns.layers] = True
            ranks = PLAIN_RANK if scores is None else rank_shares_of(scores[mine], turns)
            self._rank[places] = ranks

    def inserted(self, slots: Slots, pages: Ids, *, prefetched: bool) -> None:
        self._place[slots] = pages
        self._new[slots] = PREFETCHED if prefetched else DEMANDED
        self._came.append(slots)
        if self._recency:
            self._recency.inserted(slots, pages, prefetched=prefetched)

    def _take_in(self) -> None:
        """Look at all that came since the last time, before anything depends on it."""
        if not self._came:
            return
        slots = np.concatenate(self._came)
        self._came.clear()
        slots = slots[self._new[slots] > 0]
        if len(slots) == 0:
            return
        layers, places = self.history.locate(self._place[slots].astype(np.int64))
        self._place[slots] = places
        self._layer[slots] = layers
        self._looked_at[slots] = layers
        self._stale[layers] = True
        # A page that came for a demand is wanted until the demand has been shown, and one that was
        # prefetched until its turn; but a guess was told with the demands that settled it.
        (wanted,) = (self.history.turns_since(layers, places) > 0).nonzero()
        if len(wanted):
            layers, demanded = layers[wanted], self._new[slots[wanted]] == DEMANDED
            blocks = self.history.blocks(places[wanted], layers)
            promised, foretold = self._promises.of(layers, blocks)
            unsaid = (promised == 0.0) & (demanded | (foretold == 0.0))
            layers, blocks = layers[unsaid], blocks[unsaid]
            for layer in sorted(set(layers.tolist())):
                self._promises.add(layer, blocks[layers == layer], UNHINTED_CHANCE)
        self._new[slots] = 0

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        if self._recency:  # else `demanded` has told it
            self._recency.touched(slots, pages, scores)

    def returns(self, slots: Slots) -> None:
        if self._recency:
            self._recency.returns(slots)

    def rests(self, slots: Slots) -> None:
        if self._recency:
            self._recency.rests(slots)

    def removed(self, slots: Slots, pages: Ids) -> None:
        self._layer[slots] = self._looked_at[slots] = self.geometry.layers
        self._new[slots] = 0
        if self._recency:
            self._recency.removed(slots, pages)

    def expected(self, pages: Ids, chances: Scores) -> None:
        self._take_in()
        for turns, mine in turns_of(pages, self.geometry):
            said = chances[mine]
            ends = [*turns.starts.tolist()[1:], len(said)]
            for layer, start, end in zip(
                turns.layers.tolist(), turns.starts.tolist(), ends, strict=True
            ):
                self._promises.replace(layer, turns.blocks[start:end], said[start:end])
            self._stale[turns.layers] = True

    def victims(self, count: int, allowed: Mask) -> Slots:
        if self._recency:
            return self._recency.victims(count, allowed)
        if count <= 0:
            return NO_IDS
        self._reckon()
        near = self._lowest.below(allowed)
        lowest = self._lowest
        if lowest.too_many(near, count) or (chosen := self._worst(near, count)) is None:
            self._search(count, allowed)
            near = lowest.below(allowed)
            chosen = self._worst(near, count)
            if lowest.bounded and lowest.too_many(near, count):
                lowest.forget()
        if chosen is None:
            self._lowest.take_all()
            chosen = self._worst(self._lowest.below(allowed), count)
        assert chosen is not None
        return chosen

    def _worst(self, near: Slots, count: int) -> Slots | None:
        """Of all slots the worst, if these are among `near`."""
        worth = self._discounted(near)
        places = least(worth, count)
        if self._lowest.bounded:
            most = self._lowest.bound * self._discount_least / ROUNDED
            if len(places) < count or worth[places[-1]] > most:
                return None
        return near[places]

    def _search(self, count: int, allowed: Mask) -> None:
        """Look for the slots of least worth among all."""
        sample = np.arange(0, self.slots, SAMPLED)
        sample = sample[allowed[::SAMPLED]]
        self._lowest.search(self._discounted(sample), count, self._discount_least)
        if not self._lowest.bounded:
            return
        most = float(self._lowest.bound)
        if most > self._above:
            self._look_at_all()
        elif most < self._above / ABOVE_VICTIMS**2:
            self._above = ABOVE_VICTIMS * most

    def worth(self, slots: Slots) -> Scores:
        if self._recency:
            return np.zeros(len(slots), np.float32)  # any prefetch is better than the oldest
        return self._discounted(slots) * np.float32(LOSS_SHARE)

    def _discounted(self, slots: Slots) -> Scores:
        discount = self._discount[self.history.layer]
        worth: Scores = self._chance[slots] * discount[self._layer[slots]]
        return worth

    def _look_at_all(self) -> None:
        """What victims are worth has risen: who was sure to be none need not be so any more."""
        self._looked_at[:] = self._layer
        self._above = 1.0

    def _reckon(self) -> None:
        """Bring the chances of all pages here that may be victims up to date: not before somebody
        asks for any."""
        self._take_in()
        stale = np.flatnonzero(self._stale)
        if len(stale) == 0:
            return
        self._stale[stale] = False
        back = self._aside.back(self._turns)
        self._looked_at[back] = self._layer[back]
        (slots,) = self._in_any(stale).nonzero()
        layers: Ids | int = int(stale[0])
        if len(stale) > 1:
            layers = self._layer.take(slots).astype(np.int64)
        places = self._place.take(slots).astype(np.int64)
        odds, lasting, age = self.history.own_odds(layers, places)
        if self._looked_at is not self._layer and self._above < 1.0:
            aside, low = self._aside.put(slots, lasting, self._above, self._turns)
            self._looked_at[aside] = self.geometry.layers
            self._chance[aside] = 1.0
            slots, places = slots.take(low), places.take(low)
            odds, age = odds.take(low), age.take(low)
            layers = layers if isinstance(layers, int) else layers.take(low)
        self._chance[slots] = self._whole_chance(odds, age, layers, places)
        changed = np.zeros(self.geometry.layers + 1, np.bool_)
        changed[stale] = changed[-1] = True  # an empty slot is below no more
        self._lowest.changed(changed, slots, self._layer)

    def _whole_chance(
        self, odds: Scores, age: NDArray[np.uint16], layers: Ids | int, places: Ids
    ) -> Scores:
        blocks = self.history.blocks(places, layers)
        if self._promises.none:
            return self.history.whole_chance(odds, age, layers, blocks, self._rank)
        promised, foretold = self._promises.of(layers, blocks)
        more = np.sqrt(foretold, out=foretold)
        more *= np.float32(FORETOLD_WEIGHT)
        chance = self.history.whole_chance(odds, age, layers, blocks, self._rank, more)
        return np.maximum(chance, promised, out=chance)

    def _in_any(self, layers: Ids) -> Mask:
        """Slots to be looked at whose pages are of these layers, which rise."""
        mine = np.zeros(self.slots, np.bool_)
        (breaks,) = (layers[1:] != layers[:-1] + 1).nonzero()
        number = self._looked_at.dtype.type
        for run in np.split(layers, breaks + 1):  # of layers one after the other, as decode goes
            mine |= self._looked_at - number(run[0]) < number(len(run))
        return mine
