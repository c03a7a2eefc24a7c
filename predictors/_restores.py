"""Which requests are coming back, said by hints, and whether what they need has room.

Decides for `auto` when a restore is under way: then pages are needed for certain, and nothing is
left to weigh. Guesses nothing and knows no pages.
"""

from __future__ import annotations

from prefetchd.model import ChainHint, DoneHint, Geometry

REQUESTS_MAX = 64
STAGING_SHARE = 0.5
"""A request that needs more than this of the slots at once is no restore: it would push itself
out, and sparse attention reads only some of its pages."""


class Restores:
    def __init__(self, geometry: Geometry, slots: int) -> None:
        self._blocks_max = int(slots * STAGING_SHARE) // geometry.layers
        self._requests: dict[int, None] = {}  # oldest first

    def hinted(self, hint: ChainHint) -> None:
        self._requests.pop(hint.request, None)
        if 0 < len(hint.blocks) <= self._blocks_max:
            self._requests[hint.request] = None
            if len(self._requests) > REQUESTS_MAX:
                self._requests.pop(next(iter(self._requests)))

    def done(self, hint: DoneHint) -> None:
        self._requests.pop(hint.request, None)

    @property
    def any(self) -> bool:
        return bool(self._requests)
