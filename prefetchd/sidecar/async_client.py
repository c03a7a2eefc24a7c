"""`await prefetchd.aconnect(...)`: the client for programs that are one event loop.

Decides nothing that the other client does not, but how it waits: nothing here blocks the loop, and
everything that has to be waited for is awaited. Its methods are called in the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prefetchd.advice import Advice, Prefill
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
from prefetchd.sidecar.handshake import AwayError, SidecarError
from prefetchd.sidecar.loop_line import LoopLine
from prefetchd.sidecar.protocol import AskStats, Hello
from prefetchd.sidecar.remote import RemotePut, RemoteTicket
from prefetchd.sidecar.replies import Reply
from prefetchd.sidecar.wire import frame
from prefetchd.sidecar.writes import NO_END_NS, fail
from prefetchd.stats import Stats


class AsyncClient(Caller):
    """One namespace of a daemon. Use with `async with`. Made by `aconnect`."""

    def __init__(self, gpu: str | GpuFactory, path: Path, hello: Hello) -> None:
        super().__init__(gpu)
        self._line = LoopLine(path, hello, self._attached)

    async def open(self, timeout_s: float) -> None:
        """Attach. Raises SidecarError, GpuError."""
        await self._line.connect(timeout_s)

    async def lookup(self, keys: Keys) -> Ids:
        """See `Client.lookup`."""
        return (await self.find(keys)).blocks

    async def find(self, keys: Keys) -> Found:
        """See `Client.find`; at most `limits.keys` (65,536) keys are looked at."""
        names = as_keys(keys)[: self._limits.keys]
        attachment = self._line.attachment()
        if attachment is None:
            return Found(NO_IDS, NO_IDS)
        found = found_of(await self._line.answer(partial(find_frame, names=names), ANSWER_NS))
        self._stamps[found.blocks] = found.stamps
        return found

    async def demand(
        self,
        pages: Ids,
        *,
        stamps: Stamps | None = None,
        request: int = 0,
        scores: Scores | None = None,
        timeout_s: float | None = None,
    ) -> RemoteTicket:
        """See `Client.demand`: the ticket is answered when this returns. If this is cancelled, the
        demand is given back."""
        broken = self._line.breaks > 0
        pages, stamps = self._demanded(pages, stamps, scores, broken=broken)
        timeout_ns = self.timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        attachment, line = self._line.attachment(), self._line
        number = line.number()
        if attachment is None:
            assert self._attachment is not None
            before = self._attachment
            ticket = RemoteTicket(line, self._gpu, before, number, pages, self._given_back)
            ticket.failure = line.away
            ticket.resolve(nothing(number, len(pages)))
            return ticket
        self._open_ticket(number)
        held = self._held_ticket(line, attachment, number, pages, stamps)
        if held is not None:
            line.note((pages, kept(scores), request))
            try:
                await asyncio.sleep(0)  # others want their turn, also of who never waits
            except asyncio.CancelledError:
                held.release()
                raise
            return held
        ticket = RemoteTicket(line, self._gpu, attachment, number, pages, self._given_back)
        body = demand_frame(number, pages, timeout_ns, stamps, scores, request)
        try:
            ticket.answered(await line.ask(number, body, timeout_ns + ANSWER_NS))
        except asyncio.CancelledError:
            with suppress(SidecarError):  # closed meanwhile: the daemon has let go of it
                ticket.release()
            raise
        return ticket

    def hint(self, hint: Hint) -> None:
        """See `Client.hint`; returns at once."""
        if self._line.attachment() is None:
            self.hints_dropped += 1
        else:
            self._line.send(hint_frame(hint, time.monotonic_ns()))

    async def advise(
        self,
        blocks: Ids,
        *,
        prefill_tokens_s: float,
        block_tokens: int = 16,
        pairs_s: float | None = None,
    ) -> Advice:
        """See `Client.advise`. While the daemon is away: recompute."""
        prefill = Prefill(prefill_tokens_s, block_tokens, pairs_s)
        if self._line.attachment() is None:
            return advice_away(self._line.away, prefill, len(blocks))
        make = partial(advise_frame, blocks=blocks, prefill=prefill)
        return advice_of(await self._line.answer(make, ANSWER_NS), prefill, len(blocks))

    async def put(
        self,
        keys: Keys,
        pages: NDArray[np.generic],
        *,
        durability: str = "durable",
        ttl_s: float | None = None,
    ) -> RemotePut:
        """See `Client.put`: every block has ended when this returns."""
        names, rows = self._to_put(keys, pages, durability, ttl_s)
        line, ticket = self._line, RemotePut(self._line, len(names))
        attachment = line.attachment()
        if attachment is None:
            fail(ticket, range(len(names)), line.away)
            return ticket
        writes = self._writes_of(attachment, line.lock)
        answers: list[asyncio.Future[Reply]] = []
        for piece in writes.pieces(names, rows, (durability, ttl_s)):
            why = attachment.lost or writes.too_large(piece)
            while not why and (place := writes.place(piece)) is None:
                await line.news()
                why = attachment.lost
            if why:
                fail(ticket, range(piece.first, len(names)), why)
                break
            assert place is not None
            number = line.number()
            body, ended = writes.request(number, ticket, piece, place)
            answers.append(line.ask(number, body, NO_END_NS, ended))
        await asyncio.gather(*answers)
        return ticket

    async def stats(self) -> Stats:
        """See `Client.stats`. Raises AwayError."""
        if self._line.attachment() is None:
            raise AwayError(self._line.away)
        reply = await self._line.answer(lambda number: frame(AskStats(number)), ANSWER_NS)
        return self._stats_of(reply, self._gpu.engine)

    @property
    def uses_dropped(self) -> int:
        """Demands met in place that the daemon was not told of, since it took nothing."""
        return self._line.uses_dropped

    @property
    def away(self) -> str:
        """Why the daemon is away, in words; empty while it is there."""
        return self._line.away

    async def until_back(self) -> None:
        """Return once the daemon is there."""
        while self._line.away:
            await self._line.news()

    async def close(self) -> None:
        """Let go of the daemon. Harmless when repeated."""
        await self._line.close()
        self._gpu.close()
        self._attachment = self._writes = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
