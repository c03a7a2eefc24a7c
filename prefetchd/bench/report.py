"""One HTML file that says what a replay found: words, table, plots, definitions.

Decides what stands in the report and in which order. The file needs nothing else: plotly's script
is inlined, and no network is used. Whatever comes from outside (names, notes, errors) is escaped.
"""

from __future__ import annotations

import base64
import errno
import html
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from prefetchd.bench import report_bars, report_lines
from prefetchd.bench.findings import KINDS, Note, best, name_of, notes, verdict
from prefetchd.bench.report_details import DETAILS, WORDS, settings_in_words, what
from prefetchd.bench.report_figures import Figure, Series, series
from prefetchd.bench.report_page import COLOURS, PAGE, SCRIPT, STYLE
from prefetchd.bench.tables import COLUMNS, DASH, Column, number, share
from prefetchd.metrics import Result, Run, encode

EN_DASH = "\N{EN DASH}"


class ReportError(Exception):
    """The report cannot be written: why, and what to do."""


def write_report(result: Result, path: str | Path) -> None:
    """Write the report of a replay. Raises ReportError."""
    save(render(result, _plotly_script()), path)


def save(page: str, path: str | Path) -> None:
    """Raises ReportError."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        raise ReportError(
            f"the report cannot be written to {path}: {name} ({error.strerror}). "
            "Name another file with --report FILE.html."
        ) from error


def check_report(path: Path) -> None:
    """Whether a report could be written, before there is one. Raises ReportError."""
    _plotly_script()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ReportError(
            f"the report cannot be written to {path}: there is no such folder, or it may not be "
            "written. Name another file with --report FILE.html."
        )


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        words = "the report needs plotly for its plots, which is not installed: "
        raise ReportError(words + "pip install prefetchd[report]") from error
    return str(get_plotlyjs())


def draw(result: Result) -> list[Figure]:
    """All plots for which there is something to draw."""
    runs = series(result)
    figures = (
        report_bars.step_times(result, runs),
        report_lines.stalls(runs),
        report_bars.outcomes(runs),
        report_lines.steps(result, runs),
        report_lines.layers(result, runs),
        report_bars.prefetches(runs),
    )
    return [figure for figure in figures if figure.data] if runs else []


def render(result: Result, plotly_script: str) -> str:
    """The page as text, around the script that draws."""
    figures = draw(result)
    body = [_header(result), _cards(result), _notes(notes(result))]
    body += [_section("All runs", _table(result), TABLE_READING)]
    body += _plots(figures, _badge(result) if result.device.kind != "MEASURED" else "")
    body += [_section("More figures", _details(result), DETAILS_READING)]
    body += [_section("Settings", _pairs(settings_in_words(result), "settings"))]
    body += [_section("Words", _pairs(WORDS, "words")), _footer(result)]
    title = f"prefetchd: {result.settings.trace}, {result.regime}"
    return embed(title, body, figures, plotly_script)


def embed(
    title: str, body: Iterable[str], figures: Iterable[Figure], plotly_script: str | None = None
) -> str:
    """The page around a body in HTML and the figures named in it. Raises ReportError."""
    return PAGE.format(
        title=_text(title),
        style=STYLE,
        body="\n".join(body),
        figures=_json([{"name": f.name, "data": f.data, "layout": f.layout} for f in figures]),
        colours=_json(COLOURS),
        plotly=_plotly_script() if plotly_script is None else plotly_script,
        script=SCRIPT,
    )


TABLE_READING = (
    "Controls first, then predictors; the fastest predictor is marked. Times are medians over "
    "rounds, counts and percentiles cover all of them; warm-up steps are in none."
)
DETAILS_READING = (
    "Stalls are per demand, one layer of one step. A percentile with too few samples behind it is "
    "not stated."
)


def _text(value: object) -> str:
    return html.escape(str(value))


def _code(value: str) -> str:
    """Escaped text in which what stands in backticks is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(value))


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(title: str, content: str, reading: str = "", badge: str = "") -> str:
    explained = f'<p class="reading">{_text(reading)}</p>' if reading else ""
    return f"<section><h2>{_text(title)} {badge}</h2>{explained}{content}</section>"


def _header(result: Result) -> str:
    done = "simulate" if result.device.kind == "SIMULATED" else "replay"
    over = f"prefetchd {done} &middot; {_text(result.regime)} &middot; {_badge(result)}"
    return (
        f'<header><p class="over">{over}</p>'
        f'<h1>{_text(verdict(result))}</h1><p class="what">{_text(what(result))}</p></header>'
    )


def _badge(result: Result) -> str:
    kind = result.device.kind
    return f'<span class="badge {kind}" title="{_text(KINDS[kind])}">{kind}</span>'


def _cards(result: Result) -> str:
    run = best(result)
    if run is None:
        return ""
    waited = None
    if run.late_rate is not None and run.miss_rate is not None:
        waited = run.late_rate + run.miss_rate
    name = name_of(run, result)
    cards = (
        (number(run.tpot_ratio), "\N{MULTIPLICATION SIGN}", f"{name}: step time, all in DRAM = 1"),
        (share(run.extra_share), " %", "of the time lost by plain staging is still lost"),
        (share(waited), " %", "of demanded pages were late or missing"),
        (_milliseconds(run.stall_us.p99), " ms", "99th percentile of the stall of a layer demand"),
        (number(run.prefetch.reads_per_needed), "", "pages read per page demanded"),
    )
    boxes = (
        f'<div class="card"><b>{_value(value, unit)}</b><span>{_text(words)}</span></div>'
        for value, unit, words in cards
    )
    return f'<div class="cards">{"".join(boxes)}</div>'


def _milliseconds(value_us: float | None) -> str:
    return number(None if value_us is None else value_us / 1e3)


def _value(value: str, unit: str = "") -> str:
    return EN_DASH if value == DASH else _text(value + unit)


def _notes(found: list[Note]) -> str:
    if not found:
        return ""
    items = (
        f"<li>{f'<span class=badge>{_text(note.word)}</span>' if note.word else ''}"
        f"{_code(note.text)}</li>"
        for note in found
    )
    return f'<section class="notes"><ul>{"".join(items)}</ul></section>'


def _table(result: Result) -> str:
    heads = "".join(
        f'<th scope="col" title="{_text(c.meaning)}">{_text(_micro(c.top))}<br>'
        f"{_text(_micro(c.bottom))}</th>"
        for c in COLUMNS
    )
    rows = "".join(_row(entry, COLUMNS, best(result)) for entry in series(result))
    for bound in result.bounds:
        cells = "".join(f"<td>{_value(column.bound(bound))}</td>" for column in COLUMNS)
        rows += f'<tr class="control"><th scope="row">{_text(bound.name)}</th>{cells}</tr>'
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">run</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(entry: Series, columns: Iterable[Column], winner: Run | None) -> str:
    run = entry.run
    kind = "control" if run.control else "best" if run is winner else ""
    style = "solid" if entry.dash == "solid" else "dashed"
    key = f'<span class="key" data-colour="{entry.colour}" style="border-top-style:{style}"></span>'
    cells = "".join(f"<td>{_value(column.cell(run))}</td>" for column in columns)
    return f'<tr class="{kind}"><th scope="row">{key}{entry.label}</th>{cells}</tr>'


def _details(result: Result) -> str:
    """The further figures, one a row, so that each has room to say what it is."""
    entries, winner = series(result), best(result)
    kinds = [' class="best"' if entry.run is winner else "" for entry in entries]
    marked = list(zip(entries, kinds, strict=True))
    heads = "".join(f'<th scope="col"{kind}>{entry.label}</th>' for entry, kind in marked)
    rows = ""
    for column in DETAILS:
        cells = "".join(f"<td{kind}>{_value(column.cell(e.run))}</td>" for e, kind in marked)
        rows += (
            f'<tr><th scope="row">{_text(_micro(column.heading))}'
            f"<small>{_text(column.meaning)}</small></th>{cells}</tr>"
        )
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _micro(heading: str) -> str:
    """The terminal keeps to ASCII; here a microsecond may look like one."""
    return re.sub(r"\bus\b", "µs", heading)


def _plots(figures: list[Figure], badge: str) -> Iterator[str]:
    """Wide plots on their own, the others two to a row, each marked if it is not of a drive."""
    waiting = ""
    for figure in figures:
        drawn = _section(
            figure.title,
            f'<div class="plot" id="{figure.name}" role="img"'
            f' aria-label="{_text(figure.title)}"></div>',
            figure.reading,
            badge,
        )
        if figure.wide:
            yield drawn
        elif waiting:
            yield f'<div class="pair">{waiting}{drawn}</div>'
            waiting = ""
        else:
            waiting = drawn
    yield waiting


def _pairs(pairs: Iterable[tuple[str, str]], kind: str) -> str:
    items = "".join(
        f"<div><dt>{_text(word)}</dt><dd>{_text(text)}</dd></div>"
        if kind == "settings"
        else f"<dt>{_text(word)}</dt><dd>{_text(text)}</dd>"
        for word, text in pairs
    )
    return f'<dl class="{kind}">{items}</dl>'


def _footer(result: Result) -> str:
    data = base64.b64encode(encode(result)).decode()
    return (
        f"<footer>Written by prefetchd; result format {_text(result.schema)}. "
        f'<a download="result.json" href="data:application/json;base64,{data}">Save the result as '
        "JSON</a>. This file loads nothing from anywhere.</footer>"
    )
