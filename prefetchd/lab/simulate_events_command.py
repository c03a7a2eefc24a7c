"""`prefetchd simulate events`: a daemon's log of events, given to a core that is built anew.

Decides what is shown of it. The core must give the very commands of the log: then whatever is found
out about it here is true of what ran there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from prefetchd.assembly import build_core
from prefetchd.bench.output import progress_bars
from prefetchd.bench.replay import Report
from prefetchd.lab.event_log import Entry, Header, count_entries, read_log, replay
from prefetchd.model import Demanded, Geometry, Outcome, Used
from prefetchd.options import Options


class Replayed(msgspec.Struct, frozen=True):
    """`events` were given to a core as `header` says, and all its commands were those of the log.
    Pages: `outcomes` of those demanded, `prefetch` as in `Stats`."""

    header: Header
    events: int
    demands: int
    span_s: float
    outcomes: dict[str, int]
    prefetch: dict[str, int]


class _Seen:
    """What passes by."""

    def __init__(self) -> None:
        self.demands = self.first_ns = self.last_ns = 0

    def watched(self, entries: Iterator[Entry], report: Report) -> Iterator[Entry]:
        for now_ns, event, commands in entries:
            self.first_ns = self.first_ns or now_ns
            self.last_ns = now_ns
            self.demands += (
                len(event.counts) if isinstance(event, Used) else isinstance(event, Demanded)
            )
            yield now_ns, event, commands
            report.steps(1)


def simulate_events(path: Path, console: Console) -> Replayed:
    """Raises EventLogError, OSError."""
    header, entries = read_log(path)
    options = Options(predictor=header.predictor, evict=header.evict)
    core, _ = build_core(Geometry(header.layers, header.blocks), header.slots, options)
    seen = _Seen()
    with progress_bars(console) as bar:
        events = replay(core, seen.watched(entries, bar("replaying", count_entries(path))))
    outcomes = {one.name.lower(): int(core.counters.outcomes[one]) for one in Outcome}
    return Replayed(
        header,
        events,
        seen.demands,
        (seen.last_ns - seen.first_ns) / 1e9,
        outcomes,
        core.counters.prefetches(),
    )


def events(
    log: Annotated[Path, typer.Argument(help="A log that `serve --event-log` has written.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a daemon's log of events and check that every command comes out as it did there."""
    result = simulate_events(log, Console(stderr=True))
    if json:
        typer.echo(msgspec.json.encode(result).decode())
        return
    shown = Table(box=None, show_header=False)
    header = result.header
    shown.add_row("core", f"{header.predictor}, {header.evict}, {header.slots} slots")
    shown.add_row("events", f"{result.events} in {result.span_s:.1f} s, every command the same")
    shown.add_row("demands", f"{result.demands}")
    shown.add_row("demanded pages", _counts(result.outcomes))
    shown.add_row("prefetched pages", _counts(result.prefetch))
    Console(highlight=False).print(shown)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
