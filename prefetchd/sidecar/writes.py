"""Puts on their way to the daemon: through the write arena or, small ones, over the connection.

Decides in what pieces a put goes, where each lies, and what its answer means. Refuses to know how
anybody waits for room.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.sidecar.conversation import Answered, Attachment, put_end_of, put_frame
from prefetchd.sidecar.regions import Regions
from prefetchd.sidecar.remote import RemotePut
from prefetchd.sidecar.replies import Reply

NO_END_NS = 1 << 62
"""A put is waited for by its ticket, which has a limit of its own."""
_INLINE_BYTES = 1 << 14
"""Up to this a put's bytes go over the connection: sent sooner than placed and mapped."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some blocks of a put, the first of which is block number `first` of it."""

    first: int
    names: list[bytes]
    rows: NDArray[np.uint8]
    terms: tuple[str, float | None]
    """Durability, and seconds to live."""


class Writes:
    """Of one attachment. `stamps` (one a block): what is told of blocks goes there. `lock` is held
    by whoever answers."""

    def __init__(
        self,
        attachment: Attachment,
        stamps: NDArray[np.int64],
        lock: AbstractContextManager[Any],
    ) -> None:
        limits = attachment.welcome.limits
        self._attachment = attachment
        self._stamps = stamps
        self._lock = lock
        self._inline_bytes = min(_INLINE_BYTES, limits.inline_bytes)
        self._keys_max, self._puts_max = limits.keys, limits.puts
        arena = attachment.write_arena
        self._arena = arena if arena is not None else np.empty(0, np.uint8)
        self._regions = Regions(len(self._arena))
        self._under_way = 0

    def pieces(
        self, names: list[bytes], rows: NDArray[np.uint8], terms: tuple[str, float | None]
    ) -> Iterator[Piece]:
        """Half of the arena at most, so that one is taken while the next is copied."""
        step = max(1, min(len(self._arena) // 2 // self._attachment.extent_bytes, self._keys_max))
        if rows.nbytes <= self._inline_bytes:
            step = max(1, len(names))
        for first in range(0, len(names), step):
            part = slice(first, first + step)
            yield Piece(first, names[part], rows[part], terms)

    def too_large(self, piece: Piece) -> str:
        """Why it can never be sent; empty if it can."""
        length, size = piece.rows.nbytes, len(self._arena)
        if length <= max(self._inline_bytes, size):
            return ""
        return f"a block of {length} bytes does not fit into a write arena of {size} bytes"

    def place(self, piece: Piece) -> int | None:
        """A place for a piece, which counts as under way from here on; None if there is none now.
        -1: it needs none."""
        length = piece.rows.nbytes
        with self._lock:
            if self._under_way >= self._puts_max:
                return None
            place = -1 if length <= self._inline_bytes else self._regions.take(length)
            self._under_way += place is not None
            return place

    def request(
        self, number: int, ticket: RemotePut, piece: Piece, place: int
    ) -> tuple[bytes, Answered]:
        """The frame, and what is to be told its answer. The rows are the caller's again."""
        rows, source = piece.rows, place
        if place >= 0:
            self._arena[place : place + rows.nbytes] = rows.reshape(-1)
        body = put_frame(number, piece.names, rows.tobytes() if place < 0 else source, *piece.terms)
        return body, partial(self._ended, ticket, piece.first, len(piece.names), place)

    def _ended(self, ticket: RemotePut, first: int, count: int, place: int, reply: Reply) -> None:
        """Called under the lock."""
        self._under_way -= 1
        if place >= 0:
            self._regions.give_back(place)
        blocks, stamps, failures, refused = put_end_of(reply, count)
        # The daemon counts blocks from the beginning of the piece.
        ticket.failures += [
            re.sub(r"^block (\d+)", lambda found: f"block {int(found[1]) + first}", words)
            for words in failures
        ]
        ticket.refused += [first + position for position in refused]
        for position, (block, stamp) in enumerate(zip(blocks, stamps, strict=True), first):
            if block >= 0:
                self._stamps[block] = stamp
            ticket.settle(position, block, stamp=stamp)


def fail(ticket: RemotePut, positions: range, why: str) -> None:
    """These blocks were never sent."""
    for position in positions:
        ticket.settle(position, -1, f"block {position} was not stored: {why}")
