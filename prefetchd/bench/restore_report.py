"""The HTML report of a restore replay: table, staged share against lead, time-to-ready.

Decides what stands in it. The page around it is the decode report's.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from prefetchd.bench.findings import SETTING
from prefetchd.bench.report import embed, save
from prefetchd.bench.report_figures import Figure, axis
from prefetchd.bench.report_lines import ccdf_axes
from prefetchd.bench.restore_result import SIMULATED, RestoreResult, RestoreRun, encode
from prefetchd.bench.restore_tables import bound_cells, caption, columns, notes


def write_restore_report(result: RestoreResult, path: Path) -> None:
    """Raises ReportError."""
    body = [_header(result), _table(result)]
    figures = [figure for figure in (_staged(result), _ready(result)) if figure.data]
    body += [
        f"<section><h2>{figure.title}</h2><p class=reading>{figure.reading}</p>"
        f'<div class="plot" id="{figure.name}" role="img" aria-label="{figure.title}"></div>'
        "</section>"
        for figure in figures
    ]
    data = base64.b64encode(encode(result)).decode()
    body.append(
        f"<footer>Written by prefetchd; result format {html.escape(result.schema)}. "
        f'<a download="restore.json" href="data:application/json;base64,{data}">Save the result as '
        "JSON</a>. This file loads nothing from anywhere.</footer>"
    )
    save(embed(f"prefetchd: {result.settings.trace}, restore", body, figures), path)


def _header(result: RestoreResult) -> str:
    kind = result.device.kind
    best = max(
        (run for run in result.runs if not run.control and run.staged_share is not None),
        key=lambda run: run.staged_share or 0,
        default=None,
    )
    said = "Only controls were run"
    if best is not None and best.staged_share is not None:
        said = (
            f"{best.name} had {100 * best.staged_share:.1f} % of the blocks to restore in DRAM in"
            f" time, {best.lead_ms:g} ms ahead"
        )
    said = SETTING.get(kind, "") + said
    words = "".join(f"<p class=what>{html.escape(line)}</p>" for line in caption(result))
    done = "simulate" if result.schema == SIMULATED else "replay"
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes(result))
    return (
        f'<header><p class="over">prefetchd {done} &middot; restore &middot; '
        f'<span class="badge {kind}">{kind}</span></p><h1>{html.escape(said)}.</h1>{words}</header>'
        + (f'<section class="notes"><ul>{listed}</ul></section>' if listed else "")
    )


def _table(result: RestoreResult) -> str:
    heads = "".join(
        f'<th scope="col">{heading.replace(chr(10), "<br>")}</th>' for heading, _ in columns(result)
    )
    rows = "".join(
        f'<tr class="{"control" if run.control else ""}"><th scope="row">{html.escape(run.name)}'
        f"</th>{''.join(f'<td>{cell(run)}</td>' for _, cell in columns(result))}</tr>"
        for run in result.runs
    )
    for bound in result.bounds:
        cells = "".join(f"<td>{cell}</td>" for cell in bound_cells(result, bound))
        rows += f'<tr class="control"><th scope="row">{html.escape(bound.name)}</th>{cells}</tr>'
    bounds = " Last, what nothing can beat: computed, not run." if result.bounds else ""
    return (
        "<section><h2>All runs</h2><p class=reading>Staged: blocks that were readable when their "
        "request first needed them. Ready: from the intended start of a request to the end of its "
        f"last wait. A dash: too few samples.{bounds}</p>"
        f'<div class="scroll"><table><thead><tr><th scope="col">run</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _staged(result: RestoreResult) -> Figure:
    names = list(dict.fromkeys(run.name for run in result.runs if not run.control))
    data: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        runs = sorted((r for r in result.runs if r.name == name), key=lambda r: r.lead_ms)
        data.append(_line(name, number, runs) | {"mode": "lines+markers"})
    leads = [run.lead_ms for run in result.runs]
    for run in result.runs:
        if run.control and run.staged_share is not None and names:
            share = 100 * run.staged_share
            data.append(
                {
                    "type": "scatter",
                    # Of one lead there is no line to be seen.
                    "mode": "lines" if min(leads) < max(leads) else "markers",
                    "marker": {"color": f"@{run.name}", "symbol": "line-ew-open", "size": 40},
                    "name": html.escape(run.name),
                    "x": [min(leads), max(leads)],
                    "y": [share, share],
                    "line": {"color": f"@{run.name}", "dash": "dash"},
                }
            )
    reading = (
        "Share of reusable blocks that were in DRAM at their first need, by how long before its "
        "start a request was announced (logarithmic). Dashed: the controls; resident keeps in DRAM "
        "all that was ever put, none prefetches nothing. Dotted and marked: what nothing can beat."
    )
    layout = {
        "height": 380,
        "xaxis": axis("lead (ms, the trace's time)", type="log"),
        "yaxis": axis("staged in time (%)", range=[0, 102]),
    }
    data += _bounds(result, leads) if names else []
    return Figure("staged", "Staged share against lead", reading, data, layout)


def _bounds(result: RestoreResult, leads: list[float]) -> list[dict[str, Any]]:
    """Each with a dash, a mark and a label of its own, as in a scorecard: colours may be alike. The
    labels stand at either end, since two bounds may be one line."""
    looks = [("dot", "diamond-open"), ("dashdot", "star-open"), ("longdash", "square-open")]
    drawn = [bound for bound in result.bounds if bound.hit_rate is not None]
    return [
        {
            "type": "scatter",
            "mode": "lines+markers+text",
            "name": html.escape(bound.name),
            "x": [min(leads), max(leads)],
            "y": [100 * (bound.hit_rate or 0.0)] * 2,
            "text": ["", html.escape(bound.name)][:: -1 if number % 2 else 1],
            "textposition": "bottom right" if number % 2 else "bottom left",
            "line": {"color": "@ink", "dash": looks[number % 3][0], "width": 1.2},
            "marker": {"color": "@ink", "symbol": looks[number % 3][1], "size": 8},
        }
        for number, bound in enumerate(drawn)
    ]


def _line(name: str, number: int, runs: list[RestoreRun]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": html.escape(name),
        "x": [run.lead_ms for run in runs],
        "y": [None if run.staged_share is None else 100 * run.staged_share for run in runs],
        "line": {"color": f"@run{number % 6}"},
    }


def _ready(result: RestoreResult) -> Figure:
    data = []
    drawn = sorted(
        (run for run in result.runs if run.ready_ccdf.us), key=lambda run: run.control
    )  # so that predictors have the first colours
    for number, run in enumerate(drawn):
        dash = "dash" if run.control else "solid"
        colour = f"@{run.name}" if run.control else f"@run{number % 6}"
        data.append(
            {
                "type": "scatter",
                "mode": "lines" if len(run.ready_ccdf.us) > 1 else "markers",
                "name": _named(run),
                "x": run.ready_ccdf.us,
                "y": run.ready_ccdf.share,
                "line": {
                    "color": colour,
                    "shape": "vh",
                    "dash": dash,
                },
            }
        )
    reading = (
        "Share of requests with something to restore that waited at least this long after their "
        "intended start until nothing was missing; lower and further left is better."
    )
    never = [_named(run) for run in result.runs if run not in drawn and run.time_to_ready_ms.n]
    if never:
        reading += f" Never waited: {'; '.join(never)}."
    layout = {
        "height": 380,
        "showlegend": True,
        **ccdf_axes(
            "time to ready (logarithmic)",
            "took at least as long (logarithmic)",
            [run.ready_ccdf for run in drawn],
        ),
    }
    return Figure("ready", "Time to ready", reading, data, layout)


def _named(run: RestoreRun) -> str:
    return html.escape(f"{run.name}, {run.lead_ms:g} ms")
