"""Staged pages, read by a client without asking the daemon.

Decides when a client may: when all the pages it wants are said to be there by the books, and are
still said to be once it has marked their slots. In every other case it asks. Refuses to know
sockets, and what the daemon makes of it.
"""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from prefetchd.books import Books
from prefetchd.lookups import Stamps
from prefetchd.masks import every
from prefetchd.model import Codes, Geometry, Ids, Outcome, Slots
from prefetchd.sidecar.marks import Marks, fence
from prefetchd.staging import READY

_TIMELY = np.uint8(Outcome.TIMELY)


class InPlace:
    """Thread-safe."""

    def __init__(self, books: Books, marks: Marks, geometry: Geometry) -> None:
        self._books = books
        self._marks = marks
        self._layers = geometry.layers
        self._lock = threading.Lock()

    def hold(self, pages: Ids, stamps: Stamps | None) -> tuple[Slots, Codes] | None:
        """The slots of these pages (distinct, of the store), all of them, which stay theirs until
        `let_go`, and how each was found (Outcome); None if they have to be asked for."""
        books = self._books
        blocks = pages // self._layers
        if stamps is None:
            stamps = books.stamps[blocks]
        slots = books.slot_of[pages]
        if np.minimum.reduce(slots, initial=0) < 0:
            return None
        self._mark(slots)
        if not self._stand(pages, slots, blocks, stamps):
            self.let_go(slots)
            return None
        return slots.astype(np.int64), books.fresh[slots] * _TIMELY

    def _mark(self, slots: NDArray[np.int32]) -> None:
        with self._lock:
            self._marks.count[0] += 1
            self._marks.on[slots] += 1
        fence()

    def _stand(self, pages: Ids, slots: NDArray[np.int32], blocks: Ids, stamps: Stamps) -> bool:
        """Whether these pages of these blocks are there now, in these slots.

        In this order: a time that has come is put off once what has expired is hidden, and a hidden
        block's place is another's, with another stamp, before it can be visible again.
        """
        books = self._books
        return bool(
            books.expiry_ns[0] > time.time_ns()
            and books.serves[0]
            and every(books.visible[blocks])
            and every(books.slot_of[pages] == slots)
            and every(books.state[slots] == READY)
            and every(books.stamps[blocks] == stamps)
        )

    def let_go(self, slots: Slots | NDArray[np.int32]) -> None:
        with self._lock:
            self._marks.on[slots] -= 1
            self._marks.count[0] -= 1
