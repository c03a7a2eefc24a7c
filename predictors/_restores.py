"""Which requests are coming back, said by hints, and whether what they need has room.

Decides for `auto` when a restore is under way: then pages are needed for certain, and nothing is
left to weigh. Guesses nothing.
"""

from __future__ import annotations

import numpy as np

from prefetchd.model import ChainHint, DoneHint, Geometry, Ids, Mask

REQUESTS_MAX = 64
STAGING_SHARE = 0.5
"""A request that needs more than this of the slots at once is no restore: it would push itself
out, and sparse attention reads only some of its pages."""


class Restores:
    def __init__(self, geometry: Geometry, slots: int) -> None:
        self._blocks_max = int(slots * STAGING_SHARE) // geometry.layers
        self._geometry = geometry
        self._requests: dict[int, Ids] = {}  # their blocks; oldest first
        self._named = np.zeros(geometry.blocks, np.uint8)  # by how many of them

    def hinted(self, hint: ChainHint) -> None:
        self._forget(hint.request)
        if 0 < len(hint.blocks) <= self._blocks_max:
            blocks = np.unique(self._geometry.real(hint.blocks))
            self._requests[hint.request] = blocks
            self._named[blocks] += 1
            if len(self._requests) > REQUESTS_MAX:
                self._forget(next(iter(self._requests)))

    def done(self, hint: DoneHint) -> None:
        self._forget(hint.request)

    def _forget(self, request: int) -> None:
        if (blocks := self._requests.pop(request, None)) is not None:
            self._named[blocks] -= 1

    def named(self, pages: Ids) -> Mask:
        """Which pages are of blocks that a request coming back was said to need."""
        named: Mask = self._named[pages // self._geometry.layers] > 0
        return named

    @property
    def any(self) -> bool:
        return bool(self._requests)
