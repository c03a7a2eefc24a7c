"""A day of coding-agent sessions in accelerated time: cap and TTL are kept, nothing leaks.

`python -m tests.day_campaign --trace coding_agent_sessions.jsonl.gz` lays the recorded sessions out
over 24 hours (see `day_trace`), runs their requests (see `day_requests`) against one runtime on a
real folder as fast as it goes, on a wall clock that the trace moves, and looks at the books all the
while (see `day_books`). At the end it closes the store and compares what it holds when opened
again, by its journal and by its headers. It exits with 1, in words, if anything did not hold.

The lease of a looked-up block and the bound on unflushed blocks are on the engine's own clock,
which stays the real one: the lease is short, as a minute of the trace passes in well under a
second.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.progress import Progress

import prefetchd
from prefetchd import Options, Runtime, Stats, uniform
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.lab.trace_format import TraceError
from prefetchd.model import Ids
from tests.day_books import (
    CapWatch,
    Footprint,
    Violation,
    check_books,
    check_growth,
    check_quiet,
    footprint,
    must,
)
from tests.day_requests import Tally, Traffic
from tests.day_trace import HOUR_NS, lay_out

PAGE_BYTES = 4096
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """`blocks`: extents of the store, more than fit under `cap_bytes`. `staging`: slots."""

    hours: float = 24.0
    blocks: int = 4096
    cap_bytes: int = 14_000_000
    staging: int = 1024
    batch: int = 32
    ttl_s: float = 1800.0
    check_every: int = 250  # requests
    device: str = "uring"
    predictor: str = "auto"

    def options(self, *, scan: bool = False) -> Options:
        return Options(
            device=self.device,
            predictor=self.predictor,
            staging_bytes=self.staging * PAGE_BYTES,
            cap_bytes=self.cap_bytes,
            ttl_s=self.ttl_s,
            lease_s=0.1,
            scan=scan,
        )

    def open(self, folder: Path | None, *, scan: bool = False) -> Runtime:
        layout, options = uniform(1, PAGE_BYTES), self.options(scan=scan)
        return prefetchd.open(folder, layout, blocks=self.blocks, fill=False, options=options)


@dataclass(slots=True)
class Outcome:
    setup: Setup
    day: Requests
    tally: Tally
    stats: Stats
    prints: list[Footprint]  # at the end of each quarter
    peak_bytes: int
    checks: int
    kept: int = -1  # blocks found again after closing; -1: there is nothing to open again
    seconds: float = 0.0


@dataclass(slots=True)
class _Inspector:
    """Looks at the books every so many requests, and at the memory at the end of each quarter."""

    runtime: Runtime
    traffic: Traffic
    setup: Setup
    progress: Callable[[float], object]
    prints: list[Footprint] = field(default_factory=list)
    checks: int = 0

    def moved(self, at_ns: int) -> None:
        self.progress(at_ns / HOUR_NS)
        if at_ns >= (len(self.prints) + 1) * self.setup.hours * HOUR_NS / QUARTERS:
            self.weigh()
        if self.traffic.tally.requests >= (self.checks + 1) * self.setup.check_every:
            self.checks += 1
            check_books(self.runtime)
            if self.checks % 2:  # else pins and puts are left as they are
                self.traffic.calm()
                check_quiet(self.runtime)

    def weigh(self) -> None:
        self.traffic.calm()
        check_quiet(self.runtime)
        check_books(self.runtime)
        self.prints.append(footprint(self.runtime))


def campaign(
    folder: Path | None,
    day: Requests,
    setup: Setup,
    progress: Callable[[float], object] = lambda hours: None,
) -> Outcome:
    """Run one day. Without a folder all is in memory, and nothing is compared after the end.

    What was weighed on the way is left to `check_growth`. Raises Violation.
    """
    started = time.monotonic()
    with setup.open(folder) as runtime:
        sizes = _file_sizes(runtime)
        watch = CapWatch(runtime, setup.cap_bytes)
        traffic = Traffic(runtime, day, setup.ttl_s, setup.batch)
        inspector = _Inspector(runtime, traffic, setup, progress)
        traffic.run(inspector.moved)
        while len(inspector.prints) < QUARTERS:
            inspector.weigh()
        must(_file_sizes(runtime) == sizes, f"files of {sizes} bytes: {_file_sizes(runtime)}")
        stats = runtime.stats()
        check_stats(stats)
        left = _held(runtime, traffic)
    prints = inspector.prints
    outcome = Outcome(setup, day, traffic.tally, stats, prints, watch.peak_bytes, inspector.checks)
    if folder is not None:
        for scan in (False, True):
            with setup.open(folder, scan=scan) as runtime:
                check_reopened(runtime, traffic, left)
        outcome.kept = len(left)
    outcome.seconds = time.monotonic() - started
    return outcome


def _file_sizes(runtime: Runtime) -> list[int]:
    files = [Path(file.path) for file in runtime._parts.store.files]
    return [path.stat().st_size for path in files if path.exists()]


def check_stats(stats: Stats) -> None:
    """Raises Violation."""
    wrong = {
        "failures": sum(stats.failures.values()),
        "failed reads": stats.failed,
        "demands without an answer in time": stats.expired,
        "abandoned reads": stats.abandoned,
        "writes given up": stats.writes_given_up,
        "rotten blocks": stats.store_writes.blocks_rotten,
        "blocks refused": stats.store_writes.blocks_refused,
    }
    bad = {what: count for what, count in wrong.items() if count}
    must(not bad and not stats.store_writes.stopped, f"{bad} {stats.store_writes.stopped}")


def _held(runtime: Runtime, traffic: Traffic) -> Ids:
    """The numbers of the blocks that are found now; looked at without renewing anything."""
    with runtime.engine.lock:
        find = runtime._parts.catalog.find
        return np.flatnonzero([find(name.tobytes()) >= 0 for name in traffic.names])


def check_reopened(runtime: Runtime, traffic: Traffic, left: Ids) -> None:
    """The same blocks as before closing, with their bytes, and no others. Raises Violation."""
    runtime.room.wall_ns = lambda: traffic.now_ns
    found = _held(runtime, traffic)
    how = "by its headers" if runtime.options.scan else "by its journal"
    lost, more = np.setdiff1d(left, found), np.setdiff1d(found, left)
    must(not len(lost) and not len(more), f"{how}: {len(lost)} blocks lost, {len(more)} too many")
    must(runtime.stats().store_writes.blocks_used == len(left), f"{how}: extents are taken twice")
    for number in left.tolist():
        blocks = runtime.lookup(traffic.names[number : number + 1])
        must(len(blocks) == 1, f"{how}: block {number} is not found")
        with runtime.demand(runtime.pages(blocks, 0)) as ticket:
            must(not ticket.missing.any(), f"{how}: block {number} does not verify")
            traffic.check_bytes(ticket.view(0)[None].copy(), np.array([number]))
    check_books_of_reopened(runtime, len(left))


def check_books_of_reopened(runtime: Runtime, blocks: int) -> None:
    catalog = runtime._parts.catalog
    with runtime.engine.lock:
        runtime._parts.core.staging.check()
        must(len(catalog.free) + blocks == catalog.superblock.blocks, "free extents are lost")


def summary(outcome: Outcome) -> str:
    tally, stats, writes = outcome.tally, outcome.stats, outcome.stats.store_writes
    reusable = int(outcome.day.reusable().sum())
    mib = 1 / (1 << 20)
    rss = ", ".join(f"{one.rss * mib:.1f}" for one in outcome.prints)
    held = ", ".join(f"{sum(one.held.values()) * mib:.3f}" for one in outcome.prints)
    last = outcome.prints[-1]
    sessions = len(np.unique(outcome.day.session))
    per_reused = writes.written_per_reused or 0.0
    lines = [
        f"{outcome.setup.hours:g} h in {outcome.seconds:.0f} s ({stats.engine}, {stats.predictor})",
        f"laid out: {outcome.day.how}",
        f"requests {tally.requests:,} of {sessions} sessions, {tally.hinted:,} hinted "
        f"({stats.hints_dropped:,} hints dropped), up to {tally.open_most} demands open at once",
        f"blocks put {tally.put:,}, evicted {writes.blocks_evicted:,}, expired "
        f"{writes.blocks_expired:,}, refused {writes.blocks_refused:,}, found at the end "
        f"{stats.blocks_visible:,}; put though known {tally.puts_known:,}",
        f"hit share {tally.found / tally.wanted:.3f} of {tally.wanted:,} blocks wanted "
        f"({reusable / tally.wanted:.3f} if nothing were ever lost)",
        f"demanded {tally.demanded:,}, every byte compared of {tally.verified:,}, gone between "
        f"lookup and demand {tally.gone:,}; leases cut {writes.leases_cut:,}",
        f"bytes written per byte reused {per_reused:.3f}, {writes.flushes:,} flushes",
        f"cap {outcome.setup.cap_bytes:,} bytes, most used {outcome.peak_bytes:,}",
        f"RSS at 25/50/75/100 %: {rss} MiB; reachable from the runtime: {held} MiB",
        f"{last.threads} threads, {last.descriptors} open files; books looked at "
        f"{outcome.checks + QUARTERS} times",
    ]
    if outcome.kept >= 0:
        lines.append(f"opened again by journal and by headers: {outcome.kept:,} blocks, the same")
    return "\n".join(lines)


def _asked() -> argparse.Namespace:
    usual = Setup()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="recorded sessions")
    parser.add_argument("--hours", type=float, default=usual.hours)
    parser.add_argument("--gap-s", type=float, default=240.0, help="between starts of sessions")
    parser.add_argument("--sample", type=int, default=16, help="one block in so many is kept")
    parser.add_argument("--folder", type=Path, help="on the drive to use")
    parser.add_argument("--device", default=usual.device)
    parser.add_argument("--predictor", default=usual.predictor)
    parser.add_argument("--cap-bytes", type=int, default=usual.cap_bytes)
    return parser.parse_args()


def main() -> None:
    asked = _asked()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    setup = Setup(
        hours=asked.hours,
        cap_bytes=asked.cap_bytes,
        device=asked.device,
        predictor=asked.predictor,
    )
    try:
        day = lay_out(read_requests(asked.trace), asked.hours, asked.gap_s, asked.sample)
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder, Progress() as bar:
            task = bar.add_task("hours of the day", total=asked.hours)
            show = lambda hours: bar.update(task, completed=hours)  # noqa: E731
            outcome = campaign(Path(folder) / "kv", day, setup, show)
        print(summary(outcome))
        check_growth(outcome.prints[0], outcome.prints[-1])
    except TraceError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except Violation as violation:
        print(f"violated: {violation}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
