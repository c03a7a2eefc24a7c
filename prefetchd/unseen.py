"""What the policies have not seen yet: demands and guesses, in order, few enough, in batches.

Decides which demands are told together, and which guesses need not be told any more. Refuses to
know who is told, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefetchd.masks import every, some
from prefetchd.model import Access, Geometry, Ids, Scores, Slots
from prefetchd.predictor import Guess

UNSEEN_MAX = 64  # demands and guesses; the oldest is dropped first
CROWDED = 48
BATCH_DEMANDS = 6
"""So many at once take a third of the time that they take one by one. Eight would save a little
more, but come so late that more is missed where staging holds but a tenth of the pages."""

Told = tuple[Slots, Access] | Guess


@dataclass(frozen=True, slots=True)
class Batch:
    """Demands, oldest first: none, one, or several of one layer each and no layer twice, all of
    them with scores or none. `foretold`: what guesses, as pages and chances, had said of these
    demands; `guesses`: what no demand has settled yet.

    `slots[i]`: where the pages of `accesses[i]` were; negative where they had no slot.
    """

    accesses: Sequence[Access]
    slots: Sequence[Slots]
    foretold: Sequence[tuple[Ids, Scores]]
    guesses: Sequence[tuple[Ids, Scores]]


class Unseen:
    """Demands with the slots their pages were in, and guesses that have a confidence."""

    def __init__(self, geometry: Geometry) -> None:
        self._layers = geometry.layers
        # A demand is to be seen well before the next turn of its layer.
        self._enough = min(BATCH_DEMANDS, max(1, geometry.layers // 2))
        self._told: deque[Told] = deque()
        self._demands = 0

    def __len__(self) -> int:
        return len(self._told)

    @property
    def demands(self) -> int:
        return self._demands

    @property
    def enough(self) -> bool:
        """Whether there are demands for a whole batch."""
        return self._demands >= self._enough

    @property
    def crowded(self) -> bool:
        """Whether so much is unseen that some of it would soon be dropped."""
        return len(self._told) >= CROWDED

    def add(self, told: Told) -> None:
        if len(self._told) == UNSEEN_MAX:
            self._pop()
        self._told.append(told)
        self._demands += not isinstance(told, Guess)

    def _pop(self) -> Told:
        told = self._told.popleft()
        self._demands -= not isinstance(told, Guess)
        return told

    def batch(self) -> Batch:
        """Take the oldest demands that can be told together, and the guesses around them."""
        demands = [told for told in self._told if not isinstance(told, Guess)]
        left = self._demands - self._together([access for _, access in demands[: self._enough]])
        taken: list[tuple[Slots, Access]] = []
        guesses: list[tuple[int, Guess]] = []
        while self._told and (self._demands > left or isinstance(self._told[0], Guess)):
            told = self._pop()
            if isinstance(told, Guess):
                guesses.append((len(taken), told))
            else:
                taken.append(told)
        return _batch(taken, guesses, self._layers)

    def _together(self, accesses: list[Access]) -> int:
        """How many of these demands, the first ones, can be told together."""
        layers: list[int] = []
        for access in accesses:
            layer = _first_layer(access, self._layers)
            mixed = (access.scores is None) != (accesses[0].scores is None)
            if layer in layers or layer < 0 or mixed:
                break
            layers.append(layer)
        if len(layers) < 2:
            return 1
        pages = [access.pages for access in accesses[: len(layers)]]
        beside = np.concatenate(pages)
        beside -= np.repeat(layers, [len(some) for some in pages])
        # A whole division is several times faster than a remainder.
        return len(layers) if every(beside // self._layers * self._layers == beside) else 1


def _first_layer(access: Access, layers: int) -> int:
    return int(access.pages[0]) % layers if len(access.pages) else -1


def _batch(
    demands: list[tuple[Slots, Access]], guesses: list[tuple[int, Guess]], layers: int
) -> Batch:
    """`guesses`: how many of the demands came before each."""
    accesses = [access for _, access in demands]
    foretold, standing = _settled(accesses, guesses, layers) if guesses else ([], [])
    return Batch(accesses, [slots for slots, _ in demands], foretold, standing)


_Chances = list[tuple[Ids, Scores]]


def _settled(
    accesses: list[Access], guesses: list[tuple[int, Guess]], layers: int
) -> tuple[_Chances, _Chances]:
    """What demands have settled, and what none has: the pages of each guess whose layers were, or
    were not, demanded since."""
    if not accesses:
        return [], [(g.pages, g.confidence) for _, g in guesses if g.confidence is not None]
    settled = np.zeros(layers, np.int64)  # by which demand, counted from 1
    if len(accesses) == 1:
        settled[accesses[0].pages % layers] = 1
    for number, access in enumerate(accesses if len(accesses) > 1 else [], 1):
        settled[_first_layer(access, layers)] = number
    sizes = [len(guess.pages) for _, guess in guesses]
    before = np.array([number for number, _ in guesses]).repeat(sizes)
    pages = np.concatenate([guess.pages for _, guess in guesses])
    chances = np.concatenate([guess.confidence for _, guess in guesses])
    stands = settled.take(pages - pages // layers * layers) <= before
    if not np.count_nonzero(stands):
        return [(pages, chances)], []
    over = ~stands
    foretold = [(pages[over], chances[over])] if over.any() else []
    standing = []
    start = 0
    for size in sizes:
        mine = slice(start, start := start + size)
        if some(stands[mine]):
            standing.append((pages[mine][stands[mine]], chances[mine][stands[mine]]))
    return foretold, standing
