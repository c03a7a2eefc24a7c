"""The bytes that benchmarks store: random, unique, stamped, and known in advance.

Decides what every page holds, so that whoever reads one can tell whether it is the right one.
Incompressible and without duplicates, so that no drive or file system can cheat.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefetchd.model import Ids, Mask

STAMP_BYTES = 16
_STAMP = np.dtype([("page", "<u8"), ("nonce", "<u8")])
_BATCH_BYTES = 1 << 25


def nonce(seed: int) -> int:
    return xxhash.xxh3_64_intdigest(b"prefetchd content", seed)


def block_names(blocks: int, seed: int) -> list[bytes]:
    """The keys under which a benchmark's blocks are stored."""
    return [
        xxhash.xxh3_128_digest(b"prefetchd bench" + block.to_bytes(8, "little"), seed)
        for block in range(blocks)
    ]


def block_pages(
    blocks: int, layers: int, page_bytes: int, seed: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(first block, pages) in batches; pages are (blocks, layers, page_bytes), uint8."""
    batch = max(1, _BATCH_BYTES // (layers * page_bytes))
    random = np.random.Generator(np.random.SFC64(seed))
    for first in range(0, blocks, batch):
        count = min(batch, blocks - first)
        words = -(-count * layers * page_bytes // 8)
        pages = random.integers(0, 2**64, words, np.uint64).view(np.uint8)
        pages = pages[: count * layers * page_bytes].reshape(count * layers, page_bytes)
        stamps = np.zeros(count * layers, _STAMP)
        stamps["page"] = first * layers + np.arange(count * layers)
        stamps["nonce"] = nonce(seed)
        pages[:, :STAMP_BYTES] = stamps.view(np.uint8).reshape(-1, STAMP_BYTES)
        yield first, pages.reshape(count, layers, page_bytes)


def stamped(rows: NDArray[np.uint8], pages: Ids, seed: int) -> Mask:
    """Which rows (n, at least 16 bytes) carry the stamp of their page."""
    stamps = np.ascontiguousarray(rows[:, :STAMP_BYTES]).view(_STAMP).reshape(-1)
    good: Mask = (stamps["page"] == pages.astype(np.uint64)) & (stamps["nonce"] == nonce(seed))
    return good
