"""The terminal table of a scorecard: columns, number formats, legend. Computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefetchd import metrics
from prefetchd.bench.tables import DASH, figures, number, share
from prefetchd.lab.score_result import COMMON, LEGEND, Place, Regime, Row, Score

PIPED_COLUMNS = 124
_BARS = "\N{MIDDLE DOT}▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Column:
    """`word` is the legend's for what the column means. `rank`: the order in which columns give way
    where there is no room, the highest first; 0 stays."""

    top: str
    bottom: str
    word: str
    cell: Callable[[Row], str]
    bound: Callable[[metrics.Bound], str] = lambda _: DASH
    rank: int = 0


def histogram(counts: list[int]) -> str:
    """One character a bucket: a dot for none, else as high as the bucket is full."""
    most = max(counts, default=0)
    if not most:
        return DASH
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)


COLUMNS = (
    Column(
        "time", "ms", "time", lambda row: figures(row.time_ms), lambda one: figures(one.tpot_ms)
    ),
    Column("gap", "closed %", "gap", lambda row: share(row.gap_closed)),
    Column("hit", "%", "hit", lambda one: share(one.hit_rate), lambda one: share(one.hit_rate)),
    Column("late", "%", "late", lambda row: share(row.late_rate), lambda one: share(one.late_rate)),
    Column("miss", "%", "miss", lambda row: share(row.miss_rate), lambda one: share(one.miss_rate)),
    Column(
        "stalled",
        "%",
        "stalled",
        lambda row: share(row.stalled_share),
        lambda one: share(one.stalled_share),
        rank=8,
    ),
    Column("cover", "%", "cover", lambda row: share(row.prefetch.coverage), rank=5),
    Column("accu-", "racy %", "accuracy", lambda row: share(row.prefetch.accuracy), rank=3),
    Column(
        "timeliness", "late | early", "timeliness", lambda row: histogram(row.timeliness), rank=1
    ),
    Column("pollu-", "tion", "pollution", lambda row: f"{row.prefetch.pollution:,}", rank=6),
    Column(
        "wasted", "MiB", "wasted", lambda row: figures(row.prefetch.wasted_bytes / 2**20), rank=7
    ),
    Column(
        "reads/",
        "needed",
        "reads",
        lambda row: number(row.prefetch.reads_per_needed),
        lambda one: number(one.reads_per_needed),
        rank=2,
    ),
    Column("decide", "us/page", "decide", lambda row: figures(row.cost.us_per_page), rank=4),
)


def heading(score: Score, place: Place) -> str:
    """Under which conditions the rows below it were simulated."""
    _, bounds = score.at(place)
    of = "pages" if place.regime == "decode" else "blocks"
    return f"staging {place.staging} ({bounds.staging_slots:,} {of}) | {place.condition}"


def rows_by_worth(rows: list[Row]) -> list[Row]:
    """Controls as they are, then predictors, the fastest first; ties by name."""
    controls = [row for row in rows if row.cell.kind == "control"]
    predictors = [row for row in rows if row.cell.kind == "predictor"]
    return [*controls, *sorted(predictors, key=lambda row: (row.time_ms, row.cell.name))]


def slack_words(edges_ms: tuple[float, ...]) -> list[str]:
    """Each bucket of the histogram in words."""
    told = [_milliseconds(edge) for edge in edges_ms]
    between = [f"{low} to {high}" for low, high in pairwise(told)]
    return [f"under {told[0]}", *between, f"{told[-1]} or more"]


def _milliseconds(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value / 1000:+g} s"
    return f"{value:+g} ms" if abs(value) >= 1 else f"{1000 * value:+g} us"


def meaning(word: str, regimes: list[Regime]) -> str:
    """What a column is, where need be for each regime."""
    if word in COMMON:
        return COMMON[word]
    told = [LEGEND[regime][word] for regime in regimes]
    if len(told) == 1:
        return told[0]
    return "; ".join(f"{regime}: {words}" for regime, words in zip(regimes, told, strict=True))


def regimes_of(score: Score) -> list[Regime]:
    return sorted({trace.regime for trace in score.traces})


def score_table(score: Score) -> Group:
    device = score.device
    parts: list[RenderableType] = [
        Text(f"score | {device.name}: {device.engine} | {device.kind}", style="dim")
    ]
    for trace in score.traces:
        parts += [Text(), Text(f"{trace.regime} | {trace.name}", style="bold")]
        if trace.synthetic:
            parts.append(Text("SYNTHETIC: generated, not recorded", style="bold yellow"))
        for place in score.places(trace.name):
            parts += [Text(), Text(heading(score, place), style="dim"), PlaceTable(score, place)]
    parts += [Text(), *_legend(score)]
    parts += [Text(f"* {note}") for note in [*device.notes, *score.notes]]
    return Group(*parts)


class PlaceTable:
    """The rows and bounds of one place; in a narrow terminal some columns give way, and say so."""

    def __init__(self, score: Score, place: Place) -> None:
        self.rows, self.bounds = score.at(place)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        shown = list(COLUMNS)
        unbound = console.options.update(width=500)
        while (
            self._table(shown).__rich_measure__(console, unbound).minimum > options.max_width
            and max(column.rank for column in shown) > 0
        ):
            shown.remove(max(shown, key=lambda column: column.rank))
        yield self._table(shown)
        if left_out := [column.word for column in COLUMNS if column not in shown]:
            yield Text(f"Left out for want of width: {', '.join(left_out)}.", style="dim")

    def _table(self, columns: list[Column]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("run", no_wrap=True, overflow="ellipsis", min_width=9, max_width=20)
        for column in columns:
            table.add_column(Text(f"{column.top}\n{column.bottom}"), justify="right", no_wrap=True)
        ordered = rows_by_worth(self.rows)
        best = next((row for row in ordered if row.cell.kind == "predictor"), None)
        for row in ordered:
            style = "dim" if row.cell.kind == "control" else "bold" if row is best else ""
            table.add_row(Text(row.cell.name), *(one.cell(row) for one in columns), style=style)
        for bound in self.bounds.bounds:
            cells = (one.bound(bound) for one in columns)
            table.add_row(Text(bound.name), *cells, style="dim italic")
        return table


def _legend(score: Score) -> Iterator[Text]:
    regimes = regimes_of(score)
    for word in dict.fromkeys(column.word for column in COLUMNS):
        yield Text.assemble((f"{word}: ", "bold"), meaning(word, regimes), style="dim")
    words = slack_words(score.edges_ms)
    yield Text(f"timeliness, from left: {', '.join(words)}", style="dim")
    meanings = {bound.name: bound.meaning for one in score.bounds for bound in one.bounds}
    for name, words_of in meanings.items():
        yield Text(f"{name}: {words_of}", style="dim")


def print_score(score: Score, file: TextIO | None = None) -> None:
    """Print the table; into a pipe or a file 124 columns wide and without colour."""
    out = file or sys.stdout
    console = Console(file=out, highlight=False, width=None if out.isatty() else PIPED_COLUMNS)
    console.print(score_table(score))
