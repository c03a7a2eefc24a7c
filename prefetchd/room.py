"""Room in the store: its byte cap, the floor of free space, blocks whose time is over, eviction.

Decides which blocks go, which are kept for whoever has asked for them, and when writing stops. A
block goes in this order: nobody finds it, its staged pages are dropped, the medium is told, and
only then is its extent free; so neither a reader nor a crash can meet old bytes under a new key.
Blocks that somebody holds stay until they are let go of. Writes nothing itself.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from prefetchd.driver import Driver
from prefetchd.engine import Engine, EngineError
from prefetchd.format import Superblock
from prefetchd.model import NO_IDS, Forgotten, Geometry, Ids, Mask
from prefetchd.records import NEVER_NS, PUBLISH
from prefetchd.store_place import StoreError
from prefetchd.terms import check_terms

log = logging.getLogger("prefetchd")

_BATCH_MAX, _BATCH_SHARE = 64, 64
_LOOK_NS = 1_000_000_000  # how often the file systems are asked for their free space


def blocks_under_cap(shape: Superblock, cap_bytes: int | None) -> int:
    """How many blocks fit under a byte cap, what the store needs beside them included. Raises
    StoreError if none does."""
    if cap_bytes is None:
        return shape.blocks
    beside = shape.total_bytes - shape.blocks * shape.extent_bytes
    blocks = (cap_bytes - beside) // shape.extent_bytes
    if blocks < 1:
        raise StoreError(
            f"a cap of {cap_bytes} bytes holds no block: a block takes {shape.extent_bytes} bytes "
            f"and the store's own records {beside}; raise cap_bytes"
        )
    return min(blocks, shape.blocks)


def blocks_under_quota(shape: Superblock, quota_bytes: int | None) -> int:
    """How many blocks fit under a namespace's quota. Raises StoreError if none does."""
    if quota_bytes is None:
        return shape.blocks
    if quota_bytes < shape.extent_bytes:
        raise StoreError(
            f"a quota of {quota_bytes} bytes holds no block: a block takes {shape.extent_bytes} "
            "bytes; raise quota_bytes"
        )
    return min(quota_bytes // shape.extent_bytes, shape.blocks)


class Room:
    """`held`: which blocks (bool, one a block) somebody reads or waits for. All methods are
    called under the engine's lock, or take it.

    Blocks under lease are not evicted while they are at most half of what there may be, and there
    is another to evict: so no lease makes a put fail.
    """

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        held: Callable[[], Mask],
        folders: Sequence[Path],
        floor_bytes: int,
        *,
        evict: bool,
        lease_ns: int = 0,
        read_only: bool = False,
    ) -> None:
        self.wall_ns = time.time_ns
        self.evicted = 0
        self.expired = 0
        self.leases_cut = 0
        """Blocks that were evicted although somebody had a lease on them."""
        self.rotten = 0
        """Blocks removed because a page of theirs had rotted."""
        self.stopped = ""
        """Why nothing is written, in words; empty when all is well."""
        if read_only:
            self.stopped = "the store is open for reading only"
        self._read_only = read_only
        self._engine = engine
        self._driver = driver
        self._held = held
        self.folders = folders
        self._where = folders[0] if folders else driver.paths.names[0]
        self._floor_bytes = floor_bytes
        self._evicts = evict
        self._lease_ns = lease_ns
        shape = driver.catalog.superblock
        self._geometry = Geometry(shape.layers, shape.blocks)
        self._leased_until_ns = np.zeros(shape.blocks, np.int64)
        self._leaving = NO_IDS  # hidden, and still held
        self._moved: dict[int, int] = {}  # old copies of blocks that lie elsewhere now; stamps
        self._moved_due_ns = NEVER_NS  # when the first of them may go, or earlier
        self._looked_ns = -_LOOK_NS

    def bound(self, floor_bytes: int, lease_ns: int) -> None:
        """Go by these from now on; leases that were given stay."""
        self._floor_bytes, self._lease_ns = floor_bytes, lease_ns
        self._looked_ns = -_LOOK_NS
        if not (floor_bytes or self._read_only):
            self.stopped = ""

    def lease(self, blocks: Ids) -> None:
        """Somebody has learnt of these blocks, or uses them: keep them for a while."""
        self._leased_until_ns[blocks] = self._engine.clock() + self._lease_ns

    def expiry_ns(self, ttl_s: float | None) -> int:
        """When what is put now expires, by the wall clock. Raises ValueError."""
        if ttl_s is None:
            return NEVER_NS
        check_terms("durable", ttl_s)
        return min(NEVER_NS, self.wall_ns() + int(min(ttl_s, 1e9) * 1e9))

    def tidy(self) -> None:
        """Let go of what has expired or rotted, and of what somebody held when it did. Raises
        EngineError if the store's key was destroyed."""
        catalog = self._driver.catalog
        if catalog.cipher is not None and (why := catalog.cipher.gone(self._engine.clock())):
            catalog.cipher.forget()
            self._engine.fail(EngineError(f"store {self._where}: {why}"))
            self._engine.check()
        if self._moved and self._moved_due_ns <= self._engine.clock():
            self.let_moved_go()
        if self._driver.rot.rotten:
            self._note_rot(np.array(self._driver.rot.take(), np.int64))
        if catalog.discarded:
            older, catalog.discarded = np.array(catalog.discarded), []
            self._leaving = np.concatenate([self._leaving, older])
        due = self.wall_ns() >= catalog.next_expiry_ns[0] if catalog.may_expire else False
        if due:
            over = catalog.expired(self.wall_ns())
            self.expired += len(over)
            self._leaving = np.concatenate([self._leaving, over])
        if len(self._leaving):
            self._engine.handle(Forgotten(NO_IDS))  # pins given back count as given back
            stay = self._held()[self._leaving] | catalog.busy[self._leaving]
            gone, self._leaving = self._leaving[~stay], self._leaving[stay]
            self._remove(gone)

    def retire(self, block: int) -> None:
        """Its key leads to a copy. Who has its index can read it until its lease is over."""
        self._moved[block] = int(self._driver.catalog.stamps[block])
        self._moved_due_ns = min(self._moved_due_ns, int(self._leased_until_ns[block]))

    def let_moved_go(self, *, at_once: bool = False) -> None:
        catalog = self._driver.catalog
        with self._engine.lock:
            now_ns = self._engine.clock()
            for block, stamp in list(self._moved.items()):
                if at_once or self._leased_until_ns[block] <= now_ns:
                    del self._moved[block]
                    if catalog.stamps[block] == stamp and catalog.index.visible[block]:
                        catalog.hide(np.array([block]))
                        self._leaving = np.append(self._leaving, block)
            left = self._leased_until_ns[list(self._moved)]
            self._moved_due_ns = int(left.min(initial=NEVER_NS))

    def leave(self, block: int) -> None:
        """A block that is not found (any more) goes, once nobody holds it."""
        discarded = self._driver.catalog.discarded
        if block not in self._leaving and block not in discarded:
            discarded.append(block)
        self.tidy()

    def _note_rot(self, blocks: Ids) -> None:
        catalog = self._driver.catalog
        blocks = blocks[catalog.index.stored(blocks)]
        if len(blocks) and not self.rotten:
            log.warning(
                "store %s: block %d has failed its checksum in two reads and is removed, so that "
                "it can be put again; others like it are only counted",
                self._where,
                blocks[0],
            )
        self.rotten += len(blocks)
        catalog.hide(blocks)
        self._leaving = np.concatenate([self._leaving, blocks])

    def has_extent(self) -> bool:
        """Whether there is a free extent, or never will be. Makes room if there is none."""
        with self._engine.lock:
            writer, catalog = self._driver.writer, self._driver.catalog
            if catalog.has_room or not self._evicts:
                return True
            self.tidy()
            if catalog.has_room:
                return True
            if writer.commit.removing or self._evict(mine=catalog.quota_full):
                return False
            if not catalog.busy.any():
                return True
            writer.commit.hurried = True  # what is on its way can be evicted once it is there
            self._move()
            return False

    def _evict(self, *, mine: bool) -> bool:
        """Whether there is anything to evict, of this namespace or of all; it is then on its way
        out."""
        catalog = self._driver.catalog
        self._engine.handle(Forgotten(NO_IDS))
        used, most = catalog.blocks_used, catalog.blocks_max
        if mine:
            used, most = catalog.mine_used, catalog.mine_max
        used -= self._driver.writer.commit.removing
        count = max(1, min(_BATCH_MAX, most // _BATCH_SHARE), used - most)
        held = self._held()
        leased = self._leased(held, most // 2)
        victims = catalog.victims(count, held | leased, mine=mine)
        on_its_way = catalog.busy.any() and not self._driver.writer.given_up
        if len(victims) == 0 and not on_its_way:  # else that can be evicted in a moment
            victims = catalog.victims(count, held, mine=mine)
        self._note_cut(victims)
        catalog.hide(victims)
        self.evicted += len(victims)
        self._remove(victims)
        return len(victims) > 0

    def _leased(self, held: Mask, most: int) -> Mask:
        """Blocks that are kept since somebody has a lease on them: no more than `most`, those used
        last, so that what is put can stay as well."""
        leased: Mask = (self._leased_until_ns > self._engine.clock()) & ~held
        excess = int(np.count_nonzero(leased)) - most
        if excess > 0:
            leased[self._driver.catalog.least_used(leased, excess)] = False
        return leased

    def _note_cut(self, victims: Ids) -> None:
        cut = int(np.count_nonzero(self._leased_until_ns[victims] > self._engine.clock()))
        if cut and not self.leases_cut:
            log.warning(
                "blocks are evicted that were looked up a short while ago, since half the store is "
                "under such leases: it is too small for what is asked of it at once"
            )
        self.leases_cut += cut

    def _remove(self, blocks: Ids) -> None:
        if len(blocks) == 0:
            return
        self._leased_until_ns[blocks] = 0
        driver = self._driver
        self._engine.handle(Forgotten(self._geometry.all_pages(blocks)))
        if self._read_only:
            return
        said = driver.catalog.table["kind"][blocks] == PUBLISH
        driver.writer.commit.remove(blocks[said])
        for block in blocks[~said].tolist():  # the medium says nothing of them
            driver.catalog.give_back(block)
        self._move()

    def _move(self) -> None:
        now_ns = self._engine.clock()
        self._driver.write(now_ns)
        self._driver.start(now_ns)

    def shrink(self) -> None:
        """Evict what a byte cap or a quota no longer allows."""
        catalog = self._driver.catalog
        with self._engine.lock:
            if catalog.mine_used > catalog.mine_max and not self._read_only:
                self._evict(mine=True)
            used = catalog.blocks_used - self._driver.writer.commit.removing
            if used > catalog.blocks_max and not self._read_only:
                self._evict(mine=False)

    def writable(self) -> bool:
        """Whether the floor of free space is kept; asked at most once a second."""
        now_ns = self._engine.clock()
        if self._floor_bytes and not self._read_only and now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            before, self.stopped = self.stopped, self._short_of_space()
            if self.stopped and not before:
                log.warning("%s; reading goes on", self.stopped)
            elif before and not self.stopped:
                log.warning("store %s: there is room again, writing goes on", self.folders[0])
        return not self.stopped

    def _short_of_space(self) -> str:
        for folder in self.folders:
            if not folder.exists():
                continue  # its path is away
            status = os.statvfs(folder)
            free = status.f_bavail * status.f_frsize
            if free < self._floor_bytes:
                return (
                    f"store {folder}: nothing is written, {free} bytes are free on its file "
                    f"system, fewer than the floor of {self._floor_bytes}; free some or lower it"
                )
        return ""
