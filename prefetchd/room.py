"""Room in the store: its byte cap, the floor of free space, blocks whose time is over, eviction.

Decides which blocks go and when writing stops. A block goes in this order: nobody finds it, its
staged pages are dropped, the medium is told, and only then is its extent free; so neither a reader
nor a crash can meet old bytes under a new key. Blocks that somebody holds stay until they are let
go of. Writes nothing itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.format import Superblock
from prefetchd.model import NO_IDS, Forgotten, Ids, Mask
from prefetchd.records import PUBLISH
from prefetchd.store_folder import StoreError

log = logging.getLogger("prefetchd")

_BATCH_MAX, _BATCH_SHARE = 64, 64
_LOOK_NS = 1_000_000_000  # how often the file systems are asked for their free space


def blocks_under_cap(shape: Superblock, cap_bytes: int | None) -> int:
    """How many blocks fit under a byte cap, what the store needs beside them included. Raises
    StoreError if none does."""
    if cap_bytes is None:
        return shape.blocks
    beside = sum(
        part.file_bytes - part.extents * part.extent_bytes
        for part in map(shape.of_stripe, range(shape.stripes))
    )
    blocks = (cap_bytes - beside) // shape.extent_bytes
    if blocks < 1:
        raise StoreError(
            f"a cap of {cap_bytes} bytes holds no block: a block takes {shape.extent_bytes} bytes "
            f"and the store's own records {beside}; raise cap_bytes"
        )
    return min(blocks, shape.blocks)


class Room:
    """`held`: which blocks (bool, one a block) somebody reads or waits for. All methods are
    called under the engine's lock, or take it."""

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        held: Callable[[], Mask],
        folders: Sequence[Path],
        floor_bytes: int,
        *,
        evict: bool,
    ) -> None:
        self.wall_ns = time.time_ns
        self.evicted = 0
        self.expired = 0
        self.stopped = ""
        """Why nothing is written, in words; empty when all is well."""
        self._engine = engine
        self._driver = driver
        self._held = held
        self._folders = folders
        self._floor_bytes = floor_bytes
        self._evicts = evict
        blocks = driver.catalog.superblock.blocks
        self._batch = max(1, min(_BATCH_MAX, blocks // _BATCH_SHARE))
        self._leaving = NO_IDS  # hidden, and still held
        self._looked_ns = -_LOOK_NS

    def tidy(self) -> None:
        """Let go of what has expired, and of what somebody held when it did."""
        catalog = self._driver.catalog
        due = self.wall_ns() >= catalog.next_expiry_ns if catalog.may_expire else False
        if due:
            over = catalog.expired(self.wall_ns())
            self.expired += len(over)
            self._leaving = np.concatenate([self._leaving, over])
        if len(self._leaving):
            self._engine.handle(Forgotten(NO_IDS))  # pins given back count as given back
            stay = self._held()[self._leaving] | catalog.busy[self._leaving]
            gone, self._leaving = self._leaving[~stay], self._leaving[stay]
            self._remove(gone)

    def leave(self, block: int) -> None:
        """A block that is not found (any more) goes, once nobody holds it."""
        if block not in self._leaving:
            self._leaving = np.append(self._leaving, block)
        self.tidy()

    def ready(self) -> bool:
        """Whether the next put can be decided: there is a buffer and an extent, or never will be.
        Makes room if there is none."""
        with self._engine.lock:
            writer = self._driver.writer
            if writer.lost:
                return True
            return not writer.full and self.has_extent()

    def has_extent(self) -> bool:
        """Whether there is a free extent, or never will be. Makes room if there is none."""
        with self._engine.lock:
            writer, catalog = self._driver.writer, self._driver.catalog
            if catalog.has_room or not self._evicts:
                return True
            self.tidy()
            if catalog.has_room:
                return True
            if writer.commit.removing or self._evict():
                return False
            if not catalog.busy.any():
                return True
            writer.commit.hurried = True  # what is on its way can be evicted once it is there
            self._move()
            return False

    def _evict(self) -> bool:
        """Whether there is anything to evict; it is then on its way out."""
        catalog = self._driver.catalog
        self._engine.handle(Forgotten(NO_IDS))
        count = max(self._batch, catalog.blocks_used - catalog.blocks_max)
        victims = catalog.victims(count, self._held())
        catalog.hide(victims)
        self.evicted += len(victims)
        self._remove(victims)
        return len(victims) > 0

    def _remove(self, blocks: Ids) -> None:
        if len(blocks) == 0:
            return
        driver = self._driver
        layers = driver.catalog.superblock.layers
        pages = blocks[:, None] * layers + np.arange(layers)
        self._engine.handle(Forgotten(pages.reshape(-1)))
        said = driver.catalog.table["kind"][blocks] == PUBLISH
        driver.writer.commit.remove(blocks[said])
        for block in blocks[~said].tolist():
            driver.catalog.give_back(block)
        self._move()

    def _move(self) -> None:
        now_ns = self._engine.clock()
        self._driver.write(now_ns)
        self._driver.start(now_ns)

    def shrink(self) -> None:
        """Evict what a byte cap no longer allows."""
        catalog = self._driver.catalog
        with self._engine.lock:
            if catalog.blocks_used > catalog.blocks_max:
                self._evict()

    def writable(self) -> bool:
        """Whether the floor of free space is kept; asked at most once a second."""
        now_ns = self._engine.clock()
        if self._floor_bytes and now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            before, self.stopped = self.stopped, self._short_of_space()
            if self.stopped and not before:
                log.warning("%s; reading goes on", self.stopped)
            elif before and not self.stopped:
                log.warning("store %s: there is room again, writing goes on", self._folders[0])
        return not self.stopped

    def _short_of_space(self) -> str:
        for folder in self._folders:
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if free < self._floor_bytes:
                return (
                    f"store {folder}: nothing is written, {free} bytes are free on its file "
                    f"system, fewer than the floor of {self._floor_bytes}; free some or lower it"
                )
        return ""
