"""Which page is where, and whether it may be read: tables that others may look at without asking.

Decides which tables those are and how they lie in one piece of memory. Refuses to know who writes
them, whose memory it is and who looks.

Each number is written as a whole, and in an order that a reader can rely on: a page is only said to
be in a slot whose state is no longer that of the page before it, and a slot is only used for
something else after its page was said to be gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Geometry, Mask, Slots

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Books:
    """`slot_of` (int32, one a page): where it is; -1: nowhere. `state` (uint8, one a slot): only
    READY ones can be read. `fresh` (bool, one a slot): prefetched, and not demanded since.
    `visible` (bool, one a block): there to be asked for. `stamps` (int64, one a block): see
    `Found`. `expiry_ns` (int64, 1): by the wall clock, when some block may have expired. `serves`
    (int64, 1): 0 once nothing may be read any more."""

    slot_of: NDArray[np.int32]
    state: NDArray[np.uint8]
    fresh: Mask
    visible: Mask
    stamps: NDArray[np.int64]
    expiry_ns: NDArray[np.int64]
    serves: NDArray[np.int64]


BooksFactory = Callable[[Geometry, int], Books]
"""From a geometry and a number of slots."""


class Readers(Protocol):
    """Who reads slots without asking. What it answers is an input of the core's like an event."""

    def reading(self, slots: Slots | None) -> Mask:
        """Which of these slots (None: of all) somebody reads, one a slot. Who had not begun before
        this was asked sees all that was written to the books before."""


def private_books(geometry: Geometry, slots: int) -> Books:
    """In memory of this process's own."""
    return books_in(np.zeros(books_bytes(geometry, slots), np.uint8), geometry, slots)


def books_bytes(geometry: Geometry, slots: int) -> int:
    return sum(_space(dtype, count) for _, dtype, count in _tables(geometry, slots))


def books_in(memory: NDArray[np.uint8], geometry: Geometry, slots: int) -> Books:
    """Views of `memory`: one table after another, each on a line of its own."""
    views: dict[str, Any] = {}
    at = 0
    for name, dtype, count in _tables(geometry, slots):
        views[name] = memory[at : at + count * np.dtype(dtype).itemsize].view(dtype)
        at += _space(dtype, count)
    return Books(**views)


def _tables(geometry: Geometry, slots: int) -> list[tuple[str, type[np.generic], int]]:
    return [
        ("serves", np.int64, 1),
        ("expiry_ns", np.int64, 1),
        ("stamps", np.int64, geometry.blocks),
        ("slot_of", np.int32, geometry.pages),
        ("visible", np.bool_, geometry.blocks),
        ("state", np.uint8, slots),
        ("fresh", np.bool_, slots),
    ]


def _space(dtype: type[np.generic], count: int) -> int:
    size = np.dtype(dtype).itemsize * count
    return size + -size % _ALIGNMENT_BYTES
