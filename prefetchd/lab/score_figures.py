"""The plots of a scoreboard: what waited against staging, timeliness, gap closed, cost of deciding.

Decides what is drawn, with which axes and units. Computes no figures and knows no colours.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from prefetchd.bench.report_figures import DASHES, PREDICTOR_COLOURS, Figure, Trace, axis
from prefetchd.lab.score_result import Place, Row, Score, TraceFile
from prefetchd.lab.score_table import slack_words

Condition = tuple[float, bool]
"""Lead in ms and hints: what differs between the lines of one run in a plot."""
_BAR_PX = 30
_PERCENTS = [digit * 10.0**power for power in range(-4, 2) for digit in (1, 2, 5)] + [100.0]
_STAGINGS = ("@cold", "@none", "@muted", "@resident", "@ink")


def colours(score: Score) -> dict[str, Trace]:
    """By name of run: its colour and dash, the same in each plot."""
    found: dict[str, Trace] = {}
    for row in score.rows:
        name = row.cell.name
        if name in found:
            continue
        if row.cell.kind == "control":
            found[name] = {"color": f"@{name}", "dash": DASHES[name]}
        else:
            number = sum(1 for line in found.values() if line["color"].startswith("@run"))
            dash = "solid" if number < PREDICTOR_COLOURS else "longdash"
            found[name] = {"color": f"@run{number % PREDICTOR_COLOURS}", "dash": dash}
    return found


def conditions(places: Sequence[Place]) -> list[Condition]:
    return list(dict.fromkeys((place.lead_ms, place.hints) for place in places))


def waited(score: Score, trace: TraceFile, number: int, condition: Condition) -> Figure:
    """Late and missing against staging, a line a run."""
    places = [p for p in score.places(trace.name) if (p.lead_ms, p.hints) == condition]
    places.sort(key=lambda place: score.at(place)[1].staging_slots)
    names = list(dict.fromkeys(row.cell.name for row in score.at(places[0])[0]))
    styles = colours(score)
    ticks = [f"{place.staging}<br>{score.at(place)[1].staging_slots:,}" for place in places]
    data = [_waited_line(score, places, ticks, name, styles[name]) for name in names]
    data += _bound_lines(score, places, ticks)
    return Figure(
        f"waited-{number}",
        f"Late and missing against staging: {places[0].condition}",
        "Lower is better; logarithmic, so where nothing was late or missing nothing is drawn. Grey "
        "and dashed: the controls; dotted: what nothing can beat, Belady without prefetch and a "
        "clairvoyant with it.",
        data,
        {
            "height": 360,
            "xaxis": axis("staging, and how many pages or blocks that is", type="category"),
            "yaxis": axis(
                "late and missing (%)",
                type="log",
                tickvals=_PERCENTS,
                ticktext=[f"{value:g}" for value in _PERCENTS],
            ),
        },
        wide=True,
    )


def _waited_line(
    score: Score, places: list[Place], ticks: list[str], name: str, style: Trace
) -> Trace:
    values = []
    for place in places:
        row = next(row for row in score.at(place)[0] if row.cell.name == name)
        values.append(_percent(row.waited_rate))
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html.escape(name),
        "x": ticks,
        "y": values,
        "line": style | {"width": 1.7 if style["color"] == f"@{name}" else 2.2},
        "marker": {"color": style["color"], "size": 6},
        "hovertemplate": f"{html.escape(name)}: %{{y:.3g}} %<extra></extra>",
    }


def _percent(share: float | None) -> float | None:
    """Nothing where a logarithmic axis has no place for it."""
    return 100 * share if share else None


def _bound_lines(score: Score, places: list[Place], ticks: list[str]) -> list[Trace]:
    marks = {"belady": "diamond-open", "clairvoyant": "star-open"}
    by_name: dict[str, list[float | None]] = {}
    for place in places:
        for bound in score.at(place)[1].bounds:
            rate = _percent(None if bound.hit_rate is None else 1 - bound.hit_rate)
            by_name.setdefault(bound.name, []).append(rate)
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": html.escape(name),
            "x": ticks,
            "y": values,
            "line": {"color": "@ink", "dash": "dot", "width": 1.2},
            "marker": {"color": "@ink", "size": 8, "symbol": marks.get(name, "circle-open")},
            "hovertemplate": f"{html.escape(name)}: %{{y:.3g}} %<extra></extra>",
        }
        for name, values in by_name.items()
    ]


def timeliness(score: Score, trace: TraceFile, number: int) -> Figure:
    """Prefetched pages by slack, at the first staging and condition."""
    place = score.places(trace.name)[0]
    rows = [row for row in score.at(place)[0] if any(row.timeliness)]
    styles = colours(score)
    data = [
        {
            "type": "bar",
            "name": html.escape(row.cell.name),
            "x": [words.replace(" us", " µs") for words in slack_words(score.edges_ms)],
            "y": [100 * count / sum(row.timeliness) for count in row.timeliness],
            "customdata": row.timeliness,
            "marker": {"color": styles[row.cell.name]["color"]},
            "hovertemplate": f"{html.escape(row.cell.name)}, %{{x}}: %{{y:.3g}} %, "
            "%{customdata:,} pages<extra></extra>",
        }
        for row in rows
    ]
    late = sum(1 for edge in score.edges_ms if edge <= 0)
    return Figure(
        f"timeliness-{number}",
        f"Timeliness: staging {place.staging}, {place.condition}",
        "Prefetched pages that were demanded, by how long before their demand (+) or after it (-) "
        "they had arrived; in the shade: too late.",
        data,
        {
            "height": 380,
            "barmode": "group",
            "xaxis": axis("", type="category", tickangle=-30),
            "yaxis": axis("pages of a run (%)"),
            "shapes": [_shade(-0.5, late - 0.5)],
        },
        wide=True,
    )


def _shade(left: float, right: float) -> Trace:
    return {
        "type": "rect",
        "x0": left,
        "x1": right,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": "@shade",
        "line": {"width": 0},
        "layer": "below",
    }


def gaps(score: Score, trace: TraceFile, number: int) -> Figure:
    """Gap closed, a group of bars a predictor, a bar a staging; at the first condition."""
    return _grouped(
        score,
        trace,
        f"gap-{number}",
        "Share of the gap closed",
        "Of the time between none (0) and oracle (100). Below 0: it made things worse.",
        "gap closed (%)",
        lambda row: None if row.gap_closed is None else 100 * row.gap_closed,
    )


def costs(score: Score, trace: TraceFile, number: int) -> Figure:
    """What deciding took, likewise."""
    return _grouped(
        score,
        trace,
        f"cost-{number}",
        "Cost of deciding",
        "Processor time to guess, plan and learn for each page demanded: measured on the machine "
        "that simulated, all else here is exact.",
        "µs a page demanded",
        lambda row: row.cost.us_per_page,
    )


def _grouped(
    score: Score,
    trace: TraceFile,
    name: str,
    title: str,
    reading: str,
    unit: str,
    value: Any,
) -> Figure:
    every = score.places(trace.name)
    condition = conditions(every)[0]
    places = [place for place in every if (place.lead_ms, place.hints) == condition]
    rows = {place: _predictors(score, place) for place in places}
    labels = [html.escape(row.cell.name) for row in rows[places[0]]]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"staging {html.escape(place.staging)}",
            "x": [value(row) for row in rows[place]],
            "y": labels,
            "marker": {"color": _STAGINGS[position % len(_STAGINGS)]},
            "hovertemplate": f"%{{y}}, staging {html.escape(place.staging)}: %{{x:.3g}}"
            "<extra></extra>",
        }
        for position, place in enumerate(places)
    ]
    return Figure(
        name,
        title,
        f"{reading} {places[0].condition}.",
        data,
        {
            "height": 130 + _BAR_PX * len(labels) * max(1, len(places)) // 2,
            "barmode": "group",
            "bargap": 0.3,
            "xaxis": axis(unit, zeroline=True),
            "yaxis": {"type": "category", "autorange": "reversed", "ticksuffix": "  "},
            "legend": {"traceorder": "normal"},
        },
    )


def _predictors(score: Score, place: Place) -> list[Row]:
    return [row for row in score.at(place)[0] if row.cell.kind == "predictor"]
