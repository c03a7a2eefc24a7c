"""`prefetchd bench write`: what a prefill's puts give on a drive, beside fio on the same file.

Decides how the two are compared: interleaved rounds, the same idle gap before each, whole passes
over the same file, ratios of pairs, medians. A pass of ours is a real store's: copied, checksummed,
flushed, with its headers and journal.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from prefetchd import store_making
from prefetchd.bench.fio import file_option, fio_job
from prefetchd.bench.ring import BenchError
from prefetchd.hostinfo import Medium, medium_of
from prefetchd.layout import Layout, uniform
from prefetchd.opening import open_runtime
from prefetchd.options import Options
from prefetchd.stats import Stats
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

    @property
    def payload_bytes(self) -> int:
        return self.blocks * self.layers * self.page_bytes


@dataclass(frozen=True, slots=True)
class WriteRates:
    """Bytes a second of payload, one a round; `fio` empty if it was not asked for."""

    ours: list[float]
    fio: list[float]
    flushes: int
    bytes_written: int
    file_system: str
    kind: str
    engine: str

    def told(self, settings: WriteSettings) -> dict[str, object]:
        """For machines."""
        return {
            "schema": "prefetchd.bench.write/2",
            "file_system": self.file_system,
            "kind": self.kind,
            "engine": self.engine,
            "settings": asdict(settings),
            "payload_gb_s": statistics.median(self.ours) / 1e9,
            "payload_gb_s_rounds": [rate / 1e9 for rate in self.ours],
            "fio_gb_s": statistics.median(self.fio) / 1e9 if self.fio else None,
            "fio_gb_s_rounds": [rate / 1e9 for rate in self.fio],
            "ratio_to_fio": self.ratio,
            "flushes": self.flushes,
            "bytes_written": self.bytes_written,
            "payload_bytes": settings.payload_bytes,
        }

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
    ours: list[float] = []
    fios: list[float] = []
    stats: Stats | None = None
    medium: Medium | None = None
    try:
        for number in range(settings.rounds):
            engines = ["ours", "fio"] if fio else ["ours"]
            for engine in engines if number % 2 == 0 else reversed(engines):
                shutil.rmtree(folder, ignore_errors=True)
                store_making.create(folder, layout, settings.blocks, fill=True)
                medium = medium or _medium(folder)
                time.sleep(settings.idle_s)
                if engine == "ours":
                    rate, stats = _puts(folder, layout, settings)
                    ours.append(rate)
                else:
                    fios.append(_fio(folder, layout, settings))
                tell()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert medium is not None  # there is at least one round
    assert stats is not None
    kind = "RAM" if medium.is_ram else "MEASURED"
    flushes, engine = stats.store_writes.flushes, "; ".join([stats.engine, *stats.notes])
    written = stats.bytes_written
    return WriteRates(ours, fios, flushes, written, medium.file_system, kind, engine)


def _medium(folder: Path) -> Medium:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return medium_of(fd, str(folder))
    finally:
        os.close(fd)


def _puts(folder: Path, layout: Layout, settings: WriteSettings) -> tuple[float, Stats]:
    """One pass: payload bytes a second, and what the store says of it."""
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
    return settings.payload_bytes / elapsed_s, stats


def _fio(folder: Path, layout: Layout, settings: WriteSettings) -> float:
    """Bytes a second of sequential direct writes as large as an extent. Raises BenchError."""
    opened = open_store(folder, layout)
    extent_bytes = opened.superblock.extent_bytes
    path = opened.files[0].path
    opened.release()
    job = fio_job(
        "--name=write",
        file_option(Path(path)),
        "--rw=write",
        f"--iodepth={_FIO_DEPTH}",
        f"--bs={extent_bytes}",
        f"--size={extent_bytes * settings.blocks}",
        "--end_fsync=1",
    )
    return float(job["write"]["bw_bytes"])


def write_table(rates: WriteRates, settings: WriteSettings, folder: str) -> Table:
    """For a terminal of 80 columns."""
    shape = f"{settings.blocks} blocks of {settings.layers} x {settings.page_bytes:,} bytes"
    where = f"{folder} on {rates.file_system} ({rates.kind})"
    table = Table(title=Text(f"{where}\n{shape}, {settings.durability}"), title_justify="left")
    table.box = box.SIMPLE_HEAD
    table.add_column("device")
    for name in ("GB/s", "of rounds", "to fio", "flushes", "written/payload"):
        table.add_column(name, justify="right")
    ratio = "-" if rates.ratio is None else f"{rates.ratio:.2f}"
    written = f"{rates.bytes_written / settings.payload_bytes:.2f}"
    table.add_row(settings.device, *_summed(rates.ours), ratio, str(rates.flushes), written)
    if rates.fio:
        table.add_row("fio", *_summed(rates.fio), "-", "1", "1.00")
    return table


def _summed(rates: list[float]) -> tuple[str, str]:
    """The median, and the range that it is from."""
    low, high = min(rates) / 1e9, max(rates) / 1e9
    return f"{statistics.median(rates) / 1e9:.2f}", f"{low:.2f} to {high:.2f}"
