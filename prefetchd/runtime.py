"""The embedded runtime: `prefetchd.open(...)`, in the caller's process, nothing to start.

Decides how the parts are put together and what callers may ask. Policy is the core's, bytes are
the driver's, the file is the store's.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.assembly import Parts
from prefetchd.attaching import Attaching
from prefetchd.books import Readers
from prefetchd.closing import Closing
from prefetchd.engine import Engine
from prefetchd.growing import GrowingBlock, OpenBlocks
from prefetchd.holds import Holds, check_demand
from prefetchd.hostinfo import Medium
from prefetchd.lookups import Found, Keys, Stamps, as_keys
from prefetchd.model import Demanded, Hint, Hinted, Ids, Ready, Scores, Used
from prefetchd.options import Options
from prefetchd.patience import past_help
from prefetchd.puts import puts_of
from prefetchd.stats import Stats, take_stats
from prefetchd.tickets import PutTicket, Ticket
from prefetchd.waits import Waits
from prefetchd.writer import Written

log = logging.getLogger("prefetchd")

ReadersKind = TypeVar("ReadersKind", bound=Readers)
_CLOSE_TIMEOUT_NS = 30_000_000_000


class Runtime(Attaching, Closing):
    """One store, one staging buffer, one engine. Usable as a context manager, also `async with`.

    Thread-safe. Made by `prefetchd.open`.
    """

    def __init__(self, parts: Parts, options: Options) -> None:
        self._parts = parts
        self.options = options
        self.geometry = parts.geometry
        self.slots, self.slot_bytes = parts.staging.shape
        self.page_bytes = parts.store.superblock.page_bytes
        self.fingerprint = parts.store.superblock.fingerprint
        self.gpu = parts.gpu
        self.notes = parts.notes
        for note in self.notes:
            log.warning("%s: %s", parts.store.where, note)
        self._staged = parts.staging[:, : self.page_bytes].view()
        self._staged.flags.writeable = False
        self._tickets: dict[int, Ticket] = {}
        self._putting: dict[int, PutTicket] = {}
        self._numbers = 0
        self._waits = Waits(self.geometry.layers)
        self._timeout_ns = int(options.demand_timeout_s * 1e9)
        self.engine = Engine(parts.core, parts.driver, self._on_ready, self._on_written)
        self._holds = Holds(parts.core.staging, self.geometry, self._tickets, self._putting)
        self._puts = puts_of(self.engine, parts, options, self._holds.blocks, self._putting)
        self.room = self._puts.room
        self._growing = OpenBlocks(
            self.engine, parts, self._puts, options.open_blocks_max, self._timeout_ns
        )
        self._closed = False
        self.books = parts.books
        self.books.serves[0] = 1
        self.engine.at_end = partial(self.books.serves.fill, 0)
        self.begin()

    # --- what an engine asks ---

    def lookup(self, keys: Keys) -> Ids:
        """Block indices (int64) of the longest known prefix of `keys` (16 bytes each).

        They stay these keys' for `Options.lease_s`, as far as possible. To be sure, use `find`.
        """
        return self.find(keys).blocks

    def find(self, keys: Keys) -> Found:
        """As `lookup`, with stamps: a demand that gives them too gets these keys' bytes or none.

        Raises EngineError when stopped.
        """
        names = self._parts.catalog.names(as_keys(keys))
        with self.engine.lock:
            self.engine.check()
            self.room.tidy()
            catalog = self._parts.catalog
            blocks = catalog.index.prefix(names)
            catalog.touch(blocks)
            self.room.lease(blocks)
            return Found(blocks, catalog.stamps[blocks])

    def pages(self, blocks: Ids, layer: int) -> Ids:
        """Page ids (int64) of one layer of these blocks."""
        return self.geometry.checked_page_ids(np.asarray(blocks, np.int64), layer)

    def demand(
        self,
        pages: Ids,
        *,
        stamps: Stamps | None = None,
        request: int = 0,
        scores: Scores | None = None,
        once: bool = False,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Ask for pages (int64, distinct) now; they stay in staging until the ticket is released.

        A page of a block that is gone, or not there yet, is missing at once. `stamps` (int64, one a
        page): of the blocks that are meant, from `find`; a page whose block has another in its
        place is then missing, too. `once`: part of a pass over more than staging holds; what had to
        be read leaves at release, what is here stays, and no predictor learns from it.

        Raises ValueError for repeated or impossible ids, or more than staging can hold at once.
        """
        pages = np.array(pages, np.int64)  # a copy: the caller may write the next ids into its own
        engine = self.engine
        timeout_ns = self._timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        engine.urgent.append(1)
        try:
            if engine.core.reading and not engine.foreground.attending:
                engine.collect()  # what has arrived is not late
            with engine.lock:
                ticket = self._open_ticket(pages, stamps)
                asked = ticket.asked
                if scores is not None:
                    scores = np.array(scores if ticket.fresh is None else scores[ticket.fresh])
                deadline_ns = engine.clock() + timeout_ns
                try:
                    engine.handle(
                        Demanded(ticket.number, asked, deadline_ns, request, scores, once)
                    )
                except BaseException:
                    self._tickets.pop(ticket.number, None)
                    raise
        finally:
            engine.urgent.pop()
        if ticket.done:
            engine.wake()
        return ticket

    def _open_ticket(self, pages: Ids, stamps: Stamps | None) -> Ticket:
        self.room.tidy()
        catalog = self._parts.catalog
        check_demand(pages, self.slots, self.geometry)
        blocks = pages // self.geometry.layers
        fresh = None if stamps is None else catalog.unchanged(pages, stamps)
        if fresh is None and not catalog.index.all_stored(blocks):
            fresh = catalog.index.stored(blocks)
        if fresh is not None:
            fresh, blocks = (None, blocks) if fresh.all() else (fresh, blocks[fresh])
        self._numbers += 1
        ticket = Ticket(self.engine, self._parts.gpu, self._staged, self._numbers, pages, fresh)
        catalog.use(blocks)
        self.room.lease(blocks)
        self._tickets[ticket.number] = ticket
        return ticket

    def read_in_place(self, readers: ReadersKind) -> ReadersKind:
        """From here on these may read staged pages by `books`. Returns `readers`."""
        with self.engine.lock:
            self._parts.core.staging.readers = readers
        return readers

    def used(self, used: Used) -> None:
        """These pages were read by the books, without a demand: what there is to learn from demands
        is learnt from them. Raises ValueError for repeated or impossible ids."""
        for part in used.parts():
            check_demand(used.pages[part], self.slots, self.geometry)
        with self.engine.lock:
            self.room.tidy()
            blocks = used.pages // self.geometry.layers
            self._waits.add_here(len(blocks))
            catalog = self._parts.catalog
            blocks = blocks[catalog.index.stored(blocks)]
            catalog.use(blocks)
            self.room.lease(blocks)
            self.engine.handle(used)
        self.engine.wake()

    def hint(self, hint: Hint) -> None:
        """Say ahead of time what will be needed: PageHint, ChainHint or DoneHint. Returns at once;
        the pump thread guesses and reads while the caller goes on."""
        self.engine.post(Hinted(hint))

    def tend(self, seconds: float) -> None:
        """Wait, and let the runtime use the time: for a host thread that waits for its GPU.

        Returns after `seconds`; with 0, for a thread that computes, soon. While a caller does this
        once a layer, hints are acted on inside `hint` and the pump thread rests; without it the
        pump does the same work beside the caller.
        Raises EngineError when stopped.
        """
        self.engine.check()
        self.engine.tend(self.engine.clock() + int(seconds * 1e9))

    def put(
        self,
        keys: Keys,
        pages: NDArray[np.generic],
        *,
        durability: str = "durable",
        ttl_s: float | None = None,
    ) -> PutTicket:
        """Store blocks: `pages` of shape (blocks, layers, page_bytes) in bytes of any dtype.

        The caller's memory is free on return; writing goes on behind. A block is found, and its
        part of the ticket done, when `durability` is reached:

        * "durable": the block and the records that name it are on the medium; no crash takes it.
        * "fast": its bytes are in staging, kept there until they have been written; if staging has
          no room for them, when they have been written. A crash takes what was put since the last
          flush: at most `Options.flush_after_blocks` blocks, put in the last
          `Options.flush_after_s` seconds, and what is being written (at most
          `Options.write_buffers` blocks) or was put while that flush was under way.

        Known keys are not written again. `ttl_s`: seconds after which the block is found no more
        (default: `Options.ttl_s`). Waits while all write buffers are busy, and while blocks are
        evicted to make room, at most `Options.demand_timeout_s` a block: then that block fails. At
        most as long it waits for the puts before it, if the store has no room for all of them.
        Raises ValueError for a wrong shape, level or time.
        """
        names = self._parts.catalog.names(as_keys(keys))
        return self._puts.put(names, pages, durability, ttl_s)

    def grow(self, *, request: int = 0) -> GrowingBlock:
        """Open a block for tokens to come: in staging, readable while it is written, stored under
        its key by `seal`. `request` says whose it is, for messages.

        Waits for room at most `Options.demand_timeout_s`. Raises GrowError when there is none, or
        when `Options.open_blocks_max` blocks are open.
        """
        return self._growing.grow(request)

    def _on_ready(self, ready: Ready) -> None:
        ticket = self._tickets.pop(ready.ticket)
        self._waits.add(ticket.asked, ready)
        ticket.resolve(ready)

    def _on_written(self, written: Written) -> None:
        self._puts.written(written)

    # --- state and end ---

    @property
    def medium(self) -> Medium:
        """What lies under the store."""
        return self._parts.store.medium

    @property
    def staged(self) -> NDArray[np.uint8]:
        """Staging in place, (slots, page_bytes), read-only: `staged[ticket.slots]` are a ticket's
        pages for as long as it is not released."""
        return self._staged

    def buffer(self, pages: int) -> Any:
        """A destination for `Ticket.push`: (pages, slot_bytes) bytes in the GPU's memory."""
        return self._parts.gpu.buffer(pages)

    def peek(self, buffer: Any, pages: int, length: int) -> NDArray[np.uint8]:
        """The first `length` bytes of a buffer's first rows in ordinary memory, for checks."""
        return self._parts.gpu.to_host(buffer[:pages, :length])

    def stats(self) -> Stats:
        """A consistent picture of the counters; of slots, as they are a moment later."""
        return take_stats(self._parts, self.engine, self._puts, len(self._growing), self._waits)

    def close(self) -> None:
        """Finish the writes, mark the store clean, let go of everything. Harmless when repeated.

        Raises StoreError when the store cannot be marked clean; everything is let go of all the
        same. At the end of a `with` body that raises, the body's error goes on, with a note.
        """
        if self._closed:
            return
        self._closed = True
        writer = self._parts.driver.writer
        clean = False
        try:
            self._growing.drop_all()
            self._drains.stop()
            deadline_ns = self.engine.clock() + _CLOSE_TIMEOUT_NS
            writer.commit.draining, writer.commit.failed_flushes = True, 0
            self.engine.look_after_writes()
            self.engine.wait(lambda: writer.idle or past_help(writer), deadline_ns)
            clean = writer.idle
        finally:
            self.engine.stop()
            self._drains.end()
            self._puts.fillers.stop()
            self._parts.close(clean=clean)
