"""Puts: blocks on their way to the store, from the caller's memory to the end of their ticket.

Decides what a put waits for and what its failures are called. Writing is the writer's, visibility
the catalog's, and the thread that carries it on the engine's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import StoreFullError
from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.hostinfo import errno_name
from prefetchd.tickets import PutTicket
from prefetchd.writer import Written

_BUSY = "all write buffers are busy; the device ends no write"
_LOST = (
    "all write buffers are held by writes that the device never ended; see the kernel log, and "
    "open the store anew"
)


class Puts:
    """`room_timeout_ns`: the longest wait for a write buffer; `write_timeout_ns`: after it a block
    that is being written is given up."""

    def __init__(
        self, engine: Engine, driver: Driver, room_timeout_ns: int, write_timeout_ns: int
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._room_timeout_ns = room_timeout_ns
        self._write_timeout_ns = write_timeout_ns
        self._open: dict[int, PutTicket] = {}
        self._numbers = 0

    def put(self, names: list[bytes], pages: NDArray[np.generic]) -> PutTicket:
        """Raises ValueError for a wrong shape, EngineError when stopped."""
        rows = self._as_pages(pages, len(names))
        engine, writer = self._engine, self._driver.writer
        with engine.lock:
            engine.check()
            self._numbers += 1
            number = self._numbers
            ticket = PutTicket(engine, len(names))
            if names:
                self._open[number] = ticket
        for position, key in enumerate(names):
            deadline_ns = engine.clock() + self._room_timeout_ns
            engine.wait(lambda: not writer.full or writer.lost, deadline_ns)
            with engine.lock:
                engine.check()
                if not writer.full:
                    self._put_block(number, position, key, rows[position])
                else:
                    why = _LOST if writer.lost else _BUSY
                    self._settle(number, position, -1, f"block {position} was not stored: {why}")
        engine.wake()
        return ticket

    def _as_pages(self, pages: NDArray[np.generic], count: int) -> NDArray[np.uint8]:
        store = self._driver.catalog.superblock
        shape = (count, store.layers, store.page_bytes)
        flat = np.ascontiguousarray(pages).reshape(-1).view(np.uint8)
        if flat.size != count * shape[1] * shape[2] or pages.shape[:2] != shape[:2]:
            raise ValueError(
                f"pages for {count} keys take {shape} bytes, got {flat.size} bytes "
                f"(array of shape {pages.shape}, {pages.dtype})"
            )
        return flat.reshape(shape)

    def _put_block(self, number: int, position: int, key: bytes, rows: NDArray[np.uint8]) -> None:
        driver, clock = self._driver, self._engine.clock
        known = driver.catalog.find(key)
        if known >= 0:
            self._settle(number, position, known)
            return
        try:
            deadline_ns = clock() + self._write_timeout_ns
            ops = driver.writer.stage(number, position, key, rows, deadline_ns)
        except StoreFullError as error:
            self._settle(number, position, -1, str(error))
            return
        driver.write(ops)
        driver.start(clock())

    def written(self, written: Written) -> None:
        """Called by the engine, under its lock."""
        if written.late:
            return  # its put has been told that it failed
        failure = ""
        if written.block < 0:
            reason = errno_name(written.result) if written.result < 0 else "short write"
            failure = f"block {written.position} was not stored: {reason}"
        self._settle(written.put, written.position, written.block, failure)

    def _settle(self, put: int, position: int, block: int, failure: str = "") -> None:
        ticket = self._open[put]
        ticket.settle(position, block, failure)
        if ticket.done:
            del self._open[put]
