"""The bar plots of a replay's report: step time, outcomes, prefetched pages.

Decides what is drawn, with which axes and units. Refuses to compute figures and to know colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefetchd.bench.report_figures import Figure, Series, Trace, axis, ceiling
from prefetchd.bench.tables import number, share
from prefetchd.metrics import Result, Run, find

BAR_PX = 34


def _rows(runs: Sequence[Series], **more: Any) -> dict[str, Any]:
    """A layout of one horizontal bar a run, the first at the top."""
    return {
        "height": 105 + BAR_PX * len(runs),
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "ticksuffix": "  ",
            "categoryarray": [s.label for s in runs],
            "showgrid": False,
        },
        "barmode": "stack",
        "bargap": 0.35,
        **more,
    }


# --- step time ---------------------------------------------------------------------------


def step_times(result: Result, runs: Sequence[Series]) -> Figure:
    resident = find(result.runs, "resident")
    top = ceiling([(s, _furthest(s)) for s in runs], room=1.6)
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": [s.run.tpot_ms for s in runs],
        "y": [s.label for s in runs],
        "marker": {"color": [s.colour for s in runs]},
        "hovertemplate": "%{y}: %{x:.2f} ms<extra></extra>",
        "showlegend": False,
    }
    layout = _rows(runs, xaxis=axis("step time (ms per token), median of rounds", range=[0, top]))
    layout["annotations"] = [_bar_label(s, top) for s in runs]
    if resident is not None:
        layout["shapes"] = [_upright(resident.tpot_ms)]
    return Figure(
        "step-times",
        "Step time",
        "Time per output token, and how many times that of resident (dotted line), where every "
        "page is in DRAM. Small marks are single rounds. A bar that leaves the plot is cut.",
        [bars, _round_marks(runs, top)],
        layout,
    )


def _furthest(s: Series) -> float:
    """Behind this its label has to stand."""
    return max([s.run.tpot_ms, *s.run.tpot_ms_rounds])


def _bar_label(s: Series, top: float) -> Trace:
    value = s.run.tpot_ms
    times = ""
    if s.run.tpot_ratio is not None:
        times = f"  {number(s.run.tpot_ratio)}\N{MULTIPLICATION SIGN}"
    cut = _furthest(s) > 0.86 * top
    upon = value > 0.86 * top
    return {
        "x": top if cut else _furthest(s),
        "y": s.label,
        "text": f"<b>{number(value)} ms</b>{times}{'  ▸' if value > top else ''}",
        "xanchor": "right" if cut else "left",
        "xshift": -6 if cut else 8,
        "showarrow": False,
        # Upon a bar: the paper's colour, except on the palest of the bars.
        "font": {"color": "@page" if upon and s.colour != "@cold" else "@ink", "size": 12},
    }


def _round_marks(runs: Sequence[Series], top: float) -> Trace:
    marks = [(t, s.label) for s in runs for t in s.run.tpot_ms_rounds if t <= top]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _ in marks],
        "y": [y for _, y in marks],
        "marker": {"symbol": "line-ns-open", "size": 11, "color": "@ink", "line": {"width": 1.5}},
        "hovertemplate": "%{y}, one round: %{x:.2f} ms<extra></extra>",
        "showlegend": False,
    }


def _upright(x: float) -> Trace:
    line = {"color": "@ink", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


# --- outcomes --------------------------------------------------------------------------------

OUTCOMES = ("retained", "timely", "late", "miss")


def outcomes(runs: Sequence[Series]) -> Figure:
    counted = [s for s in runs if s.run.outcomes.total]
    waited = [(s, 100 * _share(s.run, "late") + 100 * _share(s.run, "miss")) for s in counted]
    top = ceiling(waited)
    data = [_outcome_bars(counted, word, "") for word in OUTCOMES]
    data += [_outcome_bars(counted, word, "2") for word in OUTCOMES[2:]]
    layout = _rows(
        counted,
        xaxis=axis("all demanded pages (%)", range=[0, 100], domain=[0, 0.46]),
        xaxis2=axis("late and missing pages (%), enlarged", range=[0, top], domain=[0.54, 1]),
        legend={"traceorder": "normal"},
    )
    layout["yaxis2"] = layout["yaxis"] | {"anchor": "x2", "showticklabels": False}
    layout["annotations"] = [_waited_label(s, value, top) for s, value in waited]
    return Figure(
        "outcomes",
        "How demanded pages were found",
        "Left, all of them. Right, only those that somebody had to wait for, on a scale of their "
        "own; a bar that leaves the plot is cut.",
        data if counted else [],
        layout,
        wide=True,
    )


def _share(run: Run, word: str) -> float:
    return float(getattr(run.outcomes, word)) / run.outcomes.total


def _outcome_bars(runs: Sequence[Series], word: str, axis: str) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": word,
        "legendgroup": word,
        "showlegend": not axis,
        "x": [100 * _share(s.run, word) for s in runs],
        "y": [s.label for s in runs],
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "marker": {"color": f"@{word}"},
        "customdata": [getattr(s.run.outcomes, word) for s in runs],
        "hovertemplate": f"%{{y}}: %{{x:.3g}} % {word} (%{{customdata:,}} pages)<extra></extra>",
    }


def _waited_label(s: Series, value: float, top: float) -> Trace:
    cut = value > 0.86 * top
    return {
        "xref": "x2",
        "yref": "y2",
        "x": top if cut else value,
        "y": s.label,
        "text": f"<b>{share(value / 100)} %</b>{'  ▸' if value > top else ''}",
        "xanchor": "right" if cut else "left",
        "xshift": -6 if cut else 6,
        "showarrow": False,
        "font": {"color": "@page" if cut else "@ink", "size": 12},
    }


# --- prefetching -----------------------------------------------------------------------------


def prefetches(runs: Sequence[Series]) -> Figure:
    drawn = [s for s in runs if s.run.prefetch.issued and s.run.outcomes.total]
    words = {"useful": "@timely", "late": "@late", "wasted": "@wasted", "undecided": "@retained"}
    data = []
    for word, colour in words.items():
        counts = [_decided(s.run)[word] for s in drawn]
        per_hundred = [
            100 * count / s.run.outcomes.total for count, s in zip(counts, drawn, strict=True)
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": word,
                "x": per_hundred,
                "y": [s.label for s in drawn],
                "marker": {"color": colour},
                "customdata": counts,
                "hovertemplate": f"%{{y}}: %{{customdata:,}} pages {word}<extra></extra>",
            }
        )
    return Figure(
        "prefetches",
        "What became of prefetched pages",
        "Useful ones were demanded after they had arrived, late ones while on their way, wasted "
        "ones never; undecided ones were still staged at the end.",
        data if drawn else [],
        _rows(
            drawn,
            xaxis=axis("prefetched pages per 100 demanded pages"),
            legend={"traceorder": "normal"},
        ),
    )


def _decided(run: Run) -> dict[str, int]:
    counts = run.prefetch
    rest = counts.issued - counts.useful - counts.late - counts.wasted
    return {
        "useful": counts.useful,
        "late": counts.late,
        "wasted": counts.wasted,
        "undecided": max(0, rest),
    }
