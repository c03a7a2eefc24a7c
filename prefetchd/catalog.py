"""Which block lies where, and what its pages must hash to.

Decides allocation and visibility: a reserved extent is nobody's until it is published, and then
every reader finds it. Reads and writes nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prefetchd.format import Binding, Header, Superblock, page_checksum
from prefetchd.model import NO_IDS, Ids, Mask, Slots


class StoreFullError(Exception):
    """No free extent is left for a block."""


class Catalog:
    """Blocks of one namespace in one store; extents of other namespaces are only occupied.

    `visible`, one a block, is kept up to date for whoever else looks at it.
    """

    def __init__(self, superblock: Superblock, binding: Binding, visible: Mask) -> None:
        self.superblock = superblock
        self.binding = binding
        self._block_of: dict[bytes, int] = {}
        self._visible = visible
        self._taken = np.zeros(superblock.blocks, np.bool_)
        self._free = list(range(superblock.blocks - 1, -1, -1))  # a stack; may name taken ones
        self._sequences = np.zeros(superblock.blocks, np.uint64)
        self._seeds = np.zeros(superblock.blocks, np.uint64)
        self._checksums = np.zeros((superblock.blocks, superblock.layers), np.uint64)
        self.sequence = 0

    @property
    def blocks_visible(self) -> int:
        return int(np.count_nonzero(self._visible))

    def load(self, block: int, header: Header) -> None:
        """Take over an extent found on the medium; of two with one key the newer one is kept."""
        self.sequence = max(self.sequence, header.sequence)
        self._taken[block] = True
        if header.namespace != self.binding.namespace:
            return
        other = self.find(header.key)
        if other >= 0 and self._sequences[other] >= header.sequence:
            self._taken[block] = False
            return
        if other >= 0:
            self._taken[other] = self._visible[other] = False
            self._free.append(other)
        self.publish(block, header)

    def occupy(self, block: int) -> None:
        """What an extent holds cannot be told: nobody finds it, and nobody writes over it."""
        self._taken[block] = True

    def reserve(self) -> int:
        """A free extent for one block. Raises StoreFullError."""
        while self._free:
            block = self._free.pop()
            if not self._taken[block]:
                self._taken[block] = True
                return block
        raise StoreFullError(f"all {self.superblock.blocks} blocks of the store are in use")

    def give_back(self, block: int) -> None:
        """A reserved extent was not needed, or its write failed: no trace is left."""
        self._taken[block] = False
        self._free.append(block)

    def publish(self, block: int, header: Header) -> None:
        """From here on the block is found by its key, and its pages can be read."""
        self._block_of[header.key] = block
        self._seeds[block] = self.binding.seed(header.key)
        self._checksums[block] = header.checksums
        self._sequences[block] = header.sequence
        self._visible[block] = True

    def find(self, key: bytes) -> int:
        return self._block_of.get(key, -1)

    def prefix(self, keys: Sequence[bytes]) -> Ids:
        """Block indices of the longest known prefix of `keys`."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
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

    def offsets(self, pages: Ids) -> NDArray[np.int64]:
        """Where pages begin in the file, bytes."""
        shape = self.superblock
        blocks = pages // shape.layers
        # Pages of a block lie in layer order, so only the block's own share is added per block.
        start = shape.superblock_bytes + shape.header_bytes
        between = shape.extent_bytes - shape.layers * shape.slot_bytes
        offsets: NDArray[np.int64] = pages * shape.slot_bytes + (blocks * between + start)
        return offsets

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
