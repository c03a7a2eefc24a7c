"""How likely is a page to be demanded at its layer's next turn? Learned from its past alone.

Decides what is remembered of a page (fading averages of its use over one, four and 32 turns of its
layer), of a block (its use by the layers just computed) and how these add up to a chance. Knows
nothing of slots, hints or budgets: eviction and prediction build on the same estimate.

A *turn* is one visit of a layer, which decode makes once a step; a new turn starts whenever the
demanded layer changes. Memory is 8 bytes a page, one word: its averages as they stood at its latest
use, and the turn of that. They fade by a known law, so no turn touches what it does not demand, and
the cost of a turn does not grow with the store. Several turns told together cost little more than
one: what is slow is not the arithmetic but the number of calls. One turn alone, as decode without
hints makes them, has a plain way of its own, which leaves the same behind.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.layer_turns import Turns
from prefetchd.model import Codes, Geometry, Ids, Scores
from prefetchd.odds import logistic

HALF_LIVES = (1.0, 4.0, 32.0)
"""Turns of a page's layer after which a use counts half."""
LASTING = 2 * HALF_LIVES[1]
"""Turns after which the root of all but the shortest average halves, at the soonest."""
HEAT_LAYERS = 5.0
"""Layers after which a block's use counts 1/e: neighbouring layers look at the same text."""

# The estimate is a logistic sum, fitted once on recorded decode attention; weights that were fitted
# on one text served the other equally well, so they are kept few and round.
BIAS = -4.0
USE_WEIGHTS = (0.4, 3.6, 1.1)
HEAT_WEIGHT = 1.4
NEIGHBOUR_WEIGHT = 0.3
RANK_WEIGHT = 2.4
PLAIN_RANK = 102
"""The rank of a demanded page whose scores the engine did not give: 0.4, in 255ths."""

_FAR = 1 << 15
"""The age, in turns, of a page never used. Ages are kept modulo 2**16: a sweep every `_SWEEP` turns
of a layer sees to it that none grows past that."""
_SWEEP = 1 << 14
_FADED = 1 << 10
"""After so many turns nothing is left of a use."""
_UNIT_MIN = 1e-6
_SIDES = np.array([[-1], [1]])
_WHOLE = np.float32(65535.0)
"""What stands for 1 in an average's root: 16 bits, of which rounding takes less than 1e-5."""


class UseHistory:
    """What was demanded when, and the chance that it is demanded again.

    It keeps things by *place*, all blocks of a layer in a row (`locate`).
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        layers = geometry.layers
        # One column of padding on either side lets every block look at those before and after it.
        self.columns = geometry.blocks + 2
        # A row of four a page, read and written as one word: the roots of its averages right after
        # its latest use (the estimate needs the roots), and the turn of that use, modulo 2**16.
        self._words = np.empty(layers * self.columns, np.uint64)
        self._words.view(np.uint16).reshape(-1, 4)[:] = (0, 0, 0, -_FAR & 0xFFFF)
        self._turns = np.zeros(layers, np.int64)
        self._now = np.zeros(layers, np.uint16)  # the same modulo 2**16
        self._heat = np.zeros(geometry.blocks, np.float32)  # in units that shrink as it cools
        self._heat_unit = 1.0
        self._demand = np.zeros(layers, np.int64)
        self.layer = -1
        """The layer whose turn it is; -1 before the first."""

        keep = np.exp2(-1.0 / np.array(HALF_LIVES))
        self._gain = (1.0 - keep).astype(np.float32)[:, None]
        # What is left of the roots after so many turns, and what that adds to the log odds; the
        # fourth column drops the turn.
        left = np.zeros((_FADED + 1, 4), np.float32)
        left[:-1, :3] = np.sqrt(keep) ** np.arange(_FADED)[:, None] / _WHOLE
        self._left = left[:, :3].T.copy()
        self._left_middle = self._left[1]
        self._odds = left * np.array((*USE_WEIGHTS, 0.0), np.float32)
        # What is left of a layer's heat, and of a use in it, by the layers computed since.
        cooled = np.exp(-np.arange(layers + 1) / HEAT_LAYERS)
        self._cooled = cooled.tolist()
        self._heat_gains = ((1 - cooled[1]) * cooled).astype(np.float32)

    def locate(self, pages: Ids) -> tuple[Ids, Ids]:
        """The layer of each page, and its place in an array that has `columns` entries a layer."""
        blocks = self.geometry.block_of(pages)
        layers = pages - blocks * self.geometry.layers
        return layers, self.places(blocks, layers)

    def places(self, blocks: Ids, layers: Ids | int) -> Ids:
        return layers * self.columns + 1 + blocks

    def blocks(self, places: Ids, layers: Ids | int) -> Ids:
        return places - (layers * self.columns + 1)

    def going_on(self, turns: Turns) -> int:
        """How many of the turns, none or the first, do not begin but go on with the latest one."""
        return int(turns.layers[0] == self.layer and self.geometry.layers > 1)

    def demanded(self, turns: Turns) -> Ids:
        """These turns were made since the last call, the first of them perhaps before it. Returns
        the places of their pages.

        In a turn that begins, what is not demanded fades by one turn; a repeat in it is free.
        """
        going_on, which = self.going_on(turns), turns.which
        places = self.places(turns.blocks, turns.layers[which])
        begun = turns.layers[going_on:]
        self._turns[begun] += 1
        self._demand[begun] = 0
        self._cool(len(turns) - going_on)
        numbers = self._turns[turns.layers]
        self._now[turns.layers] = numbers
        if not (numbers % _SWEEP).all():
            for layer in turns.layers[going_on:][numbers[going_on:] % _SWEEP == 0].tolist():
                self._sweep(layer)

        new, blocks, counts = places, turns.blocks, turns.counts
        if going_on:
            unused = self._age(turns.layers[which], places) != 0
            new, blocks, which = places[unused], blocks[unused], which[unused]
            counts = np.bincount(which, minlength=len(turns))
        self._use(turns.layers[which], new)
        gains = self._heat_gains[: len(turns)][::-1] * np.float32(1 / self._heat_unit)
        np.add.at(self._heat, blocks, gains[which])
        self._demand[turns.layers] += counts
        self.layer = int(turns.layers[-1])
        return places

    def demanded_one(self, layer: int, blocks: Ids) -> tuple[Ids, bool]:
        """The same for one turn, of one layer: the places, and whether the turn has begun."""
        places = self.places(blocks, layer)
        new = places
        if begun := layer != self.layer or self.geometry.layers == 1:
            number = int(self._turns[layer]) + 1
            self._turns[layer] = number
            self._now[layer] = number & 0xFFFF
            self._demand[layer] = 0
            self._cool(1)
            self.layer = layer
            if number % _SWEEP == 0:
                self._sweep(layer)
        else:
            unused = self._age(layer, places) != 0
            new, blocks = places[unused], blocks[unused]
        self._use(layer, new)
        self._heat[blocks] += self._heat_gains[0] * np.float32(1 / self._heat_unit)
        self._demand[layer] += len(new)
        return places, begun

    def _cool(self, turns: int) -> None:
        self._heat_unit *= self._cooled[turns]
        if self._heat_unit < _UNIT_MIN:
            self._heat *= np.float32(self._heat_unit)
            self._heat *= self._heat >= _UNIT_MIN  # before it fades into slow, tiny numbers
            self._heat_unit = 1.0

    def _use(self, layers: Ids | int, places: Ids) -> None:
        """These pages, distinct, are used in the turns that their layers have now."""
        words = self._words.take(places)
        rows = words.view(np.uint16).reshape(-1, 4)
        now = self._now[layers]
        averages, used = rows.T[:3], rows[:, 3]  # one by one: short inner loops are slow
        roots = self._left.take(np.minimum(now - used, _FADED), 1)
        roots *= averages
        roots *= roots
        roots += self._gain
        np.sqrt(roots, out=roots)
        roots *= _WHOLE
        roots += np.float32(0.5)
        averages[:] = roots
        used[:] = now
        self._words[places] = words

    def _age(self, layers: Ids | int, places: Ids) -> NDArray[np.uint16]:
        """Turns of its layer since each page was used, modulo 2**16."""
        used = self._words.take(places).view(np.uint16)[3::4]
        age: NDArray[np.uint16] = self._now[layers] - used
        return age

    def _sweep(self, layer: int) -> None:
        """Keep ages from coming round to where they would look young."""
        used = self._words.view(np.uint16)[3::4].reshape(-1, self.columns)[layer]
        used[self._now[layer] - used > _FAR] = int(self._now[layer]) - _FAR & 0xFFFF

    def turns_since(self, layers: Ids | int, places: Ids) -> NDArray[np.uint16]:
        """Turns of its layer since the page of each place was demanded, 0 in the turn of its
        demand; of one that was not used for very long, at least 2**15."""
        return self._age(layers, places)

    def turns(self, layer: int) -> int:
        """How many turns the layer has had, the one that is on included."""
        return int(self._turns[layer])

    def demand(self, layer: int) -> int:
        """How many pages the layer demanded in its latest turn, so far."""
        return int(self._demand[layer])

    def chance(self, layers: Ids | int, places: Ids, rank: Codes) -> Scores:
        """The chance (0..1, float32) that the page of each place is demanded at its layer's next
        turn. `rank` as for `whole_chance`."""
        odds, _, age = self.own_odds(layers, places)
        return self.whole_chance(odds, age, layers, self.blocks(places, layers), rank)

    def own_odds(self, layers: Ids | int, places: Ids) -> tuple[Scores, Scores, NDArray[np.uint16]]:
        """What the use of these pages adds to their log odds, what of that lasts, and their ages.

        What lasts halves in `LASTING` turns at the soonest, whatever comes, while the rest of the
        log odds is `BIAS` and nothing negative.
        """
        rows = self._words.take(places).view(np.uint16).reshape(-1, 4)
        age = np.minimum(self._now[layers] - rows[:, 3], _FADED)
        terms = self._odds.take(age, 0)
        terms *= rows
        lasting: Scores = terms[:, 1] + terms[:, 2]
        odds: Scores = terms[:, 0] + terms[:, 1]
        odds += terms[:, 2]
        return odds, lasting, age

    def whole_chance(
        self,
        odds: Scores,
        age: NDArray[np.uint16],
        layers: Ids | int,
        blocks: Ids,
        rank: Codes,
        more: Scores | None = None,
    ) -> Scores:
        """The chance of pages whose own part of the log odds is known (and added to here).

        `rank` (uint8, by place): of pages demanded in their layer's latest turn, the share of the
        turn's that scored lower, in 255ths; else not looked at. `more`: log odds of what else is
        known.
        """
        places = self.places(blocks, layers)
        rows = self._words.take(places + _SIDES).view(np.uint16).reshape(2, len(places), 4)
        near = self._left_middle.take(np.minimum(self._now[layers] - rows[:, :, 3], _FADED))
        near *= rows[:, :, 1]
        near *= near
        both = near[0] + near[1]
        odds += np.sqrt(both, out=both) * np.float32(NEIGHBOUR_WEIGHT)
        heat = self._heat.take(blocks)
        heat *= np.float32(HEAT_WEIGHT * self._heat_unit)
        odds += heat
        odds += np.float32(BIAS)
        (latest,) = (age == 0).nonzero()
        odds[latest] += rank.take(places.take(latest)) * np.float32(RANK_WEIGHT / 255)
        if more is not None:
            odds += more
        return logistic(odds)
