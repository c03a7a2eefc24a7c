"""What a client's callers hold: the runtime's own tickets, answered over a line.

Decides that nothing of a connection that has ended is to be looked at any more. What tickets can
do is decided where the runtime's are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Self

import numpy as np

from prefetchd.gpu import GpuDevice, Push
from prefetchd.model import Codes, Ids, Ready, Slots
from prefetchd.sidecar.conversation import Attachment, nothing, ready_of
from prefetchd.sidecar.in_place import InPlace
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.remote_buffers import RemoteBuffers, RemotePush
from prefetchd.sidecar.replies import Error, Reply
from prefetchd.sidecar.wire import ProtocolError
from prefetchd.tickets import Driven, PageMissing, PutTicket, Ticket


class RemoteTicket(Ticket):
    """A demand of a daemon. When the connection over which it was answered ends, all its pages are
    missing. Views that were taken before may then change: bytes that were read from one are right
    if `valid` still holds after they have been read."""

    def __init__(
        self,
        line: Driven,
        gpu: GpuDevice,
        attachment: Attachment,
        number: int,
        pages: Ids,
        given_back: Callable[[Ticket], None],
    ) -> None:
        super().__init__(line, gpu, attachment.staged, number, pages)
        self._attachment = attachment
        self._given_back = given_back
        self.link: Link | None = None
        self.buffers: RemoteBuffers | None = None
        """Those into which the daemon may push, if it is asked over a link."""
        self.failure = ""
        """Why nothing could be had, if that is not a matter of single pages."""

    @property
    def valid(self) -> bool:
        """Whether its pages are still its own."""
        return not self._attachment.lost and not self._released

    def answered(self, reply: Reply) -> None:
        if isinstance(reply, Error):
            self.failure = reply.words
        count = len(self.pages)
        try:
            ready = ready_of(reply, self.number, count, self._attachment.welcome.slots)
        except ProtocolError as error:
            self.failure = str(error)
            ready = nothing(self.number, count)
        self.resolve(ready)

    def push(self, buffer: Any, start: int = 0, *, skip_missing: bool = False) -> Push:
        """See `Ticket.push`. Into a buffer of `Client.buffer` the daemon pushes, if both have the
        same GPU; then a push that fails raises GpuError when it is waited for."""
        if self.buffers is not None and self.link is not None:
            slots = self.slots[~self.missing] if skip_missing else self._present(None)
            gpu, number = self._gpu, self.number
            push = self.buffers.push(
                gpu, self.link, number, slots, buffer, start, skip_missing=skip_missing
            )
            if push is not None:
                self._pushes.append(push)
                return push
        return super().push(buffer, start, skip_missing=skip_missing)

    def release(self) -> None:
        if not self._released:
            for push in self._pushes:
                if isinstance(push, RemotePush):
                    push.settle()  # one that failed is told to who waits for it, not here
            self._given_back(self)
            if self._ready is None:
                self.resolve(nothing(self.number, len(self.pages)))
        super().release()

    @property
    def answer(self) -> Ready:
        if self._attachment.lost:
            return nothing(self.number, len(self.pages))
        return super().answer

    def _present(self, places: Ids | None) -> Slots:
        if self._attachment.lost and not self._released:
            raise PageMissing(f"{self._attachment.lost}; recompute these pages")
        return super()._present(places)

    def __await__(self) -> Generator[Any, None, Self]:
        if not self.done:
            yield from asyncio.to_thread(self.wait).__await__()
        return self


class HeldTicket(RemoteTicket):
    """A demand of pages that were all staged, and are read without asking the daemon."""

    def hold(self, in_place: InPlace, slots: Slots, outcomes: Codes) -> None:
        self._in_place = in_place
        self.resolve(Ready(self.number, slots, outcomes, np.zeros(len(slots), np.int64)))

    def _give_back(self) -> None:
        assert self._ready is not None
        self._in_place.let_go(self._ready.slots)


class RemotePut(PutTicket):
    """A put to a daemon."""

    def __await__(self) -> Generator[Any, None, Self]:
        if self.done:
            return self
        yield from asyncio.to_thread(self._engine.wait, lambda: self.done).__await__()
        return self
