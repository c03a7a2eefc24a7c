"""The table of a replay: which figures stand in it, how they are written, and its terminal form.

Decides columns and number formats, for the terminal and the report alike. Refuses to compute:
every figure is read from the result, and one that is not there is a dash.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefetchd.bench.findings import Note, best, labels, notes, order, verdict
from prefetchd.metrics import Bound, Result, Run

DASH = "-"
PIPED_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Column:
    """One figure a run: two lines of heading, what it means, and how it is written.

    `rank` is the order in which columns give way where there is no room; 0 stays always.
    """

    top: str
    bottom: str
    meaning: str
    cell: Callable[[Run], str]
    rank: int = 0
    bound: Callable[[Bound], str] = lambda _: DASH

    @property
    def heading(self) -> str:
        joined = self.top.endswith(("-", "/"))
        return f"{self.top.removesuffix('-')}{'' if joined else ' '}{self.bottom}"


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def figures(value: float | None) -> str:
    """About three digits, without an exponent: 0.04, 3.21, 87.4, 1,240."""
    if value is None:
        return DASH
    size = abs(value)
    return f"{value:,.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def share(value: float | None) -> str:
    """A share as a bare percentage: 0.31, 12.4, 100. The heading has the sign."""
    return DASH if value is None else figures(100 * value)


def size(count: int | None) -> str:
    """Bytes in the largest binary unit that leaves at least one: 64 KiB, 1.42 GiB."""
    if count is None:
        return DASH
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"


COLUMNS = (
    Column(
        "TPOT",
        "ms",
        "time per output token: mean step time of a round, median over rounds",
        lambda run: number(run.tpot_ms),
        bound=lambda bound: number(bound.tpot_ms),
    ),
    Column(
        "vs",
        "resident",
        "step time over that of resident, where all pages are in DRAM",
        lambda run: number(run.tpot_ratio),
        bound=lambda bound: number(bound.tpot_ratio),
    ),
    Column(
        "extra",
        "left %",
        "of the time that none loses against resident, the part that is still lost",
        lambda run: share(run.extra_share),
    ),
    Column(
        "hit",
        "%",
        "demanded pages that were there: retained or timely",
        lambda run: share(run.hit_rate),
        bound=lambda bound: share(bound.hit_rate),
    ),
    Column(
        "late",
        "%",
        "demanded pages whose read was still on its way",
        lambda run: share(run.late_rate),
        bound=lambda bound: share(bound.late_rate),
    ),
    Column(
        "miss",
        "%",
        "demanded pages that nobody had fetched, or that could not be read",
        lambda run: share(run.miss_rate),
        bound=lambda bound: share(bound.miss_rate),
    ),
    Column(
        "stalled",
        "%",
        "demands (one layer of one step) that had to wait at all",
        lambda run: share(run.stalled_share),
        bound=lambda bound: share(bound.stalled_share),
    ),
    Column(
        "latency",
        "us/page",
        "effective latency: mean time from demand until handed over, per page",
        lambda run: figures(run.effective_latency_us),
    ),
    Column(
        "reads/",
        "needed",
        "pages read from the device per page demanded",
        lambda run: number(run.prefetch.reads_per_needed),
        bound=lambda bound: number(bound.reads_per_needed),
        rank=1,
    ),
    Column(
        "accu-",
        "racy %",
        "prefetched pages that were demanded after they had arrived",
        lambda run: share(run.prefetch.accuracy),
        rank=2,
    ),
    Column(
        "decide",
        "p99 us",
        "time to decide what to fetch next, 99th percentile",
        lambda run: figures(run.decision_us.p99),
        rank=3,
    ),
)


def caption(result: Result) -> list[str]:
    """What was run, in four lines of words and figures with units."""
    device, settings = result.device, result.settings
    where = "" if device.file_system == "none" else f" on {device.file_system}"
    staging = settings.staging_slots * settings.page_bytes
    measured = settings.steps - settings.warmup_steps
    return [
        f"{result.regime} | {device.name}: {device.engine}{where} | {device.kind}",
        f"pages handed to GPU device {device.gpu.name}: {device.gpu.engine}",
        f"pages of {size(settings.page_bytes)} | staging {100 * settings.staging_share:g} %"
        f" ({size(staging)})"
        f" | top-{settings.top_k} | hints {'on' if settings.hints else 'off'}"
        f" | layer {settings.layer_us:,.0f} us | depth {settings.depth}",
        f"trace {settings.trace} | {settings.layers} layers | steps {settings.warmup_steps} to"
        f" {settings.steps - 1} ({measured}) | rounds {settings.rounds} (medians)"
        f" | evict {settings.evict}",
    ]


class ReplayTable:
    """The table as rich draws it; in a narrow terminal the last columns give way, and say so."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        left_out: list[str] = []
        table = self._table(COLUMNS)
        for column in sorted((c for c in COLUMNS if c.rank), key=lambda c: -c.rank):
            if table.__rich_measure__(console, console.options.update(width=500)).minimum <= (
                options.max_width
            ):
                break
            left_out.append(column.heading)
            table = self._table(tuple(c for c in COLUMNS if c.heading not in left_out))
        yield table
        if left_out:
            yield Text(f"Left out for want of width: {', '.join(left_out)}.", style="dim")

    def _table(self, columns: tuple[Column, ...]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("run", no_wrap=True, overflow="ellipsis", min_width=10, max_width=24)
        for column in columns:
            table.add_column(Text(f"{column.top}\n{column.bottom}"), justify="right", no_wrap=True)
        runs, winner = order(self.result), best(self.result)
        for position, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
            last_control = run.control and not all(other.control for other in runs)
            table.add_row(
                Text(label),
                *(column.cell(run) for column in columns),
                style="dim" if run.control else "bold" if run is winner else "",
                end_section=last_control and not runs[min(position + 1, len(runs) - 1)].control,
            )
        for run in self.result.clients:
            table.add_row(Text(run.name), *(column.cell(run) for column in columns), style="dim")
        for bound in self.result.bounds:
            cells = (column.bound(bound) for column in columns)
            table.add_row(Text(bound.name), *cells, style="dim italic")
        return table


def replay_table(result: Result) -> Group:
    """Caption, table, verdict and notes, for any console; good from 80 columns up."""
    parts: list[RenderableType] = [Text(line, style="dim") for line in caption(result)]
    parts += [Text(), ReplayTable(result), Text(), Text(verdict(result), style="bold")]
    parts += [_note(note) for note in notes(result)]
    return Group(*parts)


def _note(note: Note) -> Text:
    text = Text("* ")
    if note.word:
        text.append(f"{note.word}: ", style="bold yellow")
    return text.append(note.text)


def print_replay(result: Result, file: TextIO | None = None) -> None:
    """Print `replay_table`; into a pipe or a file 100 columns wide and without colour."""
    out = file or sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else PIPED_COLUMNS)
    console.print(replay_table(result))
