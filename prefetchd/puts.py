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
from prefetchd.tickets import PutTicket
from prefetchd.turns import Turns
from prefetchd.writer import News, Written

DURABILITIES = ("durable", "fast")
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


@dataclass(slots=True)
class _Batch:
    """One call. `no_room`: why it gets no more of it; so what it leaves is a prefix."""

    number: int
    durability: str
    expires_ns: int
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
    limits = PutLimits(
        int(options.demand_timeout_s * 1e9), int(options.put_timeout_s * 1e9), options.ttl_s
    )
    shape = parts.store.superblock
    fillers = Fillers(options.put_threads or threads_for_copies(), shape.extent_bytes)
    turns = Turns(putting, parts.catalog, evicts=options.evict_blocks)
    return Puts(engine, parts.driver, room, admission, fillers, limits, putting, turns)


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
        turns: Turns,
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
        self._turns = turns
        self._numbers = 0

    def put(
        self, names: list[bytes], pages: NDArray[np.generic], durability: str, ttl_s: float | None
    ) -> PutTicket:
        """Raises ValueError for a wrong shape, level or time, EngineError when stopped."""
        rows = self.as_pages(pages, len(names))
        expires_ns = self._expiry(self._ttl_s if ttl_s is None else ttl_s)
        engine, binding = self._engine, self._driver.catalog.binding
        number, ticket = self._begin(len(names), durability)
        batch = _Batch(number, durability, expires_ns)
        seeds = binding.seeds(np.frombuffer(b"".join(names), "V16")).tolist()
        reserved, job = 0, None
        try:
            self._await_turn(number, names)
            with self.fillers.shift() as shift:
                for position in range(len(names)):
                    job = self._reserved(batch, position, names[position], seeds[position])
                    reserved = position + 1
                    if job is not None:
                        task = partial(self._fill, job, rows[position], expires_ns)
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

    def _await_turn(self, number: int, names: list[bytes]) -> None:
        """Wait while it has no room beside the puts before it, before it holds anything; not if
        all of it is there. If that takes too long its blocks are tried all the same."""
        turns, catalog = self._turns, self._driver.catalog

        def begins() -> bool:
            with self._engine.lock:
                if number not in self._open or turns.may_begin(number):
                    return True
                return all(catalog.find(name) >= 0 for name in names)

        self._engine.wait(begins, self._engine.clock() + self._room_timeout_ns)

    def _begin(self, count: int, durability: str) -> tuple[int, PutTicket]:
        if durability not in DURABILITIES:
            raise ValueError(f"durability is one of {DURABILITIES}, not {durability!r}")
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
        batch = _Batch(number, durability, expires_ns)
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
            self._fill(jobs[0], pages, expires_ns)
            return True

        self._decide(decide)
        engine.wake()
        return ticket, bool(jobs)

    def _reserved(self, batch: _Batch, position: int, key: bytes, seed: int) -> Job | None:
        """Room for a block; None if it needs or gets none."""
        engine, writer = self._engine, self._driver.writer
        with engine.lock:
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
            if not last and not self._extent_decided(batch.number):
                return False
            try:
                jobs.append(writer.reserve(waiter, key, seed))
            except StoreFullError as error:
                batch.no_room = f"{error}{self._shares(batch.number)}"
                self._fail(waiter, batch.no_room)
            return True

        try:
            self._decide(decide)
        finally:
            with engine.lock:
                self._turns.goes_on(batch.number)
        return jobs[0] if jobs else None

    def _decide(self, decide: Callable[[bool], bool]) -> None:
        """Call `decide` under the lock until it has decided, and with True when time is up.

        What it finds free it takes before anybody else can.
        """
        engine = self._engine
        decided = False

        def attempt() -> bool:
            nonlocal decided
            with engine.lock:
                if not decided:
                    engine.check()
                    decided = decide(False)
                return decided

        if not engine.wait(attempt, engine.clock() + self._room_timeout_ns):
            with engine.lock:
                engine.check()
                decide(True)

    def _without_buffer(self, waiter: Waiter, last: bool) -> bool:
        lost = self._driver.writer.lost
        if lost or last:
            self._fail(waiter, _LOST if lost else _BUSY)
        return lost or last

    def _extent_decided(self, put: int) -> bool:
        """Whether there is an extent for it, or never will be."""
        if not self.room.has_extent():
            return False
        return self._driver.catalog.has_room or not self._turns.waits(put)

    def _shares(self, put: int) -> str:
        own, others = self._turns.stored(put), self._turns.stored_by_others(put)
        if others:
            return f", {own} by what this put began with, {others} by other puts; put the rest again"
        return f", {own} by what this put began with, which stays; put less at once" if own else ""

    def _fill(self, job: Job, rows: NDArray[np.uint8], expires_ns: int) -> None:
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

    def _expiry(self, ttl_s: float | None) -> int:
        if ttl_s is None:
            return NEVER_NS
        if not ttl_s > 0:
            raise ValueError(f"a time to live of {ttl_s} s; give a number of seconds above 0")
        return min(NEVER_NS, self.room.wall_ns() + int(min(ttl_s, 1e9) * 1e9))

    def as_pages(self, pages: NDArray[np.generic], count: int) -> NDArray[np.uint8]:
        store = self._driver.catalog.superblock
        shape = (count, store.layers, store.page_bytes)
        flat = np.ascontiguousarray(pages).reshape(-1).view(np.uint8)
        if flat.size != count * shape[1] * shape[2] or pages.shape[:2] != shape[:2]:
            raise ValueError(
                f"pages for {count} keys take {shape} bytes, got {flat.size} bytes "
                f"(array of shape {pages.shape}, {pages.dtype})"
            )
        return flat.reshape(shape)

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
