"""Who holds what: pages that are read, waited for or on the way, and what may be asked for at all.

Decides which blocks must not be taken away now, and which demands make no sense. Holds nothing
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prefetchd.model import Geometry, Ids, Mask
from prefetchd.staging import READING, Staging
from prefetchd.tickets import Ticket


class Holds:
    """`waiting`: the demands that have no answer yet, kept up to date by whoever asks."""

    def __init__(self, staging: Staging, geometry: Geometry, waiting: Mapping[int, Ticket]) -> None:
        self._staging = staging
        self._geometry = geometry
        self._waiting = waiting

    def blocks(self) -> Mask:
        """Blocks (bool, one a block) whose pages somebody reads, waits for or has on the way."""
        staging, layers = self._staging, self._geometry.layers
        held = np.zeros(self._geometry.blocks, np.bool_)
        owned = (staging.pins > 0) | (staging.state == READING)
        held[staging.page_of[owned] // layers] = True
        for ticket in self._waiting.values():
            held[ticket.asked // layers] = True
        return held

    def check_demand(self, pages: Ids) -> None:
        """Raises ValueError for a demand of impossible, repeated or too many pages."""
        if pages.ndim != 1:
            raise ValueError(f"pages are a 1-d array of ids, got shape {pages.shape}")
        if len(pages) > self._staging.slots:
            raise ValueError(
                f"{len(pages)} pages demanded at once, staging holds {self._staging.slots}; "
                "raise staging_bytes or ask for fewer pages"
            )
        # Read as unsigned, a negative id is a huge one.
        if len(pages) and pages.view(np.uint64).max() >= self._geometry.pages:
            bad = pages[(pages < 0) | (pages >= self._geometry.pages)][0]
            raise ValueError(
                f"page {bad} is none of the {self._geometry.pages} of this store; its ids come "
                "from lookup() and pages()"
            )
        if (pages[1:] <= pages[:-1]).any() and not _distinct(pages):
            raise ValueError("a page is demanded twice in one batch; make the ids distinct")


def _distinct(pages: Ids) -> bool:
    ordered = np.sort(pages)
    return bool((ordered[1:] != ordered[:-1]).all())
