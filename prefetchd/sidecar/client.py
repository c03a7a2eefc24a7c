"""`prefetchd.connect(...)`: the runtime's API, answered by a daemon.

Decides what callers may ask and what they get while the daemon is away: every page is missing,
every lookup empty, every put fails in words. Nothing hangs. How bytes travel is the line's, what
they mean the conversation's.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from prefetchd import registry
from prefetchd.assembly import GpuFactory
from prefetchd.gpu import GpuDevice
from prefetchd.growing import GrowError
from prefetchd.holds import check_demand
from prefetchd.hostinfo import Medium
from prefetchd.layout import Layout
from prefetchd.lookups import Found, Keys, Stamps, as_keys
from prefetchd.model import NO_IDS, Geometry, Hint, Ids, Scores
from prefetchd.sidecar.conversation import (
    Attachment,
    demand_frame,
    find_frame,
    found_of,
    hint_frame,
    nothing,
    stats_of,
)
from prefetchd.sidecar.handshake import AwayError, SidecarError, hello_for
from prefetchd.sidecar.line import Line
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.place import path_of
from prefetchd.sidecar.protocol import AskStats, Limits, Told
from prefetchd.sidecar.remote import RemotePut, RemoteTicket
from prefetchd.sidecar.wire import frame
from prefetchd.sidecar.writes import Writes, put_nothing
from prefetchd.stats import Stats
from prefetchd.terms import as_pages, check_terms
from prefetchd.tickets import Ticket

_ANSWER_NS = 5_000_000_000
"""Within this the daemon answers what it need not wait for, and beyond a demand's own deadline."""
_INLINE_BYTES = 1 << 14
"""Up to this a put's bytes go over the line: sent sooner than placed and mapped."""


class Client:
    """One namespace of a daemon. Usable as a context manager, also `async with`. Thread-safe; a
    thread that waits alone drives the socket itself. Made by `connect`."""

    def __init__(
        self,
        address: str,
        namespace: str,
        token: str,
        layout: Layout | None,
        blocks: int | None,
        gpu: str | GpuFactory,
        write_bytes: int,
        timeout_s: float,
    ) -> None:
        self._limits: Limits
        self._stamps: NDArray[np.int64]
        self._timeout_ns: int
        self.slots: int
        self.slot_bytes: int
        self.page_bytes: int
        self.notes: tuple[str, ...]
        self._make_gpu = registry.gpu_device_class(gpu) if isinstance(gpu, str) else gpu
        self._first: Attachment | None = None
        self._gpu: GpuDevice
        self._open: set[int] = set()
        self._writes: tuple[Link | None, Writes | None] = None, None
        self.hints_dropped = 0
        """While the daemon was away."""
        hello = hello_for(namespace, token, layout, blocks, write_bytes)
        self._line = Line(path_of(address), hello, self._attached, timeout_s)
        assert self._first is not None
        welcome = self._first.welcome
        self.geometry: Geometry = self._first.geometry
        self.slots, self.slot_bytes = welcome.slots, welcome.slot_bytes
        self.page_bytes = welcome.page_bytes
        self.fingerprint = welcome.fingerprint
        self.notes = tuple(welcome.notes)
        self.medium = Medium(*welcome.medium)
        self._timeout_ns = welcome.demand_timeout_ns
        self._limits = welcome.limits
        self._stamps = np.zeros(self.geometry.blocks, np.int64)  # as last told, 0: never

    def _attached(self, attachment: Attachment) -> None:
        """A daemon is there, maybe another one: its pages must mean what they meant before."""
        new, first = attachment.welcome, self._first
        if first is not None:
            for name in ("fingerprint", "layers", "blocks", "slots", "slot_bytes"):
                if getattr(new, name) != getattr(first.welcome, name):
                    raise SidecarError(f"the daemon is back with another {name}; connect anew")
        gpu = self._make_gpu(attachment.staging, new.slots)
        if first is not None:
            self._gpu.close()
        self._first, self._gpu = attachment, gpu
        self._open = set()

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
        reply = self._line.answer(link, partial(find_frame, names=names), _ANSWER_NS)
        found = found_of(reply)
        self._stamps[found.blocks] = found.stamps
        return found

    def _link(self) -> Link | None:
        """None while the daemon is away. Raises SidecarError once this client was closed."""
        self._line.check()
        return self._line.link

    def pages(self, blocks: Ids, layer: int) -> Ids:
        """Page ids (int64) of one layer of these blocks."""
        if not 0 <= layer < self.geometry.layers:
            raise ValueError(f"layer {layer} of a store with {self.geometry.layers} pages a block")
        return self.geometry.page_ids(np.asarray(blocks, np.int64), layer)

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
        pages = np.array(pages, np.int64)
        check_demand(pages, self.slots, self.geometry)
        for name, array in (("stamps", stamps), ("scores", scores)):
            if array is not None and array.shape != pages.shape:
                words = f"{pages.shape} pages with {array.shape} {name}; give one a page"
                raise ValueError(words)
        if stamps is None and self._line.breaks:
            stamps = self._stamps[pages // self.geometry.layers]
        timeout_ns = self._timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        link, line = self._link(), self._line
        if link is None:
            return self._missing(pages)
        number = line.number()
        with line.lock:
            if len(self._open) >= self._limits.tickets:
                raise ValueError(
                    f"{len(self._open)} demands are open, the most allowed: release some"
                )
            self._open.add(number)
        gpu, given_back = self._gpu, self._given_back
        ticket = RemoteTicket(line, gpu, link.attachment, number, pages, given_back)
        body = demand_frame(number, pages, timeout_ns, stamps, scores, request)
        line.ask(link, number, body, ticket.answered, timeout_ns + _ANSWER_NS)
        return ticket

    def _missing(self, pages: Ids) -> Ticket:
        assert self._first is not None
        ticket = RemoteTicket(self._line, self._gpu, self._first, 0, pages, self._given_back)
        ticket.failure = self._line.away
        ticket.resolve(nothing(0, len(pages)))
        return ticket

    def _given_back(self, ticket: Ticket) -> None:
        with self._line.lock:
            self._open.discard(ticket.number)

    def hint(self, hint: Hint) -> None:
        """See `Runtime.hint`. Dropped and counted while the daemon is away."""
        link = self._link()
        if link is None:
            self.hints_dropped += 1
        else:
            self._line.send(link, hint_frame(hint, self._line.clock()))

    def tend(self, seconds: float) -> None:
        """Sleep: the daemon has its own thread, and needs none of this one's time."""
        self._line.check()
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
        names = as_keys(keys)
        check_terms(durability, ttl_s)
        rows = as_pages(pages, len(names), self.geometry.layers, self.page_bytes)
        link = self._link()
        if link is None:
            return put_nothing(self._line, len(names), self._line.away)
        with self._line.lock:
            known, writes = self._writes
            if known is not link or writes is None:
                writes = Writes(self._line, link, self._stamps, _INLINE_BYTES)
                self._writes = link, writes
        return writes.put(names, rows, durability, ttl_s, self._timeout_ns)

    def grow(self, *, request: int = 0) -> NoReturn:
        """Blocks grow in an embedded runtime only."""
        raise GrowError("no block can be opened through a daemon; put blocks once they are full")

    # --- state and end ---

    @property
    def away(self) -> str:
        """Why the daemon is away, in words; empty while it is there."""
        return self._line.away

    def wait_until_back(self, timeout_s: float) -> bool:
        """Whether the daemon is there, now or within that time."""
        return self._line.wait_until_back(timeout_s)

    def buffer(self, pages: int) -> Any:
        """A destination for `Ticket.push`: (pages, slot_bytes) bytes in the GPU's memory."""
        return self._gpu.buffer(pages)

    def peek(self, buffer: Any, pages: int, length: int) -> NDArray[np.uint8]:
        """The first `length` bytes of a buffer's first rows in ordinary memory, for checks."""
        return self._gpu.to_host(buffer[:pages, :length])

    def stats(self) -> Stats:
        """The counters of the namespace, all its clients together. Raises AwayError."""
        link = self._link()
        if link is None:
            raise AwayError(self._line.away)
        reply = self._line.answer(link, lambda number: frame(AskStats(number)), _ANSWER_NS)
        if not isinstance(reply, Told):
            raise AwayError(getattr(reply, "words", "the daemon's answer makes no sense"))
        return stats_of(reply.stats, self._gpu.engine)

    def close(self) -> None:
        """Let go of the daemon, which goes on; puts that have not ended are ended by it."""
        self._line.close()
        self._gpu.close()
        self._first, self._writes = None, (None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
