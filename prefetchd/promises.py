"""What guesses say of the next turn of each layer, and what they had said of its latest one.

Decides how long a promise stands: until the layer's next turn, and after it one turn more as what
was foretold. Knows neither slots nor why anybody promises; memory goes with what was promised, and
only who asks pays for more than a note of it.
"""

from __future__ import annotations

import numpy as np

from prefetchd.model import Ids, Scores

Said = list[tuple[Ids, Scores | float]]


class Promises:
    """Chances by layer and block, 0 where nothing was said."""

    def __init__(self, layers: int, blocks: int) -> None:
        self._promised: list[Said] = [[] for _ in range(layers)]
        self._foretold: list[Said] = [[] for _ in range(layers)]
        self._notes = 0
        # To look things up in, all 0 between calls. Chances are known to no more digits than this.
        self._room = np.zeros(blocks, np.float16)

    def turned(self, layer: int) -> None:
        """A turn of the layer begins: what was promised was of it."""
        self._notes -= len(self._foretold[layer])
        self._foretold[layer], self._promised[layer] = self._promised[layer], []

    def add(self, layer: int, blocks: Ids, chances: Scores | float) -> None:
        """Promise blocks of a layer, beside what is promised already."""
        self._promised[layer].append((blocks, chances))
        self._notes += 1

    def replace(self, layer: int, blocks: Ids, chances: Scores) -> None:
        """The same instead of all that is promised."""
        self._notes -= len(self._promised[layer])
        self._promised[layer] = []
        self.add(layer, blocks, chances)

    @property
    def none(self) -> bool:
        """Whether nothing is promised or was foretold anywhere."""
        return self._notes == 0

    def of(self, layers: Ids | int, blocks: Ids) -> tuple[Scores, Scores]:
        """What each block is promised in its layer, and what was foretold of it."""
        if isinstance(layers, int):
            said = self._promised[layers], self._foretold[layers]
            return self._look(said[0], blocks), self._look(said[1], blocks)
        promised, foretold = np.zeros((2, len(blocks)), np.float32)
        for layer in np.bincount(layers).nonzero()[0].tolist():
            if self._promised[layer] or self._foretold[layer]:
                (mine,) = (layers == layer).nonzero()
                some = blocks.take(mine)
                promised[mine] = self._look(self._promised[layer], some)
                foretold[mine] = self._look(self._foretold[layer], some)
        return promised, foretold

    def _look(self, said: Said, blocks: Ids) -> Scores:
        for some, chances in said:
            self._room[some] = chances
        found: Scores = self._room.take(blocks).astype(np.float32)
        for some, _ in said:
            self._room[some] = 0.0
        return found
