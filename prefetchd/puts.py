"""Puts: blocks on their way to the store, from the caller's memory to the end of their ticket.

Decides what a put waits for and what its failures are called. Writing is the writer's, flushing the
commit's, visibility the catalog's, and the thread that carries it on the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.admission import Admission
from prefetchd.assembly import Options, Parts
from prefetchd.behind import Behind, why_not
from prefetchd.catalog import StoreFullError
from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.model import Mask
from prefetchd.pipeline import Waiter
from prefetchd.records import NEVER_NS
from prefetchd.room import Room
from prefetchd.tickets import PutTicket
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


def puts_of(engine: Engine, parts: Parts, options: Options, held: Callable[[], Mask]) -> Puts:
    """The puts of a runtime, with the bounds that its options give. `held`: see `Room`."""
    room = Room(
        engine,
        parts.driver,
        held,
        parts.store.directories,
        options.floor_bytes,
        evict=options.evict_blocks,
    )
    admission = Admission(options.admission, max(1024, parts.geometry.blocks))
    limits = PutLimits(
        int(options.demand_timeout_s * 1e9), int(options.put_timeout_s * 1e9), options.ttl_s
    )
    return Puts(engine, parts.driver, room, admission, limits)


class Puts:
    def __init__(
        self, engine: Engine, driver: Driver, room: Room, admission: Admission, limits: PutLimits
    ) -> None:
        self._engine = engine
        self._driver = driver
        self.room = room
        self.behind = Behind(engine, driver, room)
        self.admission = admission
        self._room_timeout_ns = limits.room_timeout_ns
        self._write_timeout_ns = limits.write_timeout_ns
        self._ttl_s = limits.ttl_s
        self._open: dict[int, PutTicket] = {}
        self._numbers = 0

    def put(
        self, names: list[bytes], pages: NDArray[np.generic], durability: str, ttl_s: float | None
    ) -> PutTicket:
        """Raises ValueError for a wrong shape, level or time, EngineError when stopped."""
        rows = self.as_pages(pages, len(names))
        expires_ns = self._expiry(self._ttl_s if ttl_s is None else ttl_s)
        engine, writer = self._engine, self._driver.writer
        number, ticket = self._begin(len(names), durability)
        for position, key in enumerate(names):
            with engine.lock:
                waiter = self._waiter(number, position, durability)
                if self._answered(waiter, key) or self._refused(waiter, key):
                    continue
            engine.wait(self.room.ready, engine.clock() + self._room_timeout_ns)
            with engine.lock:
                engine.check()
                waiter = self._waiter(number, position, durability)
                if self._answered(waiter, key):
                    continue  # somebody else put it meanwhile
                if not writer.full:
                    self._put_block(waiter, key, rows[position], expires_ns)
                else:
                    self._fail(waiter, _LOST if writer.lost else _BUSY)
        engine.wake()
        return ticket

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
            writer.stage(waiter, key, self.behind.bytes_of(opened), expires_ns, opened)
            if not waiter.durable:
                self._acknowledge(waiter, opened)
            self._move()
        engine.wake()
        return ticket, True

    def _waiter(self, number: int, position: int, durability: str) -> Waiter:
        deadline_ns = self._engine.clock() + self._write_timeout_ns
        return Waiter(number, position, durability == "durable", deadline_ns)

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

    def _put_block(
        self, waiter: Waiter, key: bytes, rows: NDArray[np.uint8], expires_ns: int
    ) -> None:
        try:
            block = self._driver.writer.stage(waiter, key, rows, expires_ns)
        except StoreFullError as error:
            self._fail(waiter, str(error))
            return
        if not waiter.durable and self.behind.take(block):
            self._acknowledge(waiter, block)
        elif not waiter.durable:
            self.behind.waited += 1
        self._move()

    def _acknowledge(self, waiter: Waiter, block: int) -> None:
        """A block put fast has its bytes in staging: it is found from here on."""
        self._driver.writer.show(block, self._engine.clock())
        self.behind.begin(block, self._open[waiter.put], waiter.position)
        self._settle(waiter.put, waiter.position, block)

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
        ticket.settle(position, block, failure)
        if ticket.done:
            del self._open[put]
