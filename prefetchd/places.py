"""Where a page begins in a store's files: arithmetic over the store's shape, nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.format import Superblock
from prefetchd.model import Ids


def locate(shape: Superblock, pages: Ids) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
    """The index of each page's file (0 for all if there is one), and where it begins, bytes."""
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
