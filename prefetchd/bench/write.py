"""`prefetchd bench write`: what a prefill's puts give on a drive, beside fio on the same file.

Decides how the two are compared: interleaved rounds, the same idle gap before each, whole passes
over the same file, ratios of pairs, medians. A pass of ours is a real store's: copied, checksummed,
flushed, with its headers and journal.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefetchd import store_making
from prefetchd.bench.ring import BenchError, fio_job
from prefetchd.layout import Layout, uniform
from prefetchd.opening import open_runtime
from prefetchd.options import Options
from prefetchd.store_opening import open_store

_PUT_BLOCKS = 32  # one prefill
_FIO_DEPTH = 8


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """`page_bytes` x `layers` make a block; `blocks` of them a pass."""

    layers: int
    page_bytes: int
    blocks: int
    rounds: int
    idle_s: float
    device: str
    durability: str


@dataclass(frozen=True, slots=True)
class WriteRates:
    """Bytes a second of payload, one a round; `fio` empty if it was not asked for."""

    ours: list[float]
    fio: list[float]
    flushes: int
    bytes_written: int

    @property
    def ratio(self) -> float | None:
        if not self.fio:
            return None
        return statistics.median(a / b for a, b in zip(self.ours, self.fio, strict=True))


def bench_write(
    folder: Path, settings: WriteSettings, *, fio: bool, tell: Callable[[], object]
) -> WriteRates:
    """Fill a new store in `folder` over and over; nothing of it is left behind. Raises BenchError,
    StoreError."""
    if folder.exists():
        raise BenchError(
            f"{folder} is there already; name a new folder on the drive to be measured"
        )
    layout = uniform(settings.layers, settings.page_bytes, name="bench")
    rates = WriteRates([], [], 0, 0)
    flushes = written = 0
    try:
        for number in range(settings.rounds):
            engines = ["ours", "fio"] if fio else ["ours"]
            for engine in engines if number % 2 == 0 else reversed(engines):
                shutil.rmtree(folder, ignore_errors=True)
                store_making.create(folder, layout, settings.blocks, fill=True)
                time.sleep(settings.idle_s)
                if engine == "ours":
                    rate, flushes, written = _puts(folder, layout, settings)
                    rates.ours.append(rate)
                else:
                    rates.fio.append(_fio(folder, layout, settings))
                tell()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return WriteRates(rates.ours, rates.fio, flushes, written)


def _puts(folder: Path, layout: Layout, settings: WriteSettings) -> tuple[float, int, int]:
    """One pass: payload bytes a second; flushes and bytes written by it."""
    shape = (_PUT_BLOCKS, settings.layers, settings.page_bytes)
    pages = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    options = Options(
        device=settings.device,
        predictor="none",
        evict="lru",
        staging_bytes=64 * layout.slot_bytes(1 << 16),
    )
    with open_runtime(folder, layout, options=options) as runtime:
        start_s = time.perf_counter()
        tickets = []
        for first in range(0, settings.blocks, _PUT_BLOCKS):
            last = min(first + _PUT_BLOCKS, settings.blocks)
            names = [number.to_bytes(16, "big") for number in range(first, last)]
            tickets.append(
                runtime.put(names, pages[: last - first], durability=settings.durability)
            )
        failures = [words for ticket in tickets for words in ticket.wait().failures]
        elapsed_s = time.perf_counter() - start_s
        stats = runtime.stats()
    if failures:
        raise BenchError(f"{folder}: {len(failures)} blocks were not stored: {failures[0]}")
    payload = settings.blocks * settings.layers * settings.page_bytes
    return payload / elapsed_s, stats.store_writes.flushes, stats.bytes_written


def _fio(folder: Path, layout: Layout, settings: WriteSettings) -> float:
    """Bytes a second of sequential direct writes as large as an extent. Raises BenchError."""
    opened = open_store(folder, layout)
    extent_bytes = opened.superblock.extent_bytes
    path = opened.files[0].path
    opened.release()
    job = fio_job(
        "--name=write",
        f"--filename={path}",
        "--rw=write",
        f"--iodepth={_FIO_DEPTH}",
        f"--bs={extent_bytes}",
        f"--size={extent_bytes * settings.blocks}",
        "--end_fsync=1",
    )
    return float(job["write"]["bw_bytes"])
