"""The line plots of a replay's report: stalls, step time over the decode, waits by layer.

Decides what is drawn, with which axes and units. Refuses to compute figures and to know colours.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from prefetchd.bench.report_figures import Figure, Series, Trace, axis, ceiling
from prefetchd.metrics import Ccdf, Result, Run

# --- stalls ----------------------------------------------------------------------------------

DECADES_US = [(10.0**e, f"{10**e} µs" if e < 3 else f"{10 ** (e - 3)} ms") for e in range(6)] + [
    (1e6, "1 s"),
    (1e7, "10 s"),
    (1e8, "100 s"),
]
DECADES_SHARE = [(10.0**e, f"{100 * 10.0**e:g} %") for e in range(0, -8, -1)]


def ccdf_axes(us_title: str, share_title: str, ccdfs: Sequence[Ccdf]) -> dict[str, Any]:
    """Both axes, logarithmic, of curves that fall from the share that waited at all."""
    times = [us for ccdf in ccdfs for us in ccdf.us]
    shares = [share for ccdf in ccdfs for share in ccdf.share]
    return {
        "xaxis": decades(DECADES_US, us_title, times),
        "yaxis": decades(DECADES_SHARE, share_title, shares),
    }


def decades(ticks: list[tuple[float, str]], title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5 where there are few decades, from the tick below
    all values to the one above, or to the last: however close they lie, there are figures to read
    them by."""
    drawn = [value for value in values if value > 0]
    low, high = (min(drawn), max(drawn)) if drawn else (1.0, 1.0)
    parts = (1, 2, 5) if high < 30 * low else (1,)
    last, _ = max(ticks)  # such as 100 %: no share is 200 %
    finer = [
        (v * k, text.replace("1", str(k), 1))
        for v, text in sorted(ticks)
        for k in parts
        if v * k <= last
    ]
    below = [v for v, _ in finer if v <= low and v < last][-1:]
    above = [v for v, _ in finer if v >= high and v not in below][:1]
    more = {"range": [math.log10(below[0]), math.log10(above[0])]} if below and above else {}
    return axis(
        title,
        type="log",
        tickvals=[v for v, _ in finer],
        ticktext=[text for _, text in finer],
        **more,
    )


def stalls(runs: Sequence[Series]) -> Figure:
    drawn = [s for s in runs if s.run.stall_ccdf.us]
    never = [s.label for s in runs if s not in drawn and s.run.stall_us.n]
    data = [
        {
            "type": "scatter",
            "mode": "lines" if len(s.run.stall_ccdf.us) > 1 else "markers",
            "name": s.label,
            "x": s.run.stall_ccdf.us,
            "y": s.run.stall_ccdf.share,
            "line": s.line | {"shape": "vh"},
            "hovertemplate": f"{s.label}: %{{y:.3%}} waited %{{x:,.0f}} µs or more<extra></extra>",
        }
        for s in drawn
    ]
    reading = (
        "Share of demands (one layer of one step) that waited at least this long; lower and "
        "further left is better. A line starts at the share that waited at all."
    )
    if never:
        reading += f" Never waited: {html.unescape(', '.join(never))}."
    return Figure(
        "stalls",
        "Stalls",
        reading,
        data,
        {
            "height": 380,
            **ccdf_axes(
                "stall of one layer demand (logarithmic)",
                "waited at least as long (logarithmic)",
                [s.run.stall_ccdf for s in drawn],
            ),
        },
    )


# --- over steps and layers -------------------------------------------------------------------


def steps(result: Result, runs: Sequence[Series]) -> Figure:
    settings = result.settings
    drawn = [s for s in runs if s.run.step_ms]
    # The second half is warm in any case, however many of the first steps were left out.
    warm = [s.run.step_ms[len(s.run.step_ms) // 2 :] for s in drawn]
    highest = ceiling([(s, max(times)) for s, times in zip(drawn, warm, strict=True)], room=1.15)
    lowest = 0.93 * min((min(times) for times in warm), default=0.0)
    data = [
        {
            "type": "scatter",
            "mode": "lines" if len(s.run.step_ms) > 1 else "markers",
            "name": s.label,
            "x0": max(0, settings.steps - len(s.run.step_ms)),
            "y": s.run.step_ms,
            "line": s.line | {"width": 1.4},
            "visible": "legendonly" if min(s.run.step_ms) > highest else True,
            "hovertemplate": f"{s.label}, step %{{x}}: %{{y:.2f}} ms<extra></extra>",
        }
        for s in drawn
    ]
    layout = {
        "height": 360,
        "xaxis": axis("step (decoded token)", range=[0, settings.steps - 1]),
        "yaxis": axis("step time (ms)", range=[lowest, highest]),
        "shapes": [_warmup_shade(settings.warmup_steps)],
        "annotations": [_warmup_text(settings.warmup_steps)] if settings.warmup_steps else [],
    }
    return Figure(
        "steps",
        "Step time over the decode",
        "The median round of each run; the axis does not start at zero. Staging starts empty: the "
        "shaded steps warm it up and are in no figure. Click a name to hide or show it.",
        data,
        layout,
        wide=True,
    )


def _warmup_shade(until: int) -> Trace:
    return {
        "type": "rect",
        "x0": 0,
        "x1": until,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "fillcolor": "@shade",
        "line": {"width": 0},
        "layer": "below",
    }


def _warmup_text(until: int) -> Trace:
    return {
        "x": until / 2,
        "yref": "paper",
        "y": 0.02,
        "text": "warm-up",
        "showarrow": False,
        "font": {"size": 11, "color": "@muted"},
    }


def layers(result: Result, runs: Sequence[Series]) -> Figure:
    settings = result.settings
    counted = max(1, settings.rounds * (settings.steps - settings.warmup_steps))
    drawn = [s for s in runs if any(s.run.per_layer.miss) or any(s.run.per_layer.late)]
    waits = [_by_layer(s.run, counted) for s in drawn]
    highest = ceiling([(s, max(wait)) for s, wait in zip(drawn, waits, strict=True)])
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": s.label,
            "y": wait,
            "line": s.line | {"shape": "linear", "width": 1.4},
            "marker": {"size": 5, "color": s.colour},
            "visible": "legendonly" if min(wait) > highest else True,
            "hovertemplate": f"{s.label}, layer %{{x}}: %{{y:.3g}} pages a step<extra></extra>",
        }
        for s, wait in zip(drawn, waits, strict=True)
    ]
    return Figure(
        "layers",
        "Where pages come too late",
        "Late and missing pages by layer. Layers that stand out need more staging or earlier "
        "hints; the first layer gets no hint.",
        data,
        {
            "height": 380,
            "xaxis": axis("layer"),
            "yaxis": axis("late and missing (pages per step)", range=[0, highest]),
        },
    )


def _by_layer(run: Run, steps_counted: int) -> list[float]:
    late, miss = run.per_layer.late, run.per_layer.miss
    size = max(len(late), len(miss))
    late, miss = late + [0] * (size - len(late)), miss + [0] * (size - len(miss))
    return [(a + b) / steps_counted for a, b in zip(late, miss, strict=True)]
