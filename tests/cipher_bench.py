"""What encryption costs: `python -m tests.cipher_bench [FOLDER]`.

A page at a time: the least of several rounds of thread time, plain and encrypted in turn; 32 layers
a block, batches of 64 pages of 64 blocks, as a layer of a decode step demands them. Then whole
runtimes, with stores in FOLDER (default: a temporary one): 2,048 pages of 64 KiB put, then demanded
64 at a time, all read from the device; medians of rounds in turn, processor time of the process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import prefetchd
from prefetchd import Options, Runtime
from prefetchd.catalog import Catalog
from prefetchd.cipher import PageCipher
from prefetchd.format import Binding
from prefetchd.layout import uniform
from prefetchd.model import Ids
from prefetchd.records import NEVER_NS
from prefetchd.store import plan_superblock

ROUNDS, BATCH, LAYERS, PASSES = 40, 64, 32, 7


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


def _runtimes(folder: Path) -> None:
    layout, keys = uniform(LAYERS, 65_536), [n.to_bytes(16, "big") for n in range(BATCH)]
    pages = np.random.default_rng(1).integers(0, 256, (BATCH, LAYERS, 65_536), np.uint8)
    figures: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(2 * PASSES):
        encrypted = number % 2 == 1
        with tempfile.TemporaryDirectory(dir=folder) as made:
            key = Path(made, "key") if encrypted else None
            options = Options(predictor="none", evict="lru", staging_bytes=1 << 24, key_file=key)
            place = Path(made, "kv")
            with prefetchd.open(place, layout, blocks=BATCH, options=options) as runtime:
                put = _spent(lambda: runtime.put(keys, pages).wait())
                found = runtime.lookup(keys)
                read = _spent(lambda: _read(runtime, found))  # noqa: B023
                assert runtime.stats().pages_read == BATCH * LAYERS
                figures[encrypted].append([*put, *read])
    for encrypted, rows in figures.items():
        put_cpu, put_s, read_cpu, read_s = np.median(rows, axis=0)
        size = pages.nbytes / 1e9
        print(
            f"{'encrypted' if encrypted else 'plain':>9}: put {put_cpu:5.1f} us CPU a page, "
            f"{size / put_s:.2f} GB/s; read {read_cpu:5.1f} us CPU a page, {size / read_s:.2f} GB/s"
        )


def _read(runtime: Runtime, blocks: Ids) -> None:
    for layer in range(LAYERS):
        with runtime.demand(runtime.pages(blocks, layer)) as ticket:
            assert not ticket.missing.any()


def _spent(do: Callable[[], object]) -> tuple[float, float]:
    """Processor time a page, us, and seconds."""
    cpu_ns, start_ns = time.process_time_ns(), time.monotonic_ns()
    do()
    spent_ns = time.process_time_ns() - cpu_ns
    return spent_ns / 1000 / (BATCH * LAYERS), (time.monotonic_ns() - start_ns) / 1e9


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

    with tempfile.TemporaryDirectory() as made:
        _runtimes(Path(sys.argv[1]) if sys.argv[1:] else Path(made))


if __name__ == "__main__":
    main()
