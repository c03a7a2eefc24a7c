"""What encryption costs in processor time, a page at a time: `python -m tests.cipher_bench`.

Figures are the least of several rounds of thread time, plain and encrypted in turn; 32 layers a
block, batches of 64 pages of 64 blocks, as a layer of a decode step demands them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from prefetchd import key_file
from prefetchd.catalog import Catalog
from prefetchd.cipher import PageCipher
from prefetchd.format import Binding, Superblock
from prefetchd.layout import uniform
from prefetchd.records import NEVER_NS
from prefetchd.store import plan_superblock

ROUNDS, BATCH, LAYERS = 40, 64, 32


def with_key(shape: Superblock, folder: Path) -> tuple[Superblock, Path]:
    """A store's shape planned `encrypted`, and the key file that is made for it."""
    path = folder / "key"
    return msgspec.structs.replace(shape, key_check=key_file.make(path, shape.store_id)), path


def catalog(page_bytes: int, *, encrypted: bool) -> Catalog:
    shape = plan_superblock(uniform(LAYERS, page_bytes), BATCH, 4096, encrypted=encrypted)
    binding = Binding(bytes(16), shape.fingerprint, page_bytes)
    cipher = PageCipher(bytes(32), shape, bytes(16)) if encrypted else None
    return Catalog(shape, binding, np.zeros(BATCH, np.bool_), cipher)


class Costs:
    def __init__(self, page_bytes: int, *, encrypted: bool) -> None:
        self.catalog = catalog(page_bytes, encrypted=encrypted)
        slot_bytes = self.catalog.superblock.slot_bytes
        self._payloads = np.zeros((BATCH, LAYERS, slot_bytes), np.uint8)
        random = np.random.default_rng(1)
        self._pages = random.integers(0, 256, (LAYERS, page_bytes), np.uint8)
        self._staging = np.zeros((BATCH, slot_bytes), np.uint8)
        for block in range(BATCH):
            self._write(block)

    def _write(self, block: int) -> None:
        key = block.to_bytes(16, "big")
        seed = self.catalog.binding.seed(key)
        made = self.catalog.prepare(self._payloads[block], self._pages, block, key, seed)
        self.catalog.record(block, key, seed, made, NEVER_NS)

    def write_us(self, number: int) -> float:
        """Of a page: copied, and hashed or sealed."""
        return _us(lambda: self._write(number % BATCH)) / LAYERS

    def read_us(self, number: int) -> float:
        """Of a page: verified, or opened."""
        layer = number % LAYERS
        self._staging[:] = self._payloads[:, layer]  # as the device would
        pages, slots = np.arange(BATCH) * LAYERS + layer, np.arange(BATCH)
        good: list[bool] = []
        spent = _us(lambda: good.extend(self.catalog.verify(pages, self._staging, slots)))
        assert all(good)
        assert np.array_equal(self._staging[0, : self._pages.shape[1]], self._pages[layer])
        return spent / BATCH


def _us(do: Callable[[], object]) -> float:
    start_ns = time.thread_time_ns()
    do()
    return (time.thread_time_ns() - start_ns) / 1000


def main() -> None:
    print("us a page          read: plain  encrypted    write: plain  encrypted")
    for page_bytes in (4096, 16_384, 65_536, 262_144):
        plain, sealed = (Costs(page_bytes, encrypted=encrypted) for encrypted in (False, True))
        rounds = [
            (plain.read_us(n), sealed.read_us(n), plain.write_us(n), sealed.write_us(n))
            for n in range(ROUNDS)
        ]
        least = np.array(rounds).min(axis=0)
        print(f"{page_bytes:>8} bytes " + "".join(f"{figure:13.1f}" for figure in least))


if __name__ == "__main__":
    main()
