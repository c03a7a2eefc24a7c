"""Emptying a path of a store that is in use: no new block goes there, and what lies there is moved.

Decides which block moves when, and how fast. A block is copied under its own key to another path as
a put would write it, read through staging and so verified, and is found there once that is durable.
The old copy can be read by its old index until nobody holds it and its lease is over; then it goes.
A crash in between leaves one copy or two of the same, of which the newer one is kept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.assembly import Parts
from prefetchd.engine import Engine, EngineError
from prefetchd.options import Options
from prefetchd.pipeline import Job, Waiter
from prefetchd.puts import Puts
from prefetchd.store import StoreError
from prefetchd.store_place import MisfitError
from prefetchd.tickets import PutTicket, Ticket

log = logging.getLogger("prefetchd")

BYTES_S = 64 << 20
_LOOK_S = 0.2
_SLOTS_SHARE = 8
_BUFFERS_SHARE = 4
_TRIES = 3

Rows = NDArray[np.uint8]
Moved = tuple[int, Job, PutTicket]


class Drains:
    """`demand`: as the runtime's. `step` and `settle` may be called without a thread."""

    def __init__(
        self,
        engine: Engine,
        parts: Parts,
        puts: Puts,
        demand: Callable[..., Ticket],
        options: Options,
    ) -> None:
        self._engine = engine
        self._parts = parts
        self._puts = puts
        self._demand = demand
        self._write_timeout_ns = int(options.put_timeout_s * 1e9)
        self._write_buffers = options.write_buffers
        self._queue: list[int] = []
        self._tries: dict[tuple[int, int], int] = {}  # of blocks that could not be read, by stamp
        self._stop, self._work = threading.Event(), threading.Event()
        self._halted, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._told: set[int] = set()

    # --- which paths ---

    def numbers(self, folders: Iterable[str], *, opening: bool = False) -> list[int]:
        """Of these paths, in order. Raises StoreError: none of this store's, the first one, or the
        others have no room for what lies there; when `opening`, room may be made meanwhile."""
        store, paths = self._parts.store, self._parts.driver.paths
        places = [place.absolute() for place in store.directories]
        numbers = []
        for folder in folders:
            path = Path(folder).absolute()
            if path not in places:
                there = ", ".join(map(str, store.directories)) or "none"
                raise MisfitError(f"store {store.where} has no path {folder}; it has {there}")
            numbers.append(places.index(path))
        if 0 in numbers:
            raise MisfitError(
                f"store {store.where}: its first path cannot be drained: it holds the journal, and "
                "names the others"
            )
        new = [number for number in numbers if number not in paths.draining]
        if new and not opening:
            self._check_room(numbers, new)
        return sorted(numbers)

    def _check_room(self, numbers: list[int], new: list[int]) -> None:
        catalog = self._parts.catalog
        with self._engine.lock:
            needed = sum(catalog.taken_on(number) for number in new)
            room = catalog.free.outside(numbers)
        if needed > room:
            raise StoreError(
                f"store {self._parts.store.where}: the paths to be drained hold {needed} blocks, "
                f"the others have room for {room}; lower cap_bytes first, so that the least used "
                "ones go"
            )

    def go(self, numbers: list[int]) -> None:
        """Drain these paths from now on, and no others. The engine's lock is held."""
        paths = self._parts.driver.paths
        for number in sorted(paths.draining - set(numbers)):
            paths.use_again(number)
        for number in sorted(set(numbers) - paths.draining):
            paths.drain(number)
            log.info("%s: its blocks are moved to the other paths", paths.names[number])
        self._told &= paths.draining
        if paths.draining and not self._parts.store.read_only:
            if self._thread is None:
                self._thread = threading.Thread(target=self._live, name="prefetchd-drain")
                self._thread.daemon = True
                self._thread.start()
            self._work.set()

    def stop(self) -> None:
        """Move no more; old copies go, whoever has a lease on them. `end` must follow."""
        self._stop.set()
        self._work.set()
        if self._thread is not None:
            self._halted.wait()
        try:
            with self._engine.lock:
                self._puts.room.let_moved_go(at_once=True)
                self._puts.room.tidy()
        except EngineError as error:
            log.info("old copies of moved blocks stay: %s", error)

    def end(self) -> None:
        """Nothing is in flight any more, or the engine has stopped."""
        for event in (self._stop, self._work, self._over):
            event.set()
        if self._thread is not None:
            self._thread.join()

    # --- moving ---

    def _live(self) -> None:
        """The thread lives on while the device does: the kernel cancels what one that ends has
        submitted."""
        while not self._stop.is_set():
            self._work.wait()
            self._work.clear()
            self._run()
        self._halted.set()
        self._over.wait()

    def _run(self) -> None:
        extent_bytes = self._parts.store.superblock.extent_bytes
        try:
            while not self._stop.is_set() and not self.settle():
                moved = self.step()
                self._stop.wait(moved * extent_bytes / BYTES_S if moved else _LOOK_S)
        except EngineError as error:
            log.info("draining has ended: %s", error)
        except Exception:
            log.exception("draining has ended; nothing is lost, the next opening goes on with it")

    def settle(self) -> bool:
        """Let old copies go; whether all is done, which is told once a path."""
        paths, catalog = self._parts.driver.paths, self._parts.catalog
        with self._engine.lock:
            self._engine.check()
            self._puts.room.tidy()
            left = {number: catalog.taken_on(number) for number in sorted(paths.draining)}
        for number, count in left.items():
            if count == 0 and number not in self._told:
                self._told.add(number)
                log.info("%s: this path is empty", paths.names[number])
        return not any(left.values())

    def step(self) -> int:
        """Move some blocks; how many."""
        most = max(1, self._write_buffers // _BUFFERS_SHARE)
        moving = []
        for block, stamp in self._next(most):
            rows = self._read(block, stamp)
            if rows is None:
                self._tries[block, stamp] = self._tries.get((block, stamp), 0) + 1
            elif (moved := self._write(block, stamp, rows)) is not None:
                moving.append(moved)
        self._engine.wake()
        return sum(self._end(*moved) for moved in moving)

    def _next(self, most: int) -> list[tuple[int, int]]:
        """Blocks to be moved, and their stamps."""
        catalog, chosen = self._parts.catalog, list[tuple[int, int]]()
        with self._engine.lock:
            self._engine.check()
            for scan in (False, True):
                if scan:
                    self._queue = self._on_draining_paths()
                while self._queue and len(chosen) < most:
                    block = self._queue.pop()
                    stamp = int(catalog.stamps[block])
                    if self._movable(block) and self._tries.get((block, stamp), 0) < _TRIES:
                        chosen.append((block, stamp))
                if chosen:
                    break
        return chosen

    def _on_draining_paths(self) -> list[int]:
        index, shape = self._parts.catalog.index, self._parts.store.superblock
        mine = np.flatnonzero(index.visible)
        draining = sorted(self._parts.driver.paths.draining)
        found: list[int] = mine[np.isin(shape.files(mine), draining)][::-1].tolist()
        return found

    def _movable(self, block: int) -> bool:
        """It is there, durable, and what its key leads to; on a path that is still drained."""
        catalog = self._parts.catalog
        file = block % catalog.superblock.stripes
        if catalog.busy[block] or file not in self._parts.driver.paths.draining:
            return False
        return bool(catalog.index.visible[block]) and catalog.find(self._key(block)) == block

    def _key(self, block: int) -> bytes:
        key: bytes = self._parts.catalog.table["key"][block].tobytes()
        return key

    def _read(self, block: int, stamp: int) -> Rows | None:
        """Its pages, (layers, page_bytes), verified; None if any cannot be had."""
        shape = self._parts.store.superblock
        batch = max(1, min(shape.layers, len(self._parts.staging) // _SLOTS_SHARE))
        used = self._parts.catalog.used_at(block)
        rows = np.empty((shape.layers, shape.page_bytes), np.uint8)
        for start in range(0, shape.layers, batch):
            layers = np.arange(start, min(shape.layers, start + batch))
            stamps = np.full(len(layers), stamp)
            with self._demand(block * shape.layers + layers, stamps=stamps, once=True) as ticket:
                if ticket.missing.any():
                    return None
                rows[layers] = np.stack(ticket.views())
        self._parts.catalog.use_as(block, used)
        return rows

    def _write(self, block: int, stamp: int, rows: Rows) -> Moved | None:
        engine, catalog, writer = self._engine, self._parts.catalog, self._parts.driver.writer
        key = self._key(block)
        with engine.lock:
            same = catalog.stamps[block] == stamp and self._movable(block)
            if not same or writer.full or writer.under_way(key):
                return None
            if not catalog.free:
                self._puts.room.has_extent()  # for the next try, if blocks may be evicted
                return None
            number, ticket = self._puts.begin(1, "durable")
            waiter = Waiter(number, 0, True, engine.clock() + self._write_timeout_ns)
            seed = catalog.binding.seed(key)
            job = writer.reserve(waiter, key, seed, catalog.reserve_copy(), block)
            expires_ns = int(catalog.table["expires_ns"][block])
        self._puts.fill_in(job, rows, expires_ns)
        return block, job, ticket

    def _end(self, block: int, job: Job, ticket: PutTicket) -> bool:
        """Whether it has moved."""
        ticket.wait()
        catalog = self._parts.catalog
        with self._engine.lock:
            if catalog.find(job.key) != job.block:
                return False
            catalog.use_as(job.block, catalog.used_at(block))
            self._puts.room.retire(block)
            return True
