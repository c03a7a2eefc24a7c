"""Which block lies where, and what its pages must hash to.

Decides allocation, visibility, expiry and who goes first: a reserved extent is nobody's until it
is published, and then every reader finds it; a removed one is nobody's until that, too, is on the
medium. Reads and writes nothing itself, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from prefetchd.format import Binding, Superblock, page_checksum
from prefetchd.model import NO_IDS, Ids, Mask, Slots
from prefetchd.policy import oldest
from prefetchd.records import NEVER_NS, PUBLISH, Records, record_dtype

_NO_KEY = bytes(16)


class StoreFullError(Exception):
    """No free extent is left for a block."""


class Catalog:
    """Blocks of one namespace in one store; extents of other namespaces are only occupied.

    `visible`, one a block, is kept up to date for whoever else looks at it. `table`: the last
    record of each block, one row a block, as it is (or is about to be) on the medium.
    """

    def __init__(self, superblock: Superblock, binding: Binding, visible: Mask) -> None:
        blocks = superblock.blocks
        self.superblock = superblock
        self.binding = binding
        self.table: Records = np.zeros(blocks, record_dtype(superblock.layers))
        self.busy = np.zeros(blocks, np.bool_)
        """Blocks on their way to the medium: not to be removed yet."""
        self.blocks_max = blocks
        """How many extents may be in use; less than all under a byte cap."""
        self.next_expiry_ns = NEVER_NS
        """When `expired` is worth asking."""
        self._block_of: dict[bytes, int] = {}
        self._visible = visible
        self._taken = np.zeros(blocks, np.bool_)
        self._free = list(range(blocks - 1, -1, -1))  # a stack; may name taken ones
        self._seeds = np.zeros(blocks, np.uint64)
        self._checksums = self.table["checksums"]
        self._used = np.zeros(blocks, np.int64)
        self._clock = 0
        self.blocks_used = 0
        self.sequence = superblock.epoch << 40

    @property
    def blocks_visible(self) -> int:
        return len(self._block_of)

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    # --- what is there ---

    def adopt(self, table: Records, occupied: Mask) -> None:
        """Take over what was found on the medium: one record a block (kind 0: none), no key of one
        namespace twice. `occupied`: extents of which nothing can be told."""
        self.table[:] = table
        held = table["kind"] == PUBLISH
        self._taken[:] = held | occupied
        self.blocks_used = int(np.count_nonzero(self._taken))
        self._free = np.flatnonzero(~self._taken)[::-1].tolist()
        mine = held & ~occupied & (table["namespace"] == np.void(self.binding.namespace))
        blocks = np.flatnonzero(mine)
        # Nobody remembers who used them; those written first go first.
        self._used[blocks] = table["sequence"][blocks].astype(np.int64) - (1 << 62)
        self._seeds[blocks] = self.binding.seeds(table["key"][blocks])
        self._block_of = dict(zip(table["key"][blocks].tolist(), blocks.tolist(), strict=True))
        self._visible[:] = mine
        self.next_expiry_ns = int(table["expires_ns"][blocks].min(initial=NEVER_NS))

    def find(self, key: bytes) -> int:
        return self._block_of.get(key, -1)

    def prefix(self, keys: Sequence[bytes]) -> Ids:
        """Block indices of the longest known prefix of `keys`."""
        found = list(takewhile(lambda block: block >= 0, map(self.find, keys)))
        return np.array(found, np.int64) if found else NO_IDS

    def known(self, pages: Ids) -> Mask:
        """Which page ids belong to visible blocks."""
        inside = (pages >= 0) & (pages < self._visible.size * self.superblock.layers)
        known: Mask = inside & self._visible[np.where(inside, pages, 0) // self.superblock.layers]
        return known

    def all_known(self, pages: Ids) -> bool:
        """The same for all at once, at the least cost when the answer is yes."""
        if len(pages) == 0:
            return True
        blocks = pages // self.superblock.layers
        if blocks.min() < 0 or blocks.max() >= len(self._visible):
            return False
        return bool(self._visible[blocks].all())

    def touch(self, blocks: Ids) -> None:
        """These are in use now, in prefix order: of those touched together the last goes first."""
        self._clock += len(blocks)
        self._used[blocks] = np.arange(self._clock, self._clock - len(blocks), -1)

    # --- allocation ---

    @property
    def has_room(self) -> bool:
        """Whether `reserve` would give an extent."""
        return self.blocks_used < self.blocks_max

    @property
    def may_expire(self) -> bool:
        return self.next_expiry_ns < NEVER_NS

    def reserve(self) -> int:
        """A free extent for one block. Raises StoreFullError."""
        while self._free and self.has_room:
            block = self._free.pop()
            if not self._taken[block]:
                self._taken[block] = True
                self.busy[block] = True
                self.blocks_used += 1
                return block
        raise StoreFullError(f"all {self.blocks_max} blocks of the store are in use")

    def give_back(self, block: int) -> None:
        """The medium says nothing of this extent (any more): it may be written over."""
        self._taken[block] = self.busy[block] = False
        self._free.append(block)
        self.blocks_used -= 1

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
        self._seeds[block] = seed

    def publish(self, block: int) -> None:
        """From here on the block is found by its key, and its pages can be read."""
        row = self.table[block]
        self._block_of[row["key"].tobytes()] = block
        self._visible[block] = True
        self.next_expiry_ns = min(self.next_expiry_ns, int(row["expires_ns"]))
        self._clock += 1
        self._used[block] = self._clock

    def open(self, block: int) -> None:
        """The pages of a reserved block can be asked for, but no key leads to it yet."""
        row = self.table[block : block + 1]
        row["kind"], row["key"], row["expires_ns"] = 0, np.void(_NO_KEY), NEVER_NS
        self._visible[block] = True
        self.busy[block] = False

    def seal(self, block: int) -> None:
        """An open block is on its way to the medium."""
        self.busy[block] = True

    # --- removal ---

    def expired(self, wall_ns: int) -> Ids:
        """Blocks whose time is over. Found once: from here on nobody finds them."""
        mine = self._visible & (self.table["expires_ns"] > wall_ns)
        keys = self.table["key"]
        found = [  # a block that is open, or not yet found by its key, has no time to live
            block
            for block in np.flatnonzero(self._visible & ~mine).tolist()
            if self.find(keys[block].tobytes()) == block
        ]
        over = np.array(found, np.int64)
        self.hide(over)
        self.next_expiry_ns = int(self.table["expires_ns"][mine].min(initial=NEVER_NS))
        return over

    def victims(self, count: int, held: Mask) -> Ids:
        """Up to `count` blocks that have not been used for longest, `held` and busy ones left out.
        They are still found."""
        allowed = self._visible & ~held & ~self.busy
        return oldest(np.flatnonzero(allowed), self._used, count)

    def hide(self, blocks: Ids) -> None:
        """Nobody finds these blocks from here on; their extents stay taken."""
        self._visible[blocks] = False
        for block in blocks.tolist():
            key = self.table["key"][block].tobytes()
            if self._block_of.get(key) == block:
                del self._block_of[key]

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

    def locate(self, pages: Ids) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
        """Where pages begin: the index of their file (0 for all if there is one), and bytes."""
        shape = self.superblock
        blocks = pages // shape.layers
        # Pages of a block lie in layer order, so only the block's own share is added per block.
        start = shape.superblock_bytes + shape.header_bytes
        offsets: NDArray[np.int64]
        if shape.stripes == 1:
            between = shape.extent_bytes - shape.layers * shape.slot_bytes
            offsets = pages * shape.slot_bytes + (blocks * between + start)
            return 0, offsets
        layers = pages - blocks * shape.layers
        offsets = shape.extent_offsets(blocks) + (layers * shape.slot_bytes + shape.header_bytes)
        return shape.files(blocks), offsets

    def verify(self, pages: Ids, staging: NDArray[np.uint8], slots: Slots) -> Mask:
        """Which slots of `staging` (slots, slot_bytes) hold the pages they should.

        Hashing 64 KiB costs ten times the loop around it, and xxhash takes one page a call.
        """
        blocks, layers = np.divmod(pages, self.superblock.layers)
        rows = zip(
            slots.tolist(),
            layers.tolist(),
            self._seeds[blocks].tolist(),
            self._checksums[blocks, layers].tolist(),
            strict=True,
        )
        exact = staging[:, : self.superblock.page_bytes]
        good = [
            page_checksum(exact[slot], seed, layer) == checksum
            for slot, layer, seed, checksum in rows
        ]
        return np.array(good, np.bool_)
