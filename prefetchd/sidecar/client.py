"""`prefetchd.connect(...)`: the runtime's API, answered by a daemon.

Decides what callers may ask and what they get while the daemon is away: every page is missing,
every lookup empty, every put fails in words. Nothing hangs. How bytes travel is the line's, what
they mean the conversation's.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.advice import Advice, Prefill
from prefetchd.closing import Closing
from prefetchd.growing import GrowError
from prefetchd.lookups import Found, Keys, Stamps, as_keys
from prefetchd.model import NO_IDS, Hint, Ids, Scores
from prefetchd.options import GpuFactory
from prefetchd.sidecar.advising import advice_away, advice_of, advise_frame
from prefetchd.sidecar.caller import ANSWER_NS, Caller
from prefetchd.sidecar.conversation import (
    demand_frame,
    find_frame,
    found_of,
    hint_frame,
    kept,
    nothing,
)
from prefetchd.sidecar.handshake import AwayError
from prefetchd.sidecar.line import Line
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.place import path_of
from prefetchd.sidecar.protocol import AskStats, Hello
from prefetchd.sidecar.remote import RemotePut, RemoteTicket
from prefetchd.sidecar.remote_buffers import RemoteBuffers, pushed_by
from prefetchd.sidecar.remote_growing import RemoteGrowing, grow
from prefetchd.sidecar.wire import frame
from prefetchd.sidecar.writes import NO_END_NS, Piece, Writes, fail
from prefetchd.stats import Stats
from prefetchd.tickets import Ticket


class Client(Caller, Closing):
    """One namespace of a daemon. Usable as a context manager, also `async with`. Thread-safe; a
    thread that waits alone drives the socket itself. Made by `connect`."""

    def __init__(self, address: str, hello: Hello, gpu: str | GpuFactory, timeout_s: float) -> None:
        super().__init__(gpu)
        self._line = Line(path_of(address), hello, self._attached, timeout_s)
        self._buffers = RemoteBuffers(self._line, self._note)

    # --- what an engine asks ---

    def lookup(self, keys: Keys) -> Ids:
        """See `Runtime.lookup`. Empty while the daemon is away."""
        return self.find(keys).blocks

    def find(self, keys: Keys) -> Found:
        """See `Runtime.find`. Empty while the daemon is away."""
        names = as_keys(keys)
        parts: list[Found] = []
        most = self._limits.keys
        for start in range(0, max(1, len(names)), most):
            part = names[start : start + most]
            parts.append(self._find(part))
            if len(parts[-1]) < len(part):
                break
        if len(parts) == 1:
            return parts[0]
        blocks = np.concatenate([part.blocks for part in parts])
        return Found(blocks, np.concatenate([part.stamps for part in parts]))

    def _find(self, names: list[bytes]) -> Found:
        link = self._link()
        if link is None:
            return Found(NO_IDS, NO_IDS)
        reply = self._line.answer(link, partial(find_frame, names=names), ANSWER_NS)
        found = found_of(reply)
        self._stamps[found.blocks] = found.stamps
        return found

    def _link(self) -> Link | None:
        """None while the daemon is away. Raises SidecarError once this client was closed."""
        self._line.check()
        return self._line.link

    def demand(
        self,
        pages: Ids,
        *,
        stamps: Stamps | None = None,
        request: int = 0,
        scores: Scores | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """See `Runtime.demand`. While the daemon is away, all pages are missing.

        Block indices do not outlive a daemon. Once it has come back, pages whose blocks were not
        found or put again by this client are missing, unless stamps are given.
        """
        broken = self._line.breaks > 0
        pages, stamps = self._demanded(pages, stamps, scores, broken=broken)
        timeout_ns = self.timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        link, line = self._link(), self._line
        if link is None:
            return self._missing(pages)
        number = line.number()
        with line.lock:
            self._open_ticket(number)
        if not self._buffers.lent:  # pages that the daemon pushes are demanded of it
            held = self._held_ticket(line, link.attachment, number, pages, stamps)
            if held is not None:
                line.note(link, (pages, kept(scores), request))
                return held
        gpu, given_back = self._gpu, self._given_back
        ticket = RemoteTicket(line, gpu, link.attachment, number, pages, given_back)
        ticket.buffers, ticket.link = self._buffers, link
        body = demand_frame(number, pages, timeout_ns, stamps, scores, request)
        line.ask(link, number, body, ticket.answered, timeout_ns + ANSWER_NS)
        return ticket

    def _missing(self, pages: Ids) -> Ticket:
        assert self._attachment is not None
        ticket = RemoteTicket(self._line, self._gpu, self._attachment, 0, pages, self._given_back)
        ticket.failure = self._line.away
        ticket.resolve(nothing(0, len(pages)))
        return ticket

    def hint(self, hint: Hint) -> None:
        """See `Runtime.hint`. Dropped and counted while the daemon is away."""
        link = self._link()
        if link is None:
            self.hints_dropped += 1
        else:
            self._line.send(link, hint_frame(hint, self._line.clock()))

    def advise(
        self,
        blocks: Ids,
        *,
        prefill_tokens_s: float,
        block_tokens: int = 16,
        pairs_s: float | None = None,
    ) -> Advice:
        """See `Runtime.advise`. While the daemon is away: recompute."""
        prefill = Prefill(prefill_tokens_s, block_tokens, pairs_s)
        link = self._link()
        if link is None:
            return advice_away(self._line.away, prefill, len(blocks))
        make = partial(advise_frame, blocks=blocks, prefill=prefill)
        return advice_of(self._line.answer(link, make, ANSWER_NS), prefill, len(blocks))

    def tend(self, seconds: float) -> None:
        """Take in what has come, and sleep: the daemon needs none of this thread's time."""
        link = self._link()
        if link is not None:
            self._line.collect(link)
        time.sleep(seconds)

    def put(
        self,
        keys: Keys,
        pages: NDArray[np.generic],
        *,
        durability: str = "durable",
        ttl_s: float | None = None,
    ) -> RemotePut:
        """See `Runtime.put`. While the daemon is away every block fails, in words; if it goes while
        a put is under way, blocks that failed may have been stored all the same."""
        names, rows = self._to_put(keys, pages, durability, ttl_s)
        ticket = RemotePut(self._line, len(names))
        link = self._link()
        if link is None:
            fail(ticket, range(len(names)), self._line.away)
            return ticket
        writes = self._writes_of(link.attachment, self._line.lock)
        for piece in writes.pieces(names, rows, (durability, ttl_s)):
            if why := self._send(link, writes, ticket, piece):
                with self._line.lock:
                    fail(ticket, range(piece.first, len(names)), why)
                break
        return ticket

    def _send(self, link: Link, writes: Writes, ticket: RemotePut, piece: Piece) -> str:
        """Why it could not be sent; empty if it could."""
        if why := writes.too_large(piece):
            return why
        line, places = self._line, list[int]()

        def ready() -> bool:
            if not places and (place := writes.place(piece)) is not None:
                places.append(place)
            return bool(places or link.attachment.lost)

        if not line.wait(ready, line.clock() + self.timeout_ns):
            return "the write arena is full; the daemon ends no put"
        if not places:
            return link.attachment.lost
        number = line.number()
        body, ended = writes.request(number, ticket, piece, places[0])
        line.ask(link, number, body, ended, NO_END_NS)
        return ""

    def grow(self, *, request: int = 0) -> RemoteGrowing:
        """See `Runtime.grow`. The block goes with the connection, unless it was sealed. Raises
        GrowError while the daemon is away."""
        link = self._link()
        if link is None:
            raise GrowError(f"no block can be opened: {self._line.away}")
        return grow(self._line, link, self._stamps, request, self.timeout_ns)

    # --- buffers ---

    def buffer(self, pages: int) -> Any:
        """See `Runtime.buffer`. The daemon pushes into it if both have the same GPU; `notes` and
        `stats().gpu` say who does."""
        return self._buffers.buffer(self._gpu, pages)

    def peek(self, buffer: Any, pages: int, length: int) -> NDArray[np.uint8]:
        """See `Runtime.peek`."""
        self._buffers.settle()
        return super().peek(buffer, pages, length)

    # --- state and end ---

    @property
    def uses_dropped(self) -> int:
        """Demands met in place that the daemon was not told of, since it took nothing."""
        return self._line.notices.dropped

    @property
    def away(self) -> str:
        """Why the daemon is away, in words; empty while it is there."""
        return self._line.away

    def wait_until_back(self, timeout_s: float) -> bool:
        """Whether the daemon is there, now or within that time."""
        return self._line.wait_until_back(timeout_s)

    def stats(self) -> Stats:
        """The counters of the namespace, all its clients together. Raises AwayError."""
        link = self._link()
        if link is None:
            raise AwayError(self._line.away)
        reply = self._line.answer(link, lambda number: frame(AskStats(number)), ANSWER_NS)
        return self._stats_of(reply, pushed_by(self._gpu.engine, self._buffers.engine))

    def close(self) -> None:
        """Let go of the daemon, which goes on; puts that have not ended are ended by it."""
        self._buffers.close()
        self._line.close()
        self._gpu.close()
        self._attachment = self._writes = None
