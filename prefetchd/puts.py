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
from prefetchd.assembly import Parts
from prefetchd.behind import Behind
from prefetchd.catalog import StoreFullError
from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.filling import Fillers, threads_for_copies
from prefetchd.hostinfo import why_not
from prefetchd.model import Mask
from prefetchd.options import Options
from prefetchd.patience import BUSY, LOST, Patience
from prefetchd.pipeline import Job, Waiter
from prefetchd.records import NEVER_NS
from prefetchd.room import Room
from prefetchd.terms import as_pages, check_terms
from prefetchd.tickets import PutTicket
from prefetchd.turns import Turns
from prefetchd.writer import News, Written


@dataclass(slots=True)
class _Batch:
    """One call. `no_room`: why it gets no more of it; so what it leaves is a prefix."""

    number: int
    durability: str
    no_room: str = ""


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
    shape = parts.store.superblock
    fillers = Fillers(options.put_threads or threads_for_copies(), shape.extent_bytes)
    turns = Turns(putting, parts.catalog, evicts=options.evict_blocks)
    patience = Patience(engine, parts.driver, room, turns, int(options.demand_timeout_s * 1e9))
    write_timeout_ns = int(options.put_timeout_s * 1e9)
    made = (parts.driver, room, admission, fillers, write_timeout_ns, options.ttl_s)
    return Puts(engine, *made, putting, patience)


class Puts:
    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        room: Room,
        admission: Admission,
        fillers: Fillers,
        write_timeout_ns: int,
        ttl_s: float | None,
        putting: dict[int, PutTicket],
        patience: Patience,
    ) -> None:
        self._engine = engine
        self._driver = driver
        self.room = room
        self.behind = Behind(engine, driver, room)
        self.admission = admission
        self.fillers = fillers
        self._write_timeout_ns = write_timeout_ns
        self.ttl_s = ttl_s
        self._open = putting
        self.patience = patience
        self._numbers = 0

    def put(
        self, names: list[bytes], pages: NDArray[np.generic], durability: str, ttl_s: float | None
    ) -> PutTicket:
        """Raises ValueError for a wrong shape, level or time, EngineError when stopped."""
        shape = self._driver.catalog.superblock
        rows = as_pages(pages, len(names), shape.layers, shape.page_bytes)
        expires_ns = self.room.expiry_ns(self.ttl_s if ttl_s is None else ttl_s)
        engine, binding = self._engine, self._driver.catalog.binding
        number, ticket = self.begin(len(names), durability)
        batch = _Batch(number, durability)
        seeds = binding.seeds(np.frombuffer(b"".join(names), "V16")).tolist()
        reserved, job = 0, None
        try:
            if names:
                self.patience.for_turn(number, names)
            with self.fillers.shift() as shift:
                for position in range(len(names)):
                    job = self._reserved(batch, position, names[position], seeds[position])
                    reserved = position + 1
                    if job is not None:
                        task = partial(self.fill_in, job, rows[position], expires_ns)
                        shift.do(task, last=position == len(names) - 1)
        except BaseException:
            self._interrupted(number, range(reserved, len(names)), job)
            raise
        engine.wake()
        return ticket

    def _interrupted(self, number: int, left: range, job: Job | None) -> None:
        """End what a put has not come to. `job`: reserved last, and perhaps never filled."""
        with self._engine.lock:
            if job is not None and not job.filling:
                for end in self._driver.writer.filled(job, None, NEVER_NS):
                    self.written(end)
            for position in left:
                self._settle(number, position, -1, "the put was interrupted")

    def begin(self, count: int, durability: str) -> tuple[int, PutTicket]:
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
        expires_ns = self.room.expiry_ns(self.ttl_s if ttl_s is None else ttl_s)
        engine, writer = self._engine, self._driver.writer
        number, ticket = self.begin(1, durability)
        batch = _Batch(number, durability)
        with engine.lock:
            waiter = self._waiter(batch, 0)
            if self._answered(waiter, key) or self._refused(waiter, key):
                return ticket, False
        jobs: list[Job] = []

        def decide(last: bool) -> bool:
            waiter = self._waiter(batch, 0)
            if self._answered(waiter, key):
                return True
            if writer.full:
                return self._without_buffer(waiter, last)
            pages = self.behind.bytes_of(opened)
            seed = self._driver.catalog.binding.seed(key)
            jobs.append(writer.reserve(waiter, key, seed, opened))
            self.fill_in(jobs[0], pages, expires_ns)
            return True

        self.patience.decide(decide, number)
        engine.wake()
        return ticket, bool(jobs)

    def _reserved(self, batch: _Batch, position: int, key: bytes, seed: int) -> Job | None:
        """Room for a block; None if it needs or gets none."""
        patience, writer = self.patience, self._driver.writer
        with self._engine.lock:
            waiter = self._waiter(batch, position)
            if self._answered(waiter, key) or self._refused(waiter, key):
                return None
            if batch.no_room:
                self._fail(waiter, batch.no_room)
                return None
        jobs: list[Job] = []

        def decide(last: bool) -> bool:
            waiter = self._waiter(batch, position)
            if self._answered(waiter, key):
                return True  # somebody else put it meanwhile
            if writer.full:
                return self._without_buffer(waiter, last)
            if not last and not patience.extent_decided(batch.number):
                return False
            try:
                jobs.append(writer.reserve(waiter, key, seed))
            except StoreFullError as error:
                batch.no_room = f"{error}{patience.shares(batch.number)}"
                self._fail(waiter, batch.no_room)
            return True

        patience.decide(decide, batch.number)
        return jobs[0] if jobs else None

    def _without_buffer(self, waiter: Waiter, last: bool) -> bool:
        lost = self._driver.writer.lost
        if lost or last:
            self._fail(waiter, LOST if lost else BUSY)
        return lost or last

    def fill_in(self, job: Job, rows: NDArray[np.uint8], expires_ns: int) -> None:
        """Without the lock: copying takes longer than everything else there is to do."""
        checksums = None
        job.filling = True
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

    def _waiter(self, batch: _Batch, position: int) -> Waiter:
        deadline_ns = self._engine.clock() + self._write_timeout_ns
        return Waiter(batch.number, position, batch.durability == "durable", deadline_ns)

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
