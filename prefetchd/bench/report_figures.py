"""What the plots of a replay's report share: a figure, and a run as every plot shows it.

A figure is plain plotly data and layout (dicts). A colour in it is the name of a role ("@ink",
"@run3"), which the page fills in for light or dark. Text that plotly draws is read as markup, so
names from outside are escaped here.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prefetchd.bench.findings import labels, order
from prefetchd.metrics import Result, Run

Trace = dict[str, Any]
DASHES = {"resident": "solid", "none": "dash", "cold": "dot", "oracle": "dashdot"}
PREDICTOR_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: its heading, how to read it, and plotly's data and layout."""

    name: str
    title: str
    reading: str
    data: list[Trace]
    layout: dict[str, Any]
    wide: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class Series:
    """A run as plots show it: the same name, colour and dash in each of them."""

    run: Run
    label: str
    colour: str
    dash: str

    @property
    def line(self) -> Trace:
        return {"color": self.colour, "dash": self.dash, "width": 1.7 if self.run.control else 2.2}


def series(result: Result) -> list[Series]:
    """Runs in the table's order. Controls are grey and dashed, predictors coloured and solid."""
    found, predictors = [], 0
    runs = order(result)
    for run, label in zip(runs, labels(runs), strict=True):
        colour, dash = f"@{run.name}", DASHES.get(run.name, "")
        if not (run.control and dash):
            colour = f"@run{predictors % PREDICTOR_COLOURS}"
            dash = "solid" if predictors < PREDICTOR_COLOURS else "longdash"
            predictors += 1
        found.append(Series(run, html.escape(label), colour, dash))
    return found


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def ceiling(values: Sequence[tuple[Series, float]], room: float = 1.35) -> float:
    """Where to cut an axis: `cold` may run off it, so that the others can be told apart."""
    rest = max((value for s, value in values if s.run.name != "cold"), default=0.0)
    return room * (rest or max((value for _, value in values), default=0.0) or 1.0)
