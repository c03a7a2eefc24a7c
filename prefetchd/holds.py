"""Who holds what: pages that are read, waited for or on the way, and what may be asked for at all.

Decides which blocks must not be taken away now, and which demands make no sense. Holds nothing
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prefetchd.masks import every
from prefetchd.model import Geometry, Ids, Mask
from prefetchd.staging import READING, Staging
from prefetchd.tickets import PutTicket, Ticket


class Holds:
    """`waiting`: the demands that have no answer yet, `putting`: the puts that have not ended; both
    kept up to date by whoever asks.

    What a put has stored is held until it has ended: if not all of it fits, its end finds no room,
    since a chain is of use as far as its beginning is there.
    """

    def __init__(
        self,
        staging: Staging,
        geometry: Geometry,
        waiting: Mapping[int, Ticket],
        putting: Mapping[int, PutTicket],
    ) -> None:
        self._staging = staging
        self._geometry = geometry
        self._waiting = waiting
        self._putting = putting

    def blocks(self) -> Mask:
        """Blocks (bool, one a block) whose pages somebody reads, waits for, puts or has on the
        way."""
        staging, layers = self._staging, self._geometry.layers
        held = np.zeros(self._geometry.blocks, np.bool_)
        owned = (staging.held() | (staging.state == READING)) & (staging.page_of >= 0)
        held[staging.page_of[owned] // layers] = True
        for ticket in self._waiting.values():
            held[ticket.asked // layers] = True
        for put in self._putting.values():
            stored = put.blocks_so_far
            held[stored[stored >= 0]] = True
        return held


def check_demand(pages: Ids, slots: int, geometry: Geometry) -> None:
    """Raises ValueError for a demand of impossible, repeated or too many pages."""
    if pages.ndim != 1:
        raise ValueError(f"pages are a 1-d array of ids, got shape {pages.shape}")
    if len(pages) > slots:
        raise ValueError(
            f"{len(pages)} pages demanded at once, staging holds {slots}; "
            "raise staging_bytes or ask for fewer pages"
        )
    if len(pages) == 0:
        return
    if not every(pages[1:] > pages[:-1]):
        pages = np.sort(pages)
        if (pages[1:] == pages[:-1]).any():
            raise ValueError("a page is demanded twice in one batch; make the ids distinct")
    first, last, most = int(pages[0]), int(pages[-1]), geometry.pages
    if first < 0 or last >= most:
        raise ValueError(
            f"page {first if first < 0 else last} is none of the {most} of this store; its "
            "ids come from lookup() and pages()"
        )
