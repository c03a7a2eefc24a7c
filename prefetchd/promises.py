"""What guesses say of the next turn of each layer, and what they had said of its latest one.

Decides how long a promise stands: until the layer's next turn, and after it one turn more as what
was foretold. Knows neither slots nor why anybody promises; the cost of a turn goes with what was
promised and not with the store.
"""

from __future__ import annotations

import numpy as np

from prefetchd.model import Ids, Scores


class Promises:
    """Chances by place (`UseHistory.locate`), 0 where nothing was said. Four bytes a page."""

    def __init__(self, layers: int, places: int) -> None:
        # Two a place, next to each other. Which is the promise, the layer's side says: it changes
        # with the turn, and what was promised becomes what was foretold without being moved.
        self._said = np.zeros(2 * places, np.float16)
        self._side = np.zeros(layers, np.int64)
        self._kept: list[list[Ids]] = [[] for _ in range(2 * layers)]  # where any is, by side
        self._lists = 0

    def turned(self, layer: int) -> None:
        """A turn of the layer begins: what was promised was of it."""
        self._side[layer] ^= 1
        self._clear(layer)

    def _clear(self, layer: int) -> None:
        kept = self._kept[2 * layer + int(self._side[layer])]
        for where in kept:
            self._said[where] = 0.0
        self._lists -= len(kept)
        kept.clear()

    def add(self, layer: int, places: Ids, chances: Scores | float) -> None:
        """Promise places of a layer, beside what is promised already."""
        side = int(self._side[layer])
        where = 2 * places + side
        self._said[where] = chances
        self._kept[2 * layer + side].append(where)
        self._lists += 1

    def replace(self, layer: int, places: Ids, chances: Scores) -> None:
        """The same instead of all that is promised."""
        self._clear(layer)
        self.add(layer, places, chances)

    @property
    def none(self) -> bool:
        """Whether nothing is promised or was foretold anywhere."""
        return self._lists == 0

    def of(self, layers: Ids | int, places: Ids) -> tuple[Scores, Scores]:
        """What each place is promised, and what was foretold of it."""
        where = 2 * places
        where += self._side[layers]
        promised = self._said.take(where).astype(np.float32)
        where ^= 1
        return promised, self._said.take(where).astype(np.float32)
