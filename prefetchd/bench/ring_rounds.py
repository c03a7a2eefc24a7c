"""Rounds of `prefetchd bench ring`: who reads when, and what the rounds say together.

Decides how rates are compared: interleaved rounds, the same idle gap before each run, ratios of
pairs, medians; and whether the drive was measured or a cache before it. Drives no device itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from prefetchd.bench.disk import cached_share, read_counter
from prefetchd.bench.findings import KINDS, ROUND_RANGE_MAX, percent
from prefetchd.bench.fio import run_fio
from prefetchd.bench.ring import Latency, Rate, Shape, best_turn, run_device
from prefetchd.device import File
from prefetchd.hostinfo import Medium

FIO = "fio"
_FIO_WORDS = "io_uring, fixed buffers, fixed files"


@dataclass(frozen=True, slots=True)
class Pace:
    """Rounds, seconds a run, idle seconds before each."""

    rounds: int
    seconds: float
    idle_s: float


class Row(msgspec.Struct, frozen=True):
    """Medians over rounds, of the latencies too. `ratio_to_fio` is the median of the ratios, round
    by round. `reaped`: how many completions were waited for at a time."""

    load: str
    block_bytes: int
    depth: int
    device: str
    engine: str
    reaped: int
    operations_s: float
    operations_s_rounds: list[float]
    gb_s: float
    latency_us: Latency
    cpu_us_per_operation: float
    ratio_to_fio: float | None


Rates = dict[tuple[Shape, str], list[Rate]]


def measure(
    file: File,
    medium: Medium,
    shapes: Sequence[Shape],
    engines: Sequence[str],
    pace: Pace,
    tell: Callable[[int], None],
) -> tuple[list[Row], str]:
    """All engines in turn; what each gave, and what kind of figures these are: MEASURED, RAM or
    CACHED. Raises BenchError, DeviceError."""
    rates: Rates = {}
    words = {(shape, FIO): _FIO_WORDS for shape in shapes}
    turns: dict[tuple[Shape, str], int] = {}
    asked_bytes = moved_bytes = 0
    for shape in shapes:
        for engine in engines:
            turns[shape, engine] = 1 if engine == FIO else best_turn(engine, file, shape)
        for number in range(pace.rounds):
            for engine in engines if number % 2 == 0 else reversed(engines):
                time.sleep(pace.idle_s)
                before = read_counter(medium)
                if engine == FIO:
                    rate = run_fio(Path(file.path), shape, pace.seconds)
                else:
                    rate, words[shape, engine] = run_device(
                        engine, file, shape, pace.seconds, turns[shape, engine]
                    )
                after = read_counter(medium)
                rates.setdefault((shape, engine), []).append(rate)
                asked_bytes += rate.operations * shape.block_bytes
                moved_bytes += (after or 0) - (before or 0)
                tell(1)
    kind = _kind(medium, asked_bytes, moved_bytes)
    pairs = [(shape, engine) for shape in shapes for engine in engines]
    return [_row(*pair, words[pair], turns[pair], rates) for pair in pairs], kind


def _kind(medium: Medium, asked_bytes: int, moved_bytes: int) -> str:
    if medium.is_ram:
        return "RAM"
    counted = None if read_counter(medium) is None else moved_bytes
    return "MEASURED" if cached_share(asked_bytes, counted) is None else "CACHED"


def _row(shape: Shape, engine: str, engine_words: str, turn: int, rates: Rates) -> Row:
    mine = rates[shape, engine]
    fio = rates.get((shape, FIO))
    ratio = None
    if fio and engine != FIO:
        pairs = zip(mine, fio, strict=True)
        ratio = statistics.median(one.operations_s / other.operations_s for one, other in pairs)
    rounds = [r.operations_s for r in mine]
    rate = statistics.median(rounds)
    latencies = [r.latency_us for r in mine]
    return Row(
        load=shape.words,
        block_bytes=shape.block_bytes,
        depth=shape.depth,
        device=engine,
        engine=engine_words,
        reaped=turn,
        operations_s=rate,
        operations_s_rounds=rounds,
        gb_s=rate * shape.block_bytes / 1e9,
        latency_us=Latency(
            p50=_middle(one.p50 for one in latencies),
            p99=_middle(one.p99 for one in latencies),
            p999=_middle(one.p999 for one in latencies),
        ),
        cpu_us_per_operation=statistics.median(r.cpu_us_per_operation for r in mine),
        ratio_to_fio=ratio,
    )


def _middle(values: Iterable[float | None]) -> float | None:
    """Of all rounds or of none: rounds with few reads are not to be left out."""
    known = [*values]
    return None if None in known else statistics.median(v for v in known if v is not None)


def notes(rows: Sequence[Row], kind: str) -> Iterator[str]:
    """What a reader must know: what was measured, and which rows differ too much."""
    if kind != "MEASURED":
        yield f"{kind}: {KINDS[kind]}"
    if len(rows[0].operations_s_rounds) == 1:
        yield "one round only: nothing says how much a second would differ"
    for row in rows:
        spread = max(row.operations_s_rounds) - min(row.operations_s_rounds)
        if spread > ROUND_RANGE_MAX * row.operations_s:
            yield (
                f"UNSTEADY: {row.load} {row.device}: its rounds differ by "
                f"{percent(spread / row.operations_s)} of their median"
            )


def ring_table(rows: Sequence[Row], title: str) -> Table:
    """For a terminal of 80 columns."""
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    table.pad_edge = False
    for name in ("load", "device"):
        table.add_column(name, no_wrap=True)
    for name in ("IOPS", "GB/s", "p50 us", "p99 us", "p99.9 us", "CPU us/op", "to fio"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = (row.latency_us.p50, row.latency_us.p99, row.latency_us.p999)
        table.add_row(
            row.load,
            row.device,
            f"{row.operations_s:,.0f}",
            f"{row.gb_s:.2f}",
            *("-" if us is None else f"{us:,.0f}" for us in times),
            f"{row.cpu_us_per_operation:.1f}",
            "-" if row.ratio_to_fio is None else f"{row.ratio_to_fio:.2f}",
        )
    return table
