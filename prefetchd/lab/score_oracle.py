"""The control of a restore that knows the trace: which block is due when, of all requests to come.

Decides only how far ahead it looks. It takes what the trace says for the time of each need, that is
without the waits that there will be; so a request that waited is told of too early, never too late.
Its guesses pass through the same planner, staging and drive as everybody's: it is a ceiling, not
magic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Geometry, Ids
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors.oracle import earlier_positions


class DueOracle(Predictor):
    """Guesses the blocks that are due next, `pages[i]` at `due_ns[i]` (rising).

    It names at most half of the staging, since fetching more would push out what is needed sooner.
    """

    name = "oracle"

    def __init__(
        self, geometry: Geometry, slots: int, *, pages: Ids, due_ns: NDArray[np.int64]
    ) -> None:
        super().__init__(geometry, slots)
        self._pages = pages
        self._due_ns = due_ns
        self._earlier = earlier_positions(pages)
        self._most = max(1, slots // 2)

    def predict(self, now_ns: int, limit: int) -> Guess:
        start = int(np.searchsorted(self._due_ns, now_ns))
        stop = start + 2 * self._most
        # A block is named for its first need from now on.
        first = self._earlier[start:stop] < start
        pages: Ids = self._pages[start:stop][first][: max(0, min(limit, self._most))]
        return Guess(pages, np.ones(len(pages), np.float32), keep=pages, restores=True)
