"""Open blocks of a daemon, with the embedded runtime's API.

Decides when a write has happened: once the daemon says so, since whoever holds a view of the page
is to see it then. Refuses to know how bytes travel.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prefetchd.growing import GrowError
from prefetchd.lookups import as_keys
from prefetchd.model import Ids
from prefetchd.sidecar.caller import ANSWER_NS
from prefetchd.sidecar.conversation import words_of
from prefetchd.sidecar.handshake import SidecarError
from prefetchd.sidecar.line import Line
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.protocol import Drop, Grow, Ping, Seal, Write
from prefetchd.sidecar.remote import RemotePut
from prefetchd.sidecar.replies import Error, Grown, Reply, Sealed
from prefetchd.sidecar.wire import frame
from prefetchd.sidecar.writes import NO_END_NS
from prefetchd.terms import check_terms

_PIECE_BYTES = 1 << 16


def grow(
    line: Line, link: Link, stamps: NDArray[np.int64], request: int, timeout_ns: int
) -> RemoteGrowing:
    """`stamps` (one a block): what is told of the block goes there. Raises GrowError,
    SidecarError."""
    reply = line.answer(link, lambda number: frame(Grow(number, request)), timeout_ns + ANSWER_NS)
    if isinstance(reply, Grown) and 0 <= reply.block < len(stamps):
        stamps[reply.block] = reply.stamp
        return RemoteGrowing(line, link, stamps, reply.block, request)
    words = words_of(reply)
    if link.attachment.lost:
        raise GrowError(f"no block can be opened: {words}")
    if isinstance(reply, Error) and reply.code == "limit":
        raise GrowError(words)
    raise SidecarError(words)


class RemoteGrowing:
    """A block that is written bit by bit and can be demanded all the while. Made by `Client.grow`.

    As `GrowingBlock`. It ends with the connection as well: nothing of it is left then, unless it
    was sealed.
    """

    def __init__(
        self, line: Line, link: Link, stamps: NDArray[np.int64], number: int, request: int
    ) -> None:
        self._line = line
        self._link = link
        self._stamps = stamps
        self._number = number
        self.request = request
        self._lock = threading.Lock()  # taken before the line's
        self._open = True
        self._dropped = False

    @property
    def number(self) -> int:
        """See `GrowingBlock.number`. Raises ValueError if it was dropped."""
        if self._dropped:
            raise ValueError("the block was dropped; nothing of it is left")
        return self._number

    @property
    def is_open(self) -> bool:
        return self._open and not self._link.attachment.lost

    def pages(self, layer: int) -> Ids:
        """Its page id of one layer (int64, length 1), for `demand` beside other pages."""
        geometry = self._link.attachment.geometry
        return geometry.checked_page_ids(np.array([self.number]), layer)

    def write(self, layer: int, data: NDArray[np.generic], at: int) -> None:
        """Copy `data` (any shape and dtype) into the page of one layer, from byte `at` on.

        One round trip: on return everybody who demanded the page sees it. Raises ValueError outside
        the page, or when the block is not open any more.
        """
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        welcome = self._link.attachment.welcome
        if not 0 <= layer < welcome.layers or not 0 <= at <= welcome.page_bytes - len(flat):
            raise ValueError(
                f"{len(flat)} bytes at byte {at} of layer {layer}: a block has "
                f"{welcome.layers} layers of {welcome.page_bytes} bytes"
            )
        step = min(_PIECE_BYTES, welcome.limits.inline_bytes)
        with self._lock:
            self._check()
            for start in range(0, len(flat), step):
                self._write(layer, flat[start : start + step].tobytes(), at + start)

    def _write(self, layer: int, data: bytes, at: int) -> None:
        block = self._number
        reply = self._line.answer(
            self._link, lambda number: frame(Write(number, block, layer, at, data)), ANSWER_NS
        )
        if isinstance(reply, Error):
            self._check()
            if reply.code == "bad_request":
                raise ValueError(reply.words)
            raise SidecarError(reply.words)

    def seal(
        self, key: bytes, *, durability: str = "durable", ttl_s: float | None = None
    ) -> RemotePut:
        """See `GrowingBlock.seal`. What was not taken is open again once the ticket is done."""
        (name,) = as_keys([key])
        check_terms(durability, ttl_s)
        line, ticket = self._line, RemotePut(self._line, 1)
        with self._lock:
            self._check()
            self._open = False
            number = line.number()
            body = frame(Seal(number, self._number, name, durability, ttl_s))
            line.ask(self._link, number, body, lambda reply: self._sealed(ticket, reply), NO_END_NS)
        return ticket

    def _sealed(self, ticket: RemotePut, reply: Reply) -> None:
        """Called under the line's lock."""
        if isinstance(reply, Sealed) and reply.block < len(self._stamps):
            self._open = reply.is_open
            failures, block, stamp = reply.failures, reply.block, reply.stamp
            if reply.refused:
                ticket.refused.append(0)
            if not reply.is_open:
                self._number, self._dropped = block, block < 0
            if block >= 0:
                self._stamps[block] = stamp
        else:
            words = words_of(reply)
            self._open = not self._link.attachment.lost  # it was not the daemon's to seal
            failures, block, stamp = [f"block 0 was not stored: {words}"], -1, 0
        ticket.failures += failures
        ticket.settle(0, block, stamp=stamp)

    def drop(self) -> None:
        """Give the block up; nothing of it is left. Harmless when it was sealed or dropped."""
        with self._lock:
            if self._open:
                self._open, self._dropped = False, True
                if not self._link.attachment.lost:
                    drop = frame(Drop(self._number))
                    with suppress(SidecarError):  # closed meanwhile: then it goes by itself
                        # Who reads by the books is not to find it any more when this returns.
                        self._line.answer(
                            self._link, lambda number: drop + frame(Ping(number)), ANSWER_NS
                        )

    def _check(self) -> None:
        self._line.check()
        if lost := self._link.attachment.lost:
            raise ValueError(f"the block went with the daemon: {lost}; open another")
        if not self._open:
            raise ValueError("the block was sealed or dropped; open another")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
