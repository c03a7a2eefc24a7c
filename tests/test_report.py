"""What a reader of a replay gets: the terminal table and the report."""

from __future__ import annotations

import io
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from prefetchd import metrics
from prefetchd.bench import report
from prefetchd.bench.findings import labels, notes, percent, verdict
from prefetchd.bench.report_lines import DECADES_SHARE, DECADES_US, decades
from prefetchd.bench.report_page import COLOURS, STYLE
from prefetchd.bench.tables import print_replay, replay_table
from prefetchd.metrics import Distribution, Result, Run
from tests.invented_replay import invented_result, invented_run

replace = msgspec.structs.replace
HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x>"


class Page(HTMLParser):
    """Elements and text of a page; script and style are told apart from text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.raw: list[str] = []
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in {"script", "style"}:
            self.raw.append(data)
        else:
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(result: Result) -> Page:
    return Page(report.render(result, "/* plotly */"))


def printed(result: Result) -> str:
    out = io.StringIO()
    print_replay(result, out)
    return out.getvalue()


def with_runs(*runs: Run) -> Result:
    return replace(invented_result(), runs=metrics.relate(runs))


# --- the report ------------------------------------------------------------------------------


def test_the_report_needs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.write_report(invented_result(), path)
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.named("link")
    for tag, attributes in page.elements:
        assert "src" not in attributes, tag
        target = attributes.get("href")
        assert target is None or target.startswith("data:application/json"), tag
    policy = next(meta for meta in page.named("meta") if "http-equiv" in meta)
    assert str(policy["content"]).startswith("default-src 'none'")
    assert "http" not in str(policy["content"])
    assert any("plotly.js" in script[:200] for script in page.raw)
    styles = STYLE.lower()
    assert "@import" not in styles
    assert "url(" not in styles


@pytest.mark.parametrize("names", [(), ("none",), ("attention",), ("resident", "auto")])
def test_every_run_is_named_and_every_figure_drawn(names: tuple[str, ...]) -> None:
    result = invented_result(*names)
    page = page_of(result)
    for run in result.runs:
        assert page.text.count(run.name) >= 2
    drawn = {str(div["id"]) for div in page.named("div") if div.get("class") == "plot"}
    assert drawn == {figure.name for figure in report.draw(result)}
    assert {"step-times", "outcomes", "steps"} <= drawn


def test_a_result_without_runs_still_makes_a_page() -> None:
    page = page_of(with_runs())
    assert "no predictor to judge" in page.text
    assert not [div for div in page.named("div") if div.get("class") == "plot"]


def test_what_is_unknown_is_a_dash() -> None:
    result = with_runs(replace(invented_run("attention"), stall_us=Distribution(n=30)))
    text = page_of(result).text
    assert "None" not in text
    assert "nan" not in text.split()
    assert text.count(report.EN_DASH) >= 5  # ratio, extra, three percentiles
    row = next(line for line in printed(result).splitlines() if line.startswith("attention"))
    assert row.split()[2:4] == ["-", "-"]


def test_names_and_notes_from_outside_stay_text() -> None:
    run = replace(invented_run("attention"), name=HOSTILE, failures={HOSTILE: 2}, notes=[HOSTILE])
    result = with_runs(invented_run("resident"), run)
    settings = replace(result.settings, trace=HOSTILE, more={HOSTILE: HOSTILE})
    device = replace(result.device, engine=HOSTILE, file_system=HOSTILE, notes=[HOSTILE])
    page = page_of(replace(result, settings=settings, device=device, notes=[HOSTILE]))
    assert not page.named("img")
    assert len(page.named("script")) == 4
    assert HOSTILE in page.text
    for figure in report.draw(result):
        assert "<script" not in str(figure.data)


def test_a_run_has_one_colour_in_all_plots_and_plotly_knows_every_word() -> None:
    graph_objects: Any = pytest.importorskip("plotly.graph_objects")
    colours: dict[str, set[str]] = {}
    for figure in report.draw(invented_result()):
        for trace in figure.data:
            if "line" in trace:
                colours.setdefault(trace["name"], set()).add(trace["line"]["color"])
        if figure.name == "step-times":
            bars = figure.data[0]
            for name, colour in zip(bars["y"], bars["marker"]["color"], strict=True):
                colours.setdefault(name, set()).add(colour)
        text = msgspec.json.encode({"data": figure.data, "layout": figure.layout}).decode()
        for role, colour in COLOURS["light"].items():
            text = text.replace(f'"{role}"', f'"{colour}"')
        assert '"@' not in text, "a colour that the page does not know"
        graph_objects.Figure(**msgspec.json.decode(text))  # raises for words it does not know
    assert all(len(found) == 1 for found in colours.values())
    assert len({*map(frozenset, colours.values())}) == len(colours)
    assert COLOURS["light"].keys() == COLOURS["dark"].keys()


def test_axes_name_their_units() -> None:
    for figure in report.draw(invented_result()):
        titles = [
            axis["title"]["text"]
            for name, axis in figure.layout.items()
            if name.startswith(("xaxis", "yaxis")) and axis.get("type") != "category"
        ]
        assert titles
        assert all(any(mark in title for mark in UNITS) for title in titles), titles


UNITS = ("(", "per 100", "layer")


def test_without_plotly_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(report.ReportError, match=r"pip install prefetchd\[report\]"):
        report.write_report(invented_result("none"), tmp_path / "report.html")


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match=r"EISDIR.*--report"):
        report.write_report(invented_result("none"), tmp_path)


# --- the terminal ----------------------------------------------------------------------------


def test_the_piped_table_fits_and_has_controls_first() -> None:
    result = invented_result()
    mixed = replace(result, runs=result.runs[::-1])
    lines = printed(mixed).splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in "".join(lines)
    rows = [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in NAMES]
    assert rows[:7] == ["oracle", "cold", "none", "resident", "auto", "attention", "sliding_window"]
    assert "Left out" not in "".join(lines)


NAMES = {run.name for run in invented_result().runs}


def test_a_narrow_terminal_loses_columns_and_says_so() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(replay_table(invented_result()))
    text = capture.get()
    assert "Left out for want of width: decide p99 us" in text
    assert "TPOT" in text
    assert "..." not in text


def test_markup_and_control_characters_in_names_are_shown_not_obeyed() -> None:
    text = printed(with_runs(replace(invented_run("attention"), name="[red]a\x1b[2J[/red]")))
    assert "[red]a[2J[/red]" in text
    assert "\x1b" not in text


def test_runs_of_one_name_are_told_apart() -> None:
    run = invented_run("attention")
    assert labels([run, replace(run, evict="arc"), replace(run, evict="arc")]) == [
        "attention (cycle)",
        "attention (arc)",
        "attention (arc) #2",
    ]


# --- the words -------------------------------------------------------------------------------


def timed(name: str, tpot_ms: float) -> Run:
    return replace(invented_run(name), tpot_ms=tpot_ms, tpot_ms_rounds=[tpot_ms])


@pytest.mark.parametrize(
    ("none_ms", "tpot_ms", "said"),
    [
        (24.0, 21.0, "attention hid 75 % of the time that plain LRU staging lost"),
        (24.0, 24.0, "attention hid none of the time"),
        (24.0, 28.0, "attention lost 2.00 times the time that plain LRU staging lost"),
        (20.1, 20.0, "Plain LRU staging lost only 0.50 % of a step, too little"),
        (
            19.9,
            20.0,
            "attention took 1.01 times as long as plain LRU staging; a step took 20.00 ms, 1.00",
        ),
    ],
)
def test_the_verdict_is_as_good_or_bad_as_the_result(
    none_ms: float, tpot_ms: float, said: str
) -> None:
    result = with_runs(timed("resident", 20.0), timed("none", none_ms), timed("attention", tpot_ms))
    assert said in verdict(result)


def test_a_verdict_without_controls_claims_nothing() -> None:
    assert "DRAM" not in verdict(with_runs(timed("attention", 20.0)))
    assert "no predictor to judge" in verdict(with_runs(timed("none", 20.0)))
    slower = verdict(with_runs(timed("none", 20.0), timed("attention", 30.0)))
    assert "attention took 1.50 times as long as plain LRU staging" in slower


def test_what_is_not_of_a_drive_says_so_everywhere() -> None:
    result = invented_result()
    emulated = replace(result, device=replace(result.device, kind="EMULATED"))
    assert verdict(emulated).startswith("On an emulated device, attention hid")
    headings = page_of(emulated).text.count("EMULATED") - page_of(result).text.count("EMULATED")
    assert headings >= len(report.draw(emulated)) + 2  # and the header, and the note
    assert "| EMULATED" in printed(emulated)


def test_notes_tell_of_everything_less_than_asked_for() -> None:
    unsteady = replace(invented_run("auto"), tpot_ms_rounds=[15.0, 19.0, 22.0], tpot_ms=19.0)
    failing = replace(unsteady, name="none", failures={"short": 3, "eio": 0, "timeout": 1})
    result = with_runs(failing, replace(unsteady, stall_us=Distribution(n=4_320)))
    device = replace(result.device, kind="RAM", notes=["ran unregistered: memlock is 8 MiB"])
    found = notes(replace(result, device=device, notes=["CLIENT-BOUND: the CPU was busy"]))
    assert [note.word for note in found[:2]] == ["RAM", "CLIENT-BOUND"]
    said = " / ".join(f"{note.word} {note.text}" for note in found)
    assert "device uring: ran unregistered" in said
    assert "UNSTEADY auto: step times of its rounds differ by 36.8 %" in said
    assert "FAILED READS none: 3 short, 1 timeout" in said
    assert "eio" not in said
    assert "4,320" in said
    assert notes(invented_result()) == []


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.00004, "0.004 %"), (0.0053, "0.53 %"), (0.133, "13.3 %"), (1, "100 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("scale", "values", "first", "last"),
    [
        (DECADES_US, [12_500.0, 12_600.0], "10 ms", "20 ms"),
        (DECADES_US, [10_000.0], "10 ms", "20 ms"),
        (DECADES_US, [150.0, 90_000.0], "100 µs", "100 ms"),
        (DECADES_US, [0.0], "1 µs", "2 µs"),
        (DECADES_US, [1.5e7], "10 s", "20 s"),
        (DECADES_SHARE, [0.7, 0.9], "50 %", "100 %"),
        (DECADES_SHARE, [1.0], "50 %", "100 %"),
        (DECADES_SHARE, [0.03, 1.0], "1 %", "100 %"),
    ],
)
def test_a_logarithmic_axis_has_a_tick_on_either_side(
    scale: list[tuple[float, str]], values: list[float], first: str, last: str
) -> None:
    made = decades(scale, "figures", values)
    places = dict(zip(made["ticktext"], made["tickvals"], strict=True))
    assert made["range"] == pytest.approx([math.log10(places[first]), math.log10(places[last])])
    assert max(places.values()) == max(scale)[0], "no share is more than all"
