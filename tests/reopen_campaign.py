"""How long a large store takes to open: from its journal, and from all headers after a crash.

`python -m tests.reopen_campaign --folder DIR` makes a store of 1,048,576 pages on DIR's drive, all
of whose blocks are stored as far as journal and headers say (payloads are left unwritten, which no
opening reads), and opens it some times each way. Medians are printed; the first opening is in none.
Staging is small: what a large buffer takes to be mapped and registered has nothing to do with the
store.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import prefetchd
from prefetchd import Options, Runtime, uniform
from prefetchd.records import PUBLISH
from prefetchd.restating import flush, write_headers, write_journal
from tests.memory_campaign import BLOCKS, LAYERS, PAGE_BYTES, fill

PORTION = 1024
OPTIONS = Options(staging_bytes=64 << 20)


@dataclass(frozen=True, slots=True)
class Reopened:
    blocks_found: int
    journal_s: float
    scan_s: float
    header_bytes: int
    """Read by an opening after a crash."""


def make(folder: Path, blocks: int, layers: int) -> None:
    layout = uniform(layers, PAGE_BYTES)
    runtime = prefetchd.open(folder, layout, blocks=blocks, fill=False, options=OPTIONS)
    fill(runtime)
    runtime.engine.stop()  # from here on the device is ours
    parts = runtime._parts
    catalog, journal = parts.catalog, parts.driver.writer.commit.journal
    records = catalog.say(np.arange(blocks), PUBLISH)
    for first in range(0, blocks, PORTION):  # each has the time limit of one transfer
        some = records[first : first + PORTION]
        assert not write_headers(parts.device, parts.scratch, catalog.superblock, some).any()
    assert flush(parts.device, parts.scratch, 0)
    assert write_journal(parts.device, parts.scratch, journal, records)
    parts.close(clean=True)


def opened(folder: Path) -> tuple[Runtime, float]:
    started_ns = time.monotonic_ns()
    runtime = prefetchd.open(folder, options=OPTIONS)
    return runtime, (time.monotonic_ns() - started_ns) / 1e9


def crash(runtime: Runtime) -> None:
    """As a killed process would: nothing marks the store clean."""
    runtime.engine.stop()
    runtime._parts.close(clean=False)


def reopen(folder: Path, blocks: int, layers: int, rounds: int) -> Reopened:
    make(folder, blocks, layers)
    by_journal: list[float] = []
    by_headers: list[float] = []
    for _ in range(rounds + 1):
        runtime, took_s = opened(folder)
        by_journal.append(took_s)
        crash(runtime)
        runtime, took_s = opened(folder)
        by_headers.append(took_s)
        found, shape = runtime.stats().blocks_visible, runtime._parts.catalog.superblock
        runtime.close()
    return Reopened(
        found,
        statistics.median(by_journal[1:]),
        statistics.median(by_headers[1:]),
        blocks * shape.header_bytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        found = reopen(Path(folder) / "kv", asked.blocks, asked.layers, asked.rounds)
    print(f"{asked.blocks * asked.layers:,} pages in {found.blocks_found:,} blocks")
    print(f"{found.journal_s:8.3f} s  from the journal, after a clean close")
    rate = found.header_bytes / found.scan_s / 1e6
    print(f"{found.scan_s:8.3f} s  from all headers, after a crash ({rate:,.0f} MB/s of headers)")


if __name__ == "__main__":
    main()
