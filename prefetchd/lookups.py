"""What callers name blocks by, and what they are told of those that are there.

Decides what a key and a block of pages look like, and what proves that a block index still means
the block it meant. Looks nothing up itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Ids

Keys = Sequence[bytes] | NDArray[np.uint8]
"""16 bytes each, or an array of shape (keys, 16)."""
Stamps = NDArray[np.int64]
"""What tells a block from every other that lies or lay at its index, in this opening of the store
and all others."""

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Found:
    """The blocks of a lookup, one of each per key: `blocks` (int64) and their `stamps` (int64)."""

    blocks: Ids
    stamps: Stamps

    def __len__(self) -> int:
        return len(self.blocks)


def as_keys(keys: Keys) -> list[bytes]:
    """Raises ValueError for a key of another length."""
    if isinstance(keys, np.ndarray) and keys.ndim == 2 and keys.shape[1] == _KEY_BYTES:
        raw = np.ascontiguousarray(keys, np.uint8).tobytes()
        return [raw[at : at + _KEY_BYTES] for at in range(0, len(raw), _KEY_BYTES)]
    names = [bytes(key) for key in keys]
    if any(len(name) != _KEY_BYTES for name in names):
        raise ValueError(f"keys are {_KEY_BYTES} bytes each; see prefetchd.keys")
    return names
