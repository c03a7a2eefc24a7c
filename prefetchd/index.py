"""Which blocks are found: by their key, by their pages, and which of them not for a while.

Decides what a block's path being away means for its key, and what a key leads to when it was put
twice. Refuses to know extents, records and times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from prefetchd.extents import of_path
from prefetchd.format import Superblock
from prefetchd.masks import every
from prefetchd.model import NO_IDS, Ids, Mask

BlockKeys = NDArray[np.void]
"""The key of each block, 16 bytes."""


class Index:
    """`visible` (one a block): pages that can be asked for; kept up to date for whoever else looks
    at it. `keys`: as the records have them, read when they are needed.
    """

    def __init__(self, superblock: Superblock, keys: BlockKeys, visible: Mask) -> None:
        self.visible = visible
        self.foreign = np.zeros(superblock.blocks, np.bool_)
        """Published by other namespaces."""
        self.suspended = np.zeros(superblock.blocks, np.bool_)
        """There, on a path that cannot be read."""
        self.block_of: dict[bytes, int] = {}
        self._suspended_of: dict[bytes, int] = {}
        self._keys = keys
        self._stripes = superblock.stripes
        self._layers = superblock.layers
        self._away: set[int] = set()  # paths that cannot be read

    def adopt(self, mine: Mask, foreign: Mask) -> None:
        """What was found on the medium; no key of `mine` twice."""
        blocks = np.flatnonzero(mine)
        self.block_of = dict(zip(self._keys[blocks].tolist(), blocks.tolist(), strict=True))
        self.visible[:] = mine
        self.foreign[:] = foreign

    # --- questions ---

    def find(self, key: bytes) -> int:
        return self.block_of.get(key, -1)

    def prefix(self, keys: Sequence[bytes]) -> Ids:
        """Block indices of the longest known prefix of `keys`."""
        found = list(takewhile(lambda block: block >= 0, map(self.find, keys)))
        return np.array(found, np.int64) if found else NO_IDS

    def known(self, pages: Ids) -> Mask:
        """Which page ids belong to blocks that are there."""
        inside = (pages >= 0) & (pages < self.visible.size * self._layers)
        blocks = np.where(inside, pages, 0) // self._layers
        known: Mask = inside & self.stored(blocks)
        return known

    def stored(self, blocks: Ids) -> Mask:
        """Which of these blocks are there, on whatever path."""
        there: Mask = self.visible[blocks] | self.suspended[blocks]
        return there

    def all_stored(self, blocks: Ids) -> bool:
        """The same for all at once, at the least cost when the answer is yes."""
        if every(self.visible[blocks]):
            return True
        return bool(self._away) and every(self.stored(blocks))

    def named(self, blocks: Ids) -> Mask:
        """To which of these blocks of this namespace their key leads, now or when their path is
        back: not to one that is open, or not found yet."""
        led = [
            block in (self.find(key), self._suspended_of.get(key, -1))
            for block, key in zip(blocks.tolist(), self._keys[blocks].tolist(), strict=True)
        ]
        return np.array(led, np.bool_)

    # --- changes ---

    def open(self, block: int) -> bool:
        """Its pages can be asked for; False if not before its path is back."""
        away = block % self._stripes in self._away
        (self.suspended if away else self.visible)[block] = True
        return not away

    def publish(self, block: int) -> int:
        """From here on its key leads to it. An older block that was away meanwhile is hidden and
        returned, else -1."""
        key = self._keys[block].tobytes()
        older = self._suspended_of.pop(key, -1) if self._suspended_of else -1
        if older >= 0:
            self.suspended[older] = False
        (self.block_of if self.open(block) else self._suspended_of)[key] = block
        return older

    def hide(self, blocks: Ids) -> None:
        """Nobody finds these blocks from here on."""
        self.visible[blocks] = self.foreign[blocks] = self.suspended[blocks] = False
        for block in blocks.tolist():
            key = self._keys[block].tobytes()
            for found in (self.block_of, self._suspended_of):
                if found.get(key) == block:
                    del found[key]

    def suspend(self, path: int) -> None:
        """The blocks of this path are not found until it is back; their page ids stay theirs."""
        self._away.add(path)
        blocks = of_path(self.visible, path, self._stripes)
        self.visible[blocks] = False
        self.suspended[blocks] = True
        self._move(blocks, self.block_of, self._suspended_of)

    def resume(self, path: int) -> None:
        """They are found again; those that were put anew meanwhile are hidden already."""
        self._away.discard(path)
        blocks = of_path(self.suspended, path, self._stripes)
        self.suspended[blocks] = False
        self.visible[blocks] = True
        self._move(blocks, self._suspended_of, self.block_of)

    def _move(self, blocks: Ids, source: dict[bytes, int], target: dict[bytes, int]) -> None:
        for block in blocks.tolist():
            key = self._keys[block].tobytes()
            if source.get(key) == block:
                target[key] = source.pop(key)
