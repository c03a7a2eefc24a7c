"""Records: what a store says of its blocks, one fixed-size row each.

Decides a row's encoding and what makes it genuine; pure functions over arrays, thousands of rows at
a time. Refuses to know where rows lie.

A record says one thing of one block: this key lies here, with these page checksums (PUBLISH), or
nothing lies here any more (REMOVE). It names its store and its block and ends in a checksum, so
that a torn, foreign or misplaced one is none.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from prefetchd.format import Superblock

PUBLISH, REMOVE = 1, 2
NEVER_NS = 2**63 - 1
"""The expiry of what does not expire."""
_MAGIC = 0x32726670
_SALT_STEP = 0xA0761D6478BD642F
_CHUNK = 4096  # records checked at a time: keeps the widened copy small

Records = NDArray[Any]
"""Structured, of `record_dtype`."""
Words = NDArray[np.uint64]


@cache
def record_dtype(words: int) -> np.dtype[Any]:
    """`words`: of the checksums; see `Superblock.proof_words`."""
    return np.dtype(
        [
            ("magic", "<u4"),
            ("kind", "<u4"),
            ("block", "<i8"),
            ("sequence", "<u8"),  # rises with every record of a store
            ("expires_ns", "<i8"),  # wall clock, since 1970
            ("key", "V16"),
            ("namespace", "V16"),
            ("store_id", "V16"),
            ("checksums", "<u8", (words,)),
            ("check", "<u8"),
        ]
    )


def seal(records: Records, superblock: Superblock, salt: int = 0) -> Records:
    """Records that verify: a copy with magic, store and checksum. `salt`: of the journal's
    generation; 0 for headers."""
    sealed = records.copy()
    sealed["magic"] = _MAGIC
    sealed["store_id"] = np.void(superblock.store_id)
    sealed["check"] = _checks(sealed, salt)
    return sealed


def genuine(records: Records, superblock: Superblock, salt: int = 0) -> NDArray[np.bool_]:
    """Which rows are intact records of this store."""
    good: NDArray[np.bool_] = (records["magic"] == _MAGIC) & (records["block"] >= 0)
    good &= records["block"] < superblock.blocks
    good &= (records["kind"] == PUBLISH) | (records["kind"] == REMOVE)
    # Most rows of an empty journal or store end here, before anything is multiplied.
    places = np.flatnonzero(good)
    kept = records[places]
    same = kept["store_id"] == np.void(superblock.store_id)
    good[places] = same & (_checks(kept, salt) == kept["check"])
    return good


def encode_headers(records: Records, superblock: Superblock) -> NDArray[np.uint8]:
    """The header pages of these records, (records, header_bytes)."""
    rows = np.zeros((len(records), superblock.header_bytes), np.uint8)
    sealed = seal(records, superblock)
    rows[:, : superblock.record_bytes] = sealed.view(np.uint8).reshape(len(records), -1)
    return rows


def decode_headers(
    rows: NDArray[np.uint8], blocks: NDArray[np.int64], superblock: Superblock
) -> tuple[Records, NDArray[np.bool_]]:
    """What the header pages of these blocks say, and which of them say anything."""
    size = superblock.record_bytes
    flat = np.ascontiguousarray(rows[:, :size]).reshape(-1)
    records: Records = flat.view(record_dtype(superblock.proof_words))
    good = genuine(records, superblock) & (records["block"] == blocks)
    return records, good


def _checks(records: Records, salt: int) -> Words:
    """Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014):
    the sum of all 32-bit words, each times an odd 64-bit number of its own, mixed once more. A
    changed word always shows; and one matrix product checks thousands of records."""
    size = records.dtype.itemsize // 4 - 2
    factors = multipliers(size)
    start = np.uint64(_SALT_STEP * (salt + 1) % 2**64)
    sums = np.empty(len(records), np.uint64)
    flat = np.ascontiguousarray(records).view("<u4").reshape(len(records), size + 2)
    for first in range(0, len(records), _CHUNK):
        words = flat[first : first + _CHUNK, :size].astype(np.uint64)
        sums[first : first + _CHUNK] = words @ factors
    return mixed(sums + start)


@cache
def multipliers(count: int) -> Words:
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed(steps) | np.uint64(1)


def mixed(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
