"""Which block lies where, and what its pages must hash to.

Decides allocation, expiry and who goes first: a reserved extent is nobody's until it is opened or
published; a removed one is nobody's until that, too, is on the medium. Who is found how is the
index's. Reads and writes nothing itself, and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefetchd.books import Books
from prefetchd.extents import FreeExtents
from prefetchd.filling import fill
from prefetchd.format import Binding, Superblock, page_checksums
from prefetchd.index import Index
from prefetchd.lookups import Stamps
from prefetchd.model import Ids, Mask, Slots
from prefetchd.policy import oldest
from prefetchd.records import NEVER_NS, PUBLISH, Records, record_dtype

if TYPE_CHECKING:
    from prefetchd.cipher import PageCipher

_NO_KEY = bytes(16)


class StoreFullError(Exception):
    """No free extent is left for a block."""


class Catalog:
    """Blocks of one namespace in one store. Those of other namespaces take space, expire and can be
    evicted; nobody finds or reads them here. `visible`: see `Index`. `table`: the last record of
    each block, as it is (or is about to be) on the medium. `cipher`: of an encrypted store; keys
    are then the names that it makes of them.
    """

    def __init__(
        self,
        superblock: Superblock,
        binding: Binding,
        visible: Mask,
        cipher: PageCipher | None = None,
    ) -> None:
        blocks = superblock.blocks
        self.superblock = superblock
        self.binding = binding
        self.cipher = cipher
        self.table: Records = np.zeros(blocks, record_dtype(superblock.proof_words))
        self.index = Index(superblock, self.table["key"], visible)
        self.busy = np.zeros(blocks, np.bool_)  # on their way to the medium: not to be removed yet
        self.blocks_max = self.mine_max = blocks
        """How many extents may be in use, by all namespaces and by this one."""
        self.stamps: Stamps = np.zeros(blocks, np.int64)
        """Of what was last put at each index; see `Found`."""
        self.next_expiry_ns: NDArray[np.int64] = np.full(1, NEVER_NS, np.int64)
        """When `expired` is worth asking (one number)."""
        self._taken = np.zeros(blocks, np.bool_)
        self._taken_on = np.zeros(superblock.stripes, np.int64)  # how many, a path
        self._mine = np.zeros(blocks, np.bool_)  # taken by this namespace
        self._stamp = superblock.epoch << 32
        self.free = FreeExtents(np.arange(blocks), superblock.stripes)
        self.discarded: list[int] = []
        """Blocks that are hidden and to be removed by whoever makes room: put again elsewhere while
        their path was away, given up while open, or found and then not stored."""
        self._seeds = np.zeros(blocks, np.uint64)
        self._checksums = self.table["checksums"]
        self._used = np.zeros(blocks, np.int64)
        self._clock = 0
        self.blocks_used = self.mine_used = 0
        self.checks_unlocked = False  # by the interpreter's lock, as of `Options`
        self.sequence = superblock.epoch << 40

    def show(self, books: Books) -> None:
        """From here on others look at stamps and times in there."""
        books.stamps[:], books.expiry_ns[:] = self.stamps, self.next_expiry_ns
        self.stamps, self.next_expiry_ns = books.stamps, books.expiry_ns

    @property
    def blocks_visible(self) -> int:
        return len(self.index.block_of)

    def adopt(self, table: Records, occupied: Mask) -> None:
        """Take over what was found on the medium: one record a block (kind 0: none), no key of one
        namespace twice. `occupied`: extents of which nothing can be told."""
        self.table[:] = table
        held = table["kind"] == PUBLISH
        self._taken[:] = held | occupied
        stripes = self.superblock.stripes
        self._taken_on[:] = np.bincount(np.flatnonzero(self._taken) % stripes, minlength=stripes)
        self.blocks_used = int(self._taken_on.sum())
        self.free = FreeExtents(np.flatnonzero(~self._taken), stripes)
        mine = held & ~occupied & (table["namespace"] == np.void(self.binding.namespace))
        self._mine[:] = mine
        self.index.adopt(mine, held & ~occupied & ~mine)
        self.mine_used = int(np.count_nonzero(mine))
        self.stamps[:] = self._stamp
        # Nobody remembers who used them; those written first go first.
        self._used[:] = table["sequence"].astype(np.int64) - (1 << 62)
        blocks = np.flatnonzero(mine)
        self._seeds[blocks] = self.binding.seeds(table["key"][blocks])
        known = held & ~occupied
        self.next_expiry_ns[0] = table["expires_ns"][known].min(initial=NEVER_NS)

    def names(self, keys: list[bytes]) -> list[bytes]:
        """What callers' keys are called here and on the medium."""
        return keys if self.cipher is None else self.cipher.veil(keys)

    def find(self, key: bytes) -> int:
        return self.index.find(key)

    def unchanged(self, pages: Ids, stamps: Stamps) -> Mask:
        """Which page ids belong to the very blocks that had these stamps, one a page."""
        if stamps.shape != pages.shape:
            raise ValueError(f"{pages.shape} pages with {stamps.shape} stamps; give one a page")
        known = self.index.known(pages)
        same: Mask = self.stamps[np.where(known, pages, 0) // self.superblock.layers] == stamps
        return known & same

    def touch(self, blocks: Ids) -> None:
        """These are in use now, in prefix order: of those touched together the last goes first."""
        self._clock += len(blocks)
        self._used[blocks] = np.arange(self._clock, self._clock - len(blocks), -1)

    def use(self, blocks: Ids) -> None:
        """These are in use now, all alike."""
        self._clock += 1
        self._used[blocks] = self._clock

    # --- allocation ---

    @property
    def has_room(self) -> bool:
        """Whether `reserve` would give an extent."""
        return self.blocks_used < self.blocks_max and not self.quota_full and bool(self.free)

    @property
    def quota_full(self) -> bool:
        return self.mine_used >= self.mine_max

    @property
    def may_expire(self) -> bool:
        return bool(self.next_expiry_ns[0] < NEVER_NS)

    def taken_on(self, path: int) -> int:
        """Extents in use on this path, by all namespaces."""
        return int(self._taken_on[path])

    def used_at(self, block: int) -> int:
        """Its place in the order of use; for `use_as`."""
        return int(self._used[block])

    def use_as(self, block: int, used: int) -> None:
        """It takes the place of another in the order of use, or its own of before."""
        self._used[block] = used

    def reserve(self) -> int:
        """A free extent for one block. Raises StoreFullError."""
        if self.has_room:
            return self.reserve_copy()
        if self.quota_full and self.mine_max < self.blocks_max:
            raise StoreFullError(f"all {self.mine_max} blocks of the namespace's quota are in use")
        besides = ", or lie on a path that takes no new ones" if self.free.barred else ""
        raise StoreFullError(f"all {self.blocks_max} blocks of the store are in use{besides}")

    def reserve_copy(self) -> int:
        """The same whatever the cap and the quota, for a block that takes another's place. The
        caller checks `free`."""
        block = self.free.take()
        self._taken[block] = True
        self._taken_on[block % self.superblock.stripes] += 1
        self.busy[block] = True
        self._mine[block] = True
        self.blocks_used += 1
        self.mine_used += 1
        return block

    def give_back(self, block: int) -> None:
        """The medium says nothing of this extent (any more): it may be written over."""
        self._taken[block] = self.busy[block] = False
        self._taken_on[block % self.superblock.stripes] -= 1
        self.free.give_back(block)
        self.blocks_used -= 1
        self.mine_used -= int(self._mine[block])
        self._mine[block] = False

    def record(
        self, block: int, key: bytes, seed: int, checksums: NDArray[np.uint64], expires: int
    ) -> None:
        """What will be said of a reserved block. It is not found yet, and not on the medium."""
        row = self.table[block : block + 1]
        row["kind"] = 0
        row["block"] = block
        row["expires_ns"] = expires
        row["key"] = np.void(key)
        row["namespace"] = np.void(self.binding.namespace)
        row["checksums"] = checksums
        self._stamp += 1
        self.stamps[block] = self._stamp
        self._seeds[block] = seed

    def publish(self, block: int) -> None:
        """From here on the block is found by its key, and its pages can be read."""
        expires_ns = int(self.table["expires_ns"][block])
        self.next_expiry_ns[0] = min(int(self.next_expiry_ns[0]), expires_ns)  # before it is seen
        if (older := self.index.publish(block)) >= 0:
            self.discarded.append(older)
        self._clock += 1
        self._used[block] = self._clock

    def open(self, block: int) -> None:
        """The pages of a reserved block can be asked for, but no key leads to it yet."""
        row = self.table[block : block + 1]
        row["kind"], row["key"], row["expires_ns"] = 0, np.void(_NO_KEY), NEVER_NS
        self._stamp += 1
        self.stamps[block] = self._stamp
        self.index.open(block)
        self.busy[block] = False

    def seal(self, block: int) -> None:
        """An open block is on its way to the medium."""
        self.busy[block] = True

    # --- removal ---

    def expired(self, wall_ns: int) -> Ids:
        """Blocks whose time is over. Found once: from here on nobody finds them."""
        index = self.index
        there = index.visible | index.foreign | index.suspended
        stays = there & (self.table["expires_ns"] > wall_ns)
        over = np.flatnonzero(there & ~stays)
        # A block that is open, or not yet found by its key, has no time to live.
        over = over[index.foreign[over] | index.named(over)]
        self.hide(over)
        self.next_expiry_ns[0] = self.table["expires_ns"][stays].min(initial=NEVER_NS)
        return over

    def victims(self, count: int, held: Mask, *, mine: bool) -> Ids:
        """Up to `count` blocks that have not been used for longest, `held` and busy ones left out:
        of this namespace only (`mine`), or of all. They are still found."""
        visible = self.index.visible
        allowed = (visible if mine else visible | self.index.foreign) & ~held & ~self.busy
        for path in sorted(self.free.barred):  # their extents would be of no use
            allowed[path :: self.superblock.stripes] = False
        return self.least_used(allowed, count)

    def least_used(self, allowed: Mask, count: int) -> Ids:
        return oldest(np.flatnonzero(allowed), self._used, count)

    def hide(self, blocks: Ids) -> None:
        """Nobody finds these blocks from here on; their extents stay taken."""
        self.index.hide(blocks)

    def say(self, blocks: Ids, kind: int) -> Records:
        """New records of these blocks, of this kind and with the next sequence numbers."""
        first = self.sequence + 1
        self.sequence += len(blocks)
        self.table["kind"][blocks] = kind
        self.table["block"][blocks] = blocks
        self.table["sequence"][blocks] = np.arange(first, first + len(blocks), dtype=np.uint64)
        return self.table[blocks]

    def live(self) -> Records:
        """What a snapshot must say: every block that the medium holds."""
        records: Records = self.table[self.table["kind"] == PUBLISH]
        return records

    # --- pages ---

    def prepare(
        self,
        payload: NDArray[np.uint8],
        pages: NDArray[np.uint8],
        block: int,
        key: bytes,
        seed: int,
    ) -> NDArray[np.uint64]:
        """Copy the pages of a reserved block, (layers, page_bytes), as the medium is to have them;
        the checksums for `record`. Needs no lock."""
        if self.cipher is not None:
            return self.cipher.seal(payload, pages, key, block)
        return fill(payload, pages, seed)

    def verify(self, pages: Ids, staging: NDArray[np.uint8], slots: Slots) -> Mask:
        """Which slots of `staging` (slots, slot_bytes) hold the pages they should; what is
        encrypted is decrypted there, and so can be verified once."""
        blocks, layers = np.divmod(pages, self.superblock.layers)
        if self.cipher is not None:
            return self.cipher.open(self.table[blocks], layers, staging, slots.tolist())
        exact = staging[:, : self.superblock.page_bytes]
        seeds = self._seeds[blocks]
        found = page_checksums(exact, slots, seeds, layers, unlocked=self.checks_unlocked)
        good: Mask = found == self._checksums[blocks, layers]
        return good
