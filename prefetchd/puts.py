"""Puts: blocks on their way to the store, from the caller's memory to the end of their ticket.

Decides what a put waits for and what its failures are called. Writing is the writer's, flushing the
commit's, visibility the catalog's, and the thread that carries it on the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prefetchd.admission import Admission
from prefetchd.assembly import Options, Parts
from prefetchd.behind import Behind
from prefetchd.catalog import StoreFullError
from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.filling import Fillers, threads_for_copies
from prefetchd.hostinfo import why_not
from prefetchd.model import Mask
from prefetchd.pipeline import Job, Waiter
from prefetchd.records import NEVER_NS
from prefetchd.room import Room
from prefetchd.terms import as_pages, check_terms
from prefetchd.tickets import PutTicket
from prefetchd.writer import News, Written

_BUSY = "all write buffers are busy; the device ends no write"
_LOST = (
    "all write buffers are held by writes that the device never ended; see the kernel log, and "
    "open the store anew"
)


@dataclass(frozen=True, slots=True)
class PutLimits:
    """`room_timeout_ns`: the longest wait for a write buffer or an extent; `write_timeout_ns`:
    after it a block that is being written is given up; `ttl_s`: of blocks put without one."""

    room_timeout_ns: int
    write_timeout_ns: int
    ttl_s: float | None = None


def puts_of(
    engine: Engine,
    parts: Parts,
    options: Options,
    held: Callable[[], Mask],
    putting: dict[int, PutTicket],
) -> Puts:
    """The puts of a runtime, with the bounds that its options give. `held`: see `Room`; `putting`:
    where those that have not ended are kept."""
    room = Room(
        engine,
        parts.driver,
        held,
        parts.store.folders,
        options.floor_bytes,
        evict=options.evict_blocks,
        lease_ns=int(options.lease_s * 1e9),
        read_only=parts.store.read_only,
    )
    admission = Admission(options.admission, max(1024, parts.geometry.blocks))
    limits = PutLimits(
        int(options.demand_timeout_s * 1e9), int(options.put_timeout_s * 1e9), options.ttl_s
    )
    shape = parts.store.superblock
    fillers = Fillers(options.put_threads or threads_for_copies(), shape.extent_bytes)
    return Puts(engine, parts.driver, room, admission, fillers, limits, putting)


class Puts:
    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        room: Room,
        admission: Admission,
        fillers: Fillers,
        limits: PutLimits,
        putting: dict[int, PutTicket],
    ) -> None:
        self._engine = engine
        self._driver = driver
        self.room = room
        self.behind = Behind(engine, driver, room)
        self.admission = admission
        self.fillers = fillers
        self._room_timeout_ns = limits.room_timeout_ns
        self._write_timeout_ns = limits.write_timeout_ns
        self._ttl_s = limits.ttl_s
        self._open = putting
        self._numbers = 0

    def put(
        self, names: list[bytes], pages: NDArray[np.generic], durability: str, ttl_s: float | None
    ) -> PutTicket:
        """Raises ValueError for a wrong shape, level or time, EngineError when stopped."""
        shape = self._driver.catalog.superblock
        rows = as_pages(pages, len(names), shape.layers, shape.page_bytes)
        expires_ns = self._expiry(self._ttl_s if ttl_s is None else ttl_s)
        engine, binding = self._engine, self._driver.catalog.binding
        number, ticket = self._begin(len(names), durability)
        seeds = binding.seeds(np.frombuffer(b"".join(names), "V16")).tolist()
        reserved = 0
        try:
            with self.fillers.shift() as shift:
                for position in range(len(names)):
                    waiter = self._waiter(number, position, durability)
                    job = self._reserved(waiter, names[position], seeds[position])
                    reserved = position + 1
                    if job is not None:
                        task = partial(self._fill, job, rows[position], expires_ns)
                        shift.do(task, last=position == len(names) - 1)
        except BaseException:
            with engine.lock:
                for position in range(reserved, len(names)):
                    self._settle(number, position, -1, "the put was interrupted")
            raise
        engine.wake()
        return ticket

    def _begin(self, count: int, durability: str) -> tuple[int, PutTicket]:
        check_terms(durability, None)
        with self._engine.lock:
            self._engine.check()
            self.room.tidy()
            self._numbers += 1
            ticket = PutTicket(self._engine, count)
            if count:
                self._open[self._numbers] = ticket
            return self._numbers, ticket

    def seal(
        self, opened: int, key: bytes, durability: str, ttl_s: float | None
    ) -> tuple[PutTicket, bool]:
        """Store an open block; its ticket, and whether it is on its way, so that it is not the
        caller's any more. If not, it was refused, could not be stored, or the key is there."""
        expires_ns = self._expiry(self._ttl_s if ttl_s is None else ttl_s)
        engine, writer = self._engine, self._driver.writer
        number, ticket = self._begin(1, durability)
        with engine.lock:
            waiter = self._waiter(number, 0, durability)
            if self._answered(waiter, key) or self._refused(waiter, key):
                return ticket, False
        deadline_ns = engine.clock() + self._room_timeout_ns
        engine.wait(lambda: writer.lost or not writer.full, deadline_ns)
        with engine.lock:
            engine.check()
            waiter = self._waiter(number, 0, durability)
            if self._answered(waiter, key):
                return ticket, False
            if writer.full:
                self._fail(waiter, _LOST if writer.lost else _BUSY)
                return ticket, False
            pages = self.behind.bytes_of(opened)
            job = writer.reserve(waiter, key, self._driver.catalog.binding.seed(key), opened)
            self._fill(job, pages, expires_ns)
        engine.wake()
        return ticket, True

    def _reserved(self, waiter: Waiter, key: bytes, seed: int) -> Job | None:
        """Room for a block; None if it needs or gets none."""
        engine, writer = self._engine, self._driver.writer
        with engine.lock:
            if self._answered(waiter, key) or self._refused(waiter, key):
                return None
        engine.wait(self.room.ready, engine.clock() + self._room_timeout_ns)
        with engine.lock:
            engine.check()
            if self._answered(waiter, key):
                return None  # somebody else put it meanwhile
            if writer.full:
                self._fail(waiter, _LOST if writer.lost else _BUSY)
                return None
            try:
                return writer.reserve(waiter, key, seed)
            except StoreFullError as error:
                self._fail(waiter, f"{error}{self._own_share(waiter)}")
                return None

    def _own_share(self, waiter: Waiter) -> str:
        own = int(np.count_nonzero(self._open[waiter.put].blocks_so_far >= 0))
        return f", {own} by what this put began with, which stays; put less at once" if own else ""

    def _fill(self, job: Job, rows: NDArray[np.uint8], expires_ns: int) -> None:
        """Without the lock: copying takes longer than everything else there is to do."""
        checksums = None
        try:
            checksums = self._driver.writer.fill(job, rows)
        finally:
            with self._engine.lock:
                for end in self._driver.writer.filled(job, checksums, expires_ns):
                    self.written(end)
                self._engine.check()
                if checksums is not None and not job.given_up:
                    self._acknowledge(job)
                self._move()

    def _acknowledge(self, job: Job) -> None:
        """Whoever put it fast waits no more once staging has its bytes: it is found from here on,
        unless an earlier write of its key, given up, has just ended well."""
        writer = self._driver.writer
        if all(waiter.durable for waiter in job.waiters) or self._driver.catalog.find(job.key) >= 0:
            return
        if not job.opened and not self.behind.take(job.block):
            self.behind.waited += 1
            return
        fast = writer.show(job, self._engine.clock())
        self.behind.begin(job.block, [(self._open[w.put], w.position) for w in fast])
        for waiter in fast:
            self._settle(waiter.put, waiter.position, job.block)

    def _waiter(self, number: int, position: int, durability: str) -> Waiter:
        deadline_ns = self._engine.clock() + self._write_timeout_ns
        return Waiter(number, position, durability == "durable", deadline_ns)

    def _expiry(self, ttl_s: float | None) -> int:
        if ttl_s is None:
            return NEVER_NS
        check_terms("durable", ttl_s)
        return min(NEVER_NS, self.room.wall_ns() + int(min(ttl_s, 1e9) * 1e9))

    def _answered(self, waiter: Waiter, key: bytes) -> bool:
        """Whether the block is there, or on its way, so that nothing need be written."""
        driver = self._driver
        if driver.writer.under_way(key) and driver.writer.join(key, waiter):
            self._move()
            return True
        known = driver.catalog.find(key)
        if known < 0:
            return False
        driver.catalog.touch(np.array([known]))
        self.behind.join(known, self._open[waiter.put], waiter.position)
        self._settle(waiter.put, waiter.position, known)
        return True

    def _refused(self, waiter: Waiter, key: bytes) -> bool:
        if not self.room.writable():
            self._fail(waiter, self.room.stopped)
            return True
        if self.admission.admits(key):
            return False
        self._open[waiter.put].refused.append(waiter.position)
        self._settle(waiter.put, waiter.position, -1)
        return True

    def _move(self) -> None:
        now_ns = self._engine.clock()
        self._driver.write(now_ns)
        self._driver.start(now_ns)

    def written(self, written: Written) -> None:
        """Called by the engine, under its lock."""
        if written.news != News.ENDED:
            self.behind.heard(written)
            return
        failure = ""
        if written.block < 0:
            failure = f"block {written.position} was not stored: {why_not(written.result)}"
        self._settle(written.put, written.position, written.block, failure)

    def _fail(self, waiter: Waiter, why: str) -> None:
        words = f"block {waiter.position} was not stored: {why}"
        self._settle(waiter.put, waiter.position, -1, words)

    def _settle(self, put: int, position: int, block: int, failure: str = "") -> None:
        ticket = self._open[put]
        stamp = int(self._driver.catalog.stamps[block]) if block >= 0 else 0
        ticket.settle(position, block, failure, stamp)
        if ticket.done:
            # In prefix order: the end of a chain is evicted before its beginning.
            blocks = ticket.blocks_so_far
            self._driver.catalog.touch(blocks[blocks >= 0])
            del self._open[put]
