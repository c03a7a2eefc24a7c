"""A scorecard as one HTML file: for each trace tables with bars, plots, and what columns mean.

Decides what stands in it and in which order. The page around it, its look and its policy (nothing
is loaded from anywhere) are the replay report's. Whatever comes from outside is escaped.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from pathlib import Path

from prefetchd.bench.report import embed, save
from prefetchd.bench.report_figures import Figure
from prefetchd.bench.tables import DASH
from prefetchd.lab import score_figures as figures
from prefetchd.lab.score_result import Place, Row, Score, TraceFile, encode
from prefetchd.lab.score_table import (
    COLUMNS,
    Column,
    heading,
    meaning,
    regimes_of,
    rows_by_worth,
)

_SLACK_PX = 6, 22  # of a bucket of the little histogram, and of a full one


def write_score_page(score: Score, path: Path) -> None:
    """Raises ReportError."""
    drawn: list[Figure] = []
    body = [_header(score)]
    for number, trace in enumerate(score.traces):
        found = _figures(score, trace, number)
        drawn += found
        body.append(_trace_header(trace))
        body += _plots([figure for figure in found if figure.name.startswith("waited")])
        body += [_table(score, place) for place in score.places(trace.name)]
        body += _plots([figure for figure in found if not figure.name.startswith("waited")])
    body += [_words(score), _footer(score)]
    save(embed("prefetchd score", body, drawn), path)


def _figures(score: Score, trace: TraceFile, number: int) -> list[Figure]:
    conditions = figures.conditions(score.places(trace.name))
    found = [
        figures.waited(score, trace, 100 * number + position, condition)
        for position, condition in enumerate(conditions)
    ]
    found += [draw(score, trace, number) for draw in (figures.gaps, figures.costs)]
    found.append(figures.timeliness(score, trace, number))
    return [figure for figure in found if figure.data]


def _text(value: object) -> str:
    return html.escape(str(value))


def _header(score: Score) -> str:
    device = score.device
    said = "; ".join(_verdict(score, trace) for trace in score.traces)
    notes = [*device.notes, *score.notes]
    listed = "".join(f"<li>{_text(note)}</li>" for note in notes)
    return (
        '<header><p class="over">prefetchd score &middot; '
        f'<span class="badge {device.kind}">{device.kind}</span></p>'
        f"<h1>{_text(said[:1].upper() + said[1:])}.</h1>"
        f'<p class="what">{_text(device.name)}: {_text(device.engine)}. Every figure but the cost '
        "of deciding repeats exactly with the same seed.</p></header>"
        + (f'<section class="notes"><ul>{listed}</ul></section>' if listed else "")
    )


def _verdict(score: Score, trace: TraceFile) -> str:
    """Who is best at the least staging, and what that is worth."""
    place = score.places(trace.name)[0]
    rows = rows_by_worth(score.at(place)[0])
    best = next((row for row in rows if row.cell.kind == "predictor"), None)
    if best is None or best.gap_closed is None:
        return f"on {trace.name} there is no gap between none and oracle to close"
    return (
        f"on {trace.name} with {place.staging} staging {best.cell.name} closed "
        f"{100 * best.gap_closed:.0f} % of the gap between none and oracle"
    )


def _trace_header(trace: TraceFile) -> str:
    badge = '<span class="badge">SYNTHETIC</span>' if trace.synthetic else ""
    return f'<h2 class="part">{_text(trace.name)} <small>{_text(trace.regime)}</small> {badge}</h2>'


def _plots(drawn: list[Figure]) -> Iterator[str]:
    """Wide plots on their own, the others two to a row."""
    narrow = "".join(_plot(figure) for figure in drawn if not figure.wide)
    if narrow:
        yield f'<div class="pair">{narrow}</div>'
    for figure in drawn:
        if figure.wide:
            yield _plot(figure)


def _plot(figure: Figure) -> str:
    return (
        f'<section><h2>{_text(figure.title)}</h2><p class="reading">{_text(figure.reading)}</p>'
        f'<div class="plot" id="{figure.name}" role="img" aria-label="{_text(figure.title)}"></div>'
        "</section>"
    )


def _table(score: Score, place: Place) -> str:
    rows, bounds = score.at(place)
    heads = "".join(
        f'<th scope="col" title="{_text(meaning(c.word, [place.regime]))}">{_text(c.top)}<br>'
        f"{_text(c.bottom)}</th>"
        for c in COLUMNS
    )
    ordered = rows_by_worth(rows)
    best = next((row for row in ordered if row.cell.kind == "predictor"), None)
    styles = figures.colours(score)
    body = "".join(
        _row(row, styles[row.cell.name], "best" if row is best else "") for row in ordered
    )
    for bound in bounds.bounds:
        cells = "".join(f"<td>{_value(column.bound(bound))}</td>" for column in COLUMNS)
        body += (
            f'<tr class="control"><th scope="row" title="{_text(bound.meaning)}">'
            f"{_text(bound.name)}</th>{cells}</tr>"
        )
    return (
        f"<section><h2>{_text(heading(score, place).replace(' us', ' µs'))}</h2>"
        f'<div class="scroll"><table><thead><tr><th scope="col">run</th>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _row(row: Row, style: dict[str, str], kind: str) -> str:
    kind = kind or ("control" if row.cell.kind == "control" else "")
    line = "solid" if style["dash"] == "solid" else "dashed"
    key = (
        f'<span class="key" data-colour="{style["color"]}" style="border-top-style:{line}"></span>'
    )
    cells = "".join(f"<td>{_cell(row, column)}</td>" for column in COLUMNS)
    return f'<tr class="{kind}"><th scope="row">{key}{_text(row.cell.name)}</th>{cells}</tr>'


def _cell(row: Row, column: Column) -> str:
    if column.word == "timeliness":
        return _slack(row.timeliness)
    value = _value(column.cell(row))
    shares = {"gap": row.gap_closed, "hit": row.hit_rate, "cover": row.prefetch.coverage}
    shares["accuracy"] = row.prefetch.accuracy
    part = shares.get(column.word)
    if part is None:
        return value
    return (
        f'{value}<span class="bar"><i style="width:{100 * min(max(part, 0), 1):.1f}%"></i></span>'
    )


def _value(value: str) -> str:
    return "\N{EN DASH}" if value == DASH else _text(value)


def _slack(counts: list[int]) -> str:
    """A histogram the height of a line."""
    most = max(counts, default=0)
    if not most:
        return "\N{EN DASH}"
    width, height = _SLACK_PX
    bars = ""
    for place, count in enumerate(counts):
        tall = max(1.0, height * count / most)
        late = ' class="late"' if place < 5 else ""
        bars += (
            f'<rect{late} x="{place * width}" y="{height - tall:.1f}" width="{width - 1}" '
            f'height="{tall:.1f}"/>'
        )
    size = f'width="{width * len(counts)}" height="{height}"'
    return f'<svg class="slack" {size} role="img" aria-label="{_text(counts)}">{bars}</svg>'


def _words(score: Score) -> str:
    regimes = regimes_of(score)
    words = dict.fromkeys(column.word for column in COLUMNS)
    pairs = [(word, meaning(word, regimes)) for word in ["lead", *words]]
    pairs += {bound.name: bound.meaning for one in score.bounds for bound in one.bounds}.items()
    pairs += [
        ("resident", "a control with room for everything in DRAM"),
        ("none", "a control: plain LRU staging without prefetch"),
        ("oracle", "a control that knows the trace, with the same planner, staging and drive"),
    ]
    listed = "".join(f"<dt>{_text(word)}</dt><dd>{_text(words_)}</dd>" for word, words_ in pairs)
    return f'<section><h2>Words</h2><dl class="words">{listed}</dl></section>'


def _footer(score: Score) -> str:
    data = base64.b64encode(encode(score)).decode()
    return (
        f"<footer>Written by prefetchd; result format {_text(score.schema)}. "
        f'<a download="score.json" href="data:application/json;base64,{data}">Save the result as '
        "JSON</a>. This file loads nothing from anywhere.</footer>"
    )
