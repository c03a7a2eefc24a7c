"""The terminal table of a restore replay. Decides columns and number formats; computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefetchd.bench.findings import KINDS
from prefetchd.bench.restore_result import SIMULATED, RestoreResult, RestoreRun
from prefetchd.bench.tables import DASH, PIPED_COLUMNS, figures, share, size
from prefetchd.metrics import Bound

COLUMNS: tuple[tuple[str, Callable[[RestoreRun], str]], ...] = (
    ("lead\nms", lambda run: f"{run.lead_ms:g}"),
    ("at start\n%", lambda run: share(run.at_start_share)),
    ("staged\n%", lambda run: share(run.staged_share)),
    ("late\n%", lambda run: share(_part(run, run.outcomes.late))),
    ("miss\n%", lambda run: share(_part(run, run.outcomes.miss))),
    ("wasted\nreads %", lambda run: share(run.waste_share)),
    ("ready\np50 ms", lambda run: figures(run.time_to_ready_ms.p50)),
    ("ready\np99 ms", lambda run: figures(run.time_to_ready_ms.p99)),
    ("wait\np99 ms", lambda run: figures(run.demand_wait_ms.p99)),
    ("lateness\np99 ms", lambda run: figures(run.lateness_ms.p99)),
)


def _part(run: RestoreRun, count: int) -> float | None:
    return count / run.outcomes.total if run.outcomes.total else None


def columns(result: RestoreResult) -> tuple[tuple[str, Callable[[RestoreRun], str]], ...]:
    """Those that this result has: a virtual clock starts no request late."""
    if result.schema == SIMULATED:
        return tuple(one for one in COLUMNS if not one[0].startswith("lateness"))
    return COLUMNS


def bound_cells(result: RestoreResult, bound: Bound) -> list[str]:
    """A bound under the columns of this result."""
    told = {"staged\n%": share(bound.hit_rate), "miss\n%": share(bound.miss_rate)}
    return [told.get(heading, DASH) for heading, _ in columns(result)]


def notes(result: RestoreResult) -> list[str]:
    """What a reader must know, the kind of device first."""
    kind = result.device.kind
    said = [] if kind == "MEASURED" else [f"{kind}: {KINDS[kind]}"]
    said += [*result.device.notes, *result.notes, *_failures(result)]
    said += [f"{bound.name} is a bound, computed: {bound.meaning}" for bound in result.bounds]
    return said


def _pace(result: RestoreResult) -> str:
    """How fast the device and the requests are, and whose time is counted."""
    settings = result.settings
    takes = f"a request takes {settings.consume_blocks_s:g} blocks/s"
    limit = f"{settings.limit_blocks_s:g} blocks/s" if settings.limit_blocks_s else ""
    if result.schema == SIMULATED:
        limit = limit or f"as in the profile {result.device.name}"
        return f"device {limit}, {takes} | all times are the trace's, under a virtual clock"
    return (
        f"device {limit or 'not limited'}, {takes} | speed x {settings.speed:g}: leads and rates"
        " are the trace's, times are as measured"
    )


def caption(result: RestoreResult) -> list[str]:
    """What was run, in lines of words and figures with units."""
    device, settings = result.device, result.settings
    where = "" if result.schema == SIMULATED else f" on {device.file_system}"
    return [
        f"{result.regime} | {device.name}: {device.engine}{where} | {device.kind}",
        f"trace {settings.trace} | {settings.requests:,} requests | {settings.blocks:,} blocks of"
        f" {size(settings.block_bytes)} | staging {settings.staging_blocks:,} blocks"
        f" | hints {'on' if settings.hints else 'off'}",
        f"{_pace(result)} | rounds {settings.rounds} | evict {settings.evict}",
        settings.trace_how,
    ]


def print_restore(result: RestoreResult, file: TextIO | None = None) -> None:
    out = file or sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else PIPED_COLUMNS)
    for line in caption(result):
        console.print(Text(line, style="dim"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("run", no_wrap=True, max_width=24)
    for heading, _ in columns(result):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for run in [*result.runs, *result.clients]:
        style = "dim" if run.control or run in result.clients else ""
        table.add_row(Text(run.name), *(cell(run) for _, cell in columns(result)), style=style)
    for bound in result.bounds:
        table.add_row(Text(bound.name), *bound_cells(result, bound), style="dim italic")
    console.print(table)
    for note in notes(result):
        console.print(Text(f"* {note}"))


def _failures(result: RestoreResult) -> list[str]:
    return [
        f"FAILED: {run.name} at {run.lead_ms:g} ms: {count:,} {kind}"
        for run in result.runs
        for kind, count in run.failures.items()
    ]
