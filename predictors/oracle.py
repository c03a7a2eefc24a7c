"""The control that knows the trace: guesses exactly what will be demanded next, in order.

Decides only how far ahead it looks. It knows the demands and not the device, so its guesses pass
through the same planner, budget and bandwidth as everybody's. It is what foresight is worth to them
and no bound: it does not weigh what its guesses push out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefetchd.model import Access, Geometry, Ids
from prefetchd.predictor import Guess, Predictor

SKIPPED_MAX = 256  # demands that may go by unseen, when there is no time to show them


class Oracle(Predictor):
    """Guesses the pages of the next demands; `future` holds all demands of the run, in order.

    It looks at most `horizon_demands` ahead (by default two passes over the layers, at least
    eight demands) and names at most half of the staging, since fetching more would push out what
    is needed sooner. Without a `future` it guesses nothing.
    """

    name = "oracle"

    def __init__(
        self,
        geometry: Geometry,
        slots: int,
        *,
        future: Sequence[Ids] = (),
        horizon_demands: int | None = None,
    ) -> None:
        super().__init__(geometry, slots)
        self._horizon = horizon_demands or max(8, 2 * geometry.layers)
        sizes = np.array([len(pages) for pages in future], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self._pages = np.concatenate([np.empty(0, np.int64), *future]).astype(np.int64)
        self._earlier = earlier_positions(self._pages)
        self._position = 0

    def on_access(self, access: Access) -> None:
        """Move on behind this demand. Some may not have been shown: it is looked for ahead."""
        ends = self._starts[self._position + 1 :]
        for ahead in range(min(SKIPPED_MAX, len(ends))):
            start = self._starts[self._position + ahead]
            if np.array_equal(self._pages[start : ends[ahead]], access.pages):
                self._position += ahead + 1
                return
        self._position = min(self._position + 1, len(self._starts) - 1)

    def predict(self, now_ns: int, limit: int) -> Guess:
        end = min(self._position + self._horizon, len(self._starts) - 1)
        start, stop = int(self._starts[self._position]), int(self._starts[end])
        # A page is named at its first demand within the horizon only.
        first = self._earlier[start:stop] < start
        pages: Ids = self._pages[start:stop][first][: max(0, min(limit, self.slots // 2))]
        return Guess(pages, np.ones(len(pages), np.float32), keep=pages)


def earlier_positions(pages: Ids) -> Ids:
    """For each position the last earlier position of the same page, or -1."""
    earlier = np.full(len(pages), -1, np.int64)
    order = np.argsort(pages, kind="stable")
    same = pages[order[1:]] == pages[order[:-1]]
    earlier[order[1:][same]] = order[:-1][same]
    return earlier
