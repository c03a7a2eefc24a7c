"""Puts on their way to the daemon: through the write arena or, small ones, over the line.

Decides in what pieces a put goes and what it waits for. Refuses to know what the daemon does.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prefetchd.sidecar.conversation import put_end_of, put_frame
from prefetchd.sidecar.line import Line
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.protocol import Reply
from prefetchd.sidecar.regions import Regions
from prefetchd.sidecar.remote import RemotePut

_NO_END_NS = 1 << 62
"""A put is waited for by its ticket, which has a limit of its own."""


class Writes:
    """Of one link. `stamps` (one a block): what is told of blocks goes there; `inline_bytes`: up to
    this a put needs no arena."""

    def __init__(
        self, line: Line, link: Link, stamps: NDArray[np.int64], inline_bytes: int
    ) -> None:
        self._stamps = stamps
        self._line = line
        self._link = link
        limits = link.attachment.welcome.limits
        self._inline_bytes = min(inline_bytes, limits.inline_bytes)
        self._keys_max, self._puts_max = limits.keys, limits.puts
        arena = link.attachment.write_arena
        self._arena = arena if arena is not None else np.empty(0, np.uint8)
        self._regions = Regions(len(self._arena))
        self._under_way = 0

    def put(
        self,
        names: list[bytes],
        rows: NDArray[np.uint8],
        durability: str,
        ttl_s: float | None,
        timeout_ns: int,
    ) -> RemotePut:
        """`rows`: (blocks, layers, page_bytes), the caller's again on return."""
        ticket = RemotePut(self._line, len(names))
        extent = self._link.attachment.extent_bytes
        # Half of the arena at most, so that one piece is taken while the next is copied.
        step = max(1, min(len(self._arena) // 2 // extent, self._keys_max))
        if rows.nbytes <= self._inline_bytes:
            step = max(1, len(names))
        for first in range(0, len(names), step):
            terms = durability, ttl_s
            piece = slice(first, first + step)
            why = self._send(ticket, first, names[piece], rows[piece], terms, timeout_ns)
            if why:
                with self._line.lock:
                    self._fail(ticket, range(first, len(names)), why)
                break
        return ticket

    def _send(
        self,
        ticket: RemotePut,
        first: int,
        names: list[bytes],
        rows: NDArray[np.uint8],
        terms: tuple[str, float | None],
        timeout_ns: int,
    ) -> str:
        """Why it could not be sent; empty if it could."""
        line, link = self._line, self._link
        length = rows.nbytes
        inline = length <= self._inline_bytes
        if not inline and length > len(self._arena):
            return (
                f"a block of {length} bytes does not fit into a write arena of {len(self._arena)}"
            )
        places: list[int] = []

        def ready() -> bool:
            with line.lock:
                if link.attachment.lost or places:
                    return True  # it is asked again once it was so
                if self._under_way < self._puts_max:
                    place = 0 if inline else self._regions.take(length)
                    if place is not None:
                        places.append(place)
                        self._under_way += 1
                return bool(places)

        if not line.wait(ready, line.clock() + timeout_ns):
            return "the write arena is full; the daemon ends no put"
        if link.attachment.lost:
            return link.attachment.lost
        place = places[0]
        if not inline:
            self._arena[place : place + length] = rows.reshape(-1)
        number = line.number()
        source = rows.tobytes() if inline else place
        ended = partial(self._ended, ticket, first, len(names), None if inline else place)
        body = put_frame(number, names, source, *terms)
        line.ask(link, number, body, ended, _NO_END_NS)
        return ""

    def _ended(
        self, ticket: RemotePut, first: int, count: int, place: int | None, reply: Reply
    ) -> None:
        """Called under the lock."""
        self._under_way -= 1
        if place is not None:
            self._regions.give_back(place)
        blocks, stamps, failures, refused = put_end_of(reply, count)
        # The daemon counts blocks from the beginning of the piece.
        ticket.failures += [
            re.sub(r"^block (\d+)", lambda found: f"block {int(found[1]) + first}", words)
            for words in failures
        ]
        ticket.refused += [first + place for place in refused]
        for position, (block, stamp) in enumerate(zip(blocks, stamps, strict=True), first):
            ticket.settle(position, block, stamp=stamp)
            if block >= 0:
                self._stamps[block] = stamp

    def _fail(self, ticket: RemotePut, positions: range, why: str) -> None:
        for position in positions:
            ticket.settle(position, -1, f"block {position} was not stored: {why}")


def put_nothing(line: Line, count: int, why: str) -> RemotePut:
    """A put while there is no daemon."""
    ticket = RemotePut(line, count)
    for position in range(count):
        ticket.settle(position, -1, f"block {position} was not stored: {why}")
    return ticket
