"""`prefetchd score`: its rows are those of single simulations, the same wherever they are run.

The small traces: a decode of 6 steps of 4 layers, and requests of which most come back.
"""

from __future__ import annotations

import csv
import io
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from prefetchd.bench.runs import ReplayError
from prefetchd.drive_profile import DEFAULT, load_profile
from prefetchd.lab.score import count_tasks, related, score
from prefetchd.lab.score_cell import run_bounds, run_cell
from prefetchd.lab.score_grid import Grid, cells, places, same
from prefetchd.lab.score_result import Cost, Row, Score, TraceFile, decode, encode
from prefetchd.lab.score_table import score_table
from prefetchd.lab.score_workers import WorkersError, workers
from prefetchd.lab.trace_format import TraceWriter
from prefetchd.lab.trace_schema import TraceHeader
from prefetchd.lab.watch import EDGES_MS, Watch
from prefetchd.model import (
    Completed,
    Demanded,
    Geometry,
    Idle,
    IoClass,
    Outcome,
    Read,
    Ready,
)
from tests.replays import BLOCK_TOKENS, HEADS, LAYERS, run_here, trace_columns, write_trace

PROFILE = load_profile(DEFAULT)


def write_requests(path: Path) -> Path:
    """Sessions of growing prompts, so that nearly all a request needs was there before."""
    random = np.random.default_rng(3)
    chains = [list(range(100 * session, 100 * session + 7)) for session in range(16)]
    lines = []
    for number in range(50):
        chain = chains[int(random.integers(len(chains)))]
        chain.append(chain[-1] + 1)
        line = {"timestamp": 137 * number, "input_length": 512 * len(chain), "output_length": 1}
        lines.append(msgspec.json.encode({**line, "hash_ids": chain}) + b"\n")
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a trace of each kind."""
    folder = tmp_path_factory.mktemp("traces")
    write_trace(folder / "d.npz")
    write_requests(folder / "r.jsonl")
    return folder


@pytest.fixture(scope="module")
def grid(folder: Path) -> Grid:
    return Grid(
        traces=(
            TraceFile(name="d", regime="decode", path=str(folder / "d.npz")),
            TraceFile(name="r", regime="restore", path=str(folder / "r.jsonl")),
        ),
        stagings=("50%",),
        layer_us=(100.0,),
        lead_ms=(20.0,),
        hints=(True, False),
        warmup_steps=1,
        top_k=2,
        page_bytes=4096,
        limit_blocks_s=100.0,
    )


@pytest.fixture(scope="module")
def found(grid: Grid) -> Score:
    """All of it, simulated in this process."""
    return scored(grid)


def scored(grid: Grid, jobs: int = 1, cluster: str | None = None) -> Score:
    with workers(jobs, cluster) as executor:
        return score(grid, PROFILE, executor)


def exact(found: Score) -> bytes:
    """Everything but what was measured."""
    rows = [msgspec.structs.replace(row, cost=Cost()) for row in found.rows]
    return encode(msgspec.structs.replace(found, rows=rows))


def row_of(found: Score, trace: str, name: str) -> Row:
    """With hints."""
    rows = [row for row in found.rows if row.cell.place.hints and row.cell.place.trace == trace]
    return next(row for row in rows if row.cell.name == name)


# --- where it runs ---


def test_rows_are_the_same_in_this_process_in_two_and_on_a_cluster_of_two(
    grid: Grid, found: Score
) -> None:
    from distributed import LocalCluster

    here = exact(found)
    assert exact(scored(grid, jobs=2)) == here
    with LocalCluster(  # type: ignore[no-untyped-call]
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        assert exact(scored(grid, cluster=cluster.scheduler_address)) == here


def test_the_order_of_ending_is_not_that_of_the_rows(grid: Grid, found: Score) -> None:
    class Backwards(Executor):
        """Runs all that it was given once the last has come, last first."""

        def __init__(self, count: int) -> None:
            self.count = count
            self.given: list[tuple[Future[Any], Any, Any]] = []

        def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self.given.append((future, fn, args))
            if len(self.given) == self.count:
                for left, function, given in reversed(self.given):
                    left.set_result(function(*given))
            return future

    told: list[str] = []
    executor = Backwards(count_tasks(grid))
    turned = score(grid, PROFILE, executor, lambda name, count: told.append(name))
    assert exact(turned) == exact(found)
    assert [row.cell for row in found.rows] == cells(grid)
    assert [one.place for one in found.bounds] == places(grid)
    assert len(told) == count_tasks(grid)


def test_a_cluster_that_is_not_there_or_has_no_workers_is_told() -> None:
    from distributed import LocalCluster

    with (
        pytest.raises(WorkersError, match=r"no Dask scheduler answers at tcp:"),
        workers(1, "tcp://127.0.0.1:1", timeout_s=0.2),
    ):
        pass
    with pytest.raises(WorkersError, match="no address of a Dask"), workers(1, "foo"):
        pass
    with (
        LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=0, processes=False, protocol="tcp", dashboard_address=None
        ) as cluster,
        pytest.raises(WorkersError, match="has no workers"),
        workers(1, cluster.scheduler_address),
    ):
        pass


# --- what a row says ---


def test_a_control_that_is_run_once_is_the_same_wherever_it_stands(grid: Grid) -> None:
    grid = msgspec.structs.replace(grid, stagings=("50%", "70%"), lead_ms=(20.0, 30.0))
    wanted = cells(grid)
    spared = [cell for cell in wanted if same(cell, grid) != cell]
    assert {cell.name for cell in spared} == {"resident", "none"}
    for cell in spared:
        one, other = run_cell(cell, grid, PROFILE), run_cell(same(cell, grid), grid, PROFILE)
        assert msgspec.structs.replace(one, cell=other.cell, cost=other.cost) == other


def test_controls_frame_the_gap_and_shares_add_up(found: Score) -> None:
    for row in found.rows:
        rates = (row.hit_rate, row.late_rate, row.miss_rate)
        assert sum(rate or 0 for rate in rates) == pytest.approx(1)
        assert sum(row.timeliness) >= row.prefetch.useful
        told = row.prefetch.useful + row.prefetch.late + row.prefetch.wasted
        assert told <= row.prefetch.issued
        if row.cell.name == "resident":
            assert (row.hit_rate, row.prefetch.issued, row.device_bytes) == (1.0, 0, 0)
    assert row_of(found, "d", "none+cycle").prefetch.issued == 0, "what eviction alone does"
    for trace in ("d", "r"):
        none, oracle = (row_of(found, trace, name) for name in ("none", "oracle"))
        assert (none.gap_closed, oracle.gap_closed) == (0.0, 1.0)
        assert none.time_ms > oracle.time_ms
        auto = row_of(found, trace, "auto")
        assert auto.gap_closed is not None
        assert auto.gap_closed == pytest.approx(
            (none.time_ms - auto.time_ms) / (none.time_ms - oracle.time_ms)
        )
    hinted = row_of(found, "r", "cross_request")
    assert (hinted.hit_rate or 0) > (row_of(found, "r", "none").hit_rate or 1)
    assert hinted.cost.us_per_page


def test_a_gap_of_nothing_is_none(found: Score) -> None:
    rows = [msgspec.structs.replace(row, time_ms=3.0) for row in found.rows]
    assert {row.gap_closed for row in related(rows)} == {None}


def test_no_bound_is_worse_than_a_run(grid: Grid, found: Score) -> None:
    for one in found.bounds:
        belady, clairvoyant = one.bounds
        assert (clairvoyant.hit_rate or 0) >= (belady.hit_rate or 1)
        for row in found.at(one.place)[0]:
            if row.cell.name == "none":
                assert (row.miss_rate or 0) >= (belady.miss_rate or 1) - 1e-12
            assert row.time_ms >= (clairvoyant.tpot_ms or 0)
    assert run_bounds(places(grid)[0], grid, PROFILE) == found.bounds[0]


def test_slack_is_the_time_between_arrival_and_demand_or_the_wait() -> None:
    watch = Watch(Geometry(1, 8), 4)
    slots, one = np.array([2]), np.array([1])

    def begin(at_ns: int, page: int, io_class: IoClass) -> None:
        watch(at_ns, Idle(), [Read(np.array([page]), slots, one, io_class, 0)])

    def read(at_ns: int, page: int, io_class: IoClass) -> None:
        begin(at_ns, page, io_class)
        watch(at_ns + 10, Completed(slots, one, np.array([True])), [])

    def demand(at_ns: int, page: int, outcome: Outcome, wait_ns: int) -> None:
        outcomes, waits = np.array([outcome], np.uint8), np.array([wait_ns])
        ready = Ready(7, slots, outcomes, waits)
        watch(at_ns, Demanded(7, np.array([page]), 0), [ready])

    read(0, 3, IoClass.PREFETCH)
    read(50, 4, IoClass.DEMAND)  # into the slot that page 3 had: its arrival is none of page 3's
    demand(2_000_010, 3, Outcome.TIMELY, 0)
    begin(0, 5, IoClass.PREFETCH)
    demand(0, 5, Outcome.LATE, 500_000)
    demand(0, 5, Outcome.LATE, 400_000)  # the prefetch was late once, and is not counted twice
    begin(0, 7, IoClass.DEMAND)
    demand(0, 7, Outcome.LATE, 500_000)  # on its way for another demand
    demand(0, 6, Outcome.MISS, 500_000)
    expected = np.zeros(len(EDGES_MS) + 1, int)
    expected[np.searchsorted(EDGES_MS, 2.0, side="right")] = 1
    expected[np.searchsorted(EDGES_MS, -0.5, side="right")] = 1
    assert watch.counts.tolist() == expected.tolist()


def test_names_tell_evictions_apart_and_twice_is_refused(grid: Grid) -> None:
    several = msgspec.structs.replace(grid, predictors=("none", "auto"), evicts=("lru", "cycle"))
    names = dict.fromkeys(cell.name for cell in cells(several) if cell.kind == "predictor")
    assert list(names) == ["none+lru", "none+cycle", "auto+lru", "auto+cycle"]
    with pytest.raises(ReplayError, match="named twice"):
        cells(msgspec.structs.replace(grid, predictors=("a.py", "there/a.py")))


# --- the command ---


def words(folder: Path, *more: str | Path) -> list[str | Path]:
    quick = ("--layer-us", "100", "--page-bytes", "4KiB", "--top-k", "2", "--warmup", "1")
    place = ("--staging", "50%", "--lead-ms", "20", "--limit-blocks-s", "100", "--jobs", "1")
    return ["score", folder / "d.npz", folder / "r.jsonl", *quick, *place, *more]


def test_table_json_csv_and_page_say_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("s.json", "s.csv", "s.html")]
    out = ("--json", files[0], "--csv", files[1], "--report", files[2])
    done = run_here(capsys, *words(folder, *out))
    assert done.code == 0, done.err
    found = decode(files[0].read_bytes())
    assert encode(found) == files[0].read_bytes()
    assert {row.cell.name for row in found.rows} > {"resident", "none", "oracle", "auto"}
    lines = list(csv.DictReader(io.StringIO(files[1].read_text())))
    assert len(lines) == len(found.rows) + sum(len(one.bounds) for one in found.bounds)
    page = files[2].read_text()
    for row, line in zip(found.rows, lines, strict=False):
        assert (line["name"], float(line["time_ms"])) == (row.cell.name, row.time_ms)
        assert row.cell.name in done.out
        assert f"{row.cell.name}</th>" in page
    for told in ("belady", "clairvoyant", "SIMULATED", "staging 50%", "gap", "timeliness"):
        assert told in done.out
        assert told in page
    assert "http" not in page.split("<script>")[0].replace("http-equiv", "")


def test_a_synthetic_trace_is_called_so_in_every_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {name: one for name, one in trace_columns().items() if one.ndim}
    header = TraceHeader(
        kind="decode",
        name="made",
        synthetic=True,
        block_tokens=BLOCK_TOKENS,
        prompt_tokens=BLOCK_TOKENS * 18,
        layers=LAYERS,
        kv_heads=HEADS,
    )
    with TraceWriter(tmp_path / "d.npz", header) as writer:
        writer.write(columns)
    quick = ("--top-k", "2", "--warmup", "1", "--staging", "50%", "--jobs", "1")
    for more in (("--report", tmp_path / "s.html"), ("--json", "-"), ("--csv", "-")):
        done = run_here(capsys, "score", tmp_path / "d.npz", *quick, *more)
        assert done.code == 0, done.err
        assert "made (SYNTHETIC)" in done.out
    assert '<span class="badge">SYNTHETIC</span>' in (tmp_path / "s.html").read_text()
    [line, *_] = csv.DictReader(io.StringIO(done.out))
    assert line["synthetic"] == "1"


def test_a_narrow_terminal_leaves_columns_out_and_says_so(found: Score) -> None:
    text = io.StringIO()
    Console(file=text, width=80, highlight=False).print(score_table(found))
    told = text.getvalue()
    assert max(len(line) for line in told.splitlines()) <= 80
    assert "Left out for want of width: stalled" in told
    assert "\N{HORIZONTAL ELLIPSIS}" not in told


def test_a_file_is_found_from_where_it_was_named(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are the same wherever the folder lies."""
    rows = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            "from prefetchd.predictor import Predictor\n\nclass Mine(Predictor): ...\n"
        )
        own = msgspec.structs.replace(
            grid, predictors=("./mine.py",), folder=str(tmp_path / name), traces=grid.traces[:1]
        )
        monkeypatch.chdir(tmp_path)
        rows.append(scored(own))
    assert exact(rows[0]) == exact(rows[1])
    assert {row.cell.predictor for row in rows[0].rows} > {"./mine.py"}


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_fault_in_a_file_is_told_with_its_line_and_cell(
    jobs: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from prefetchd.predictor import Predictor\n\nclass Mine(Predictor):\n    def "
    body = "predict(self, now_ns, limit):\n        return 1 / 0\n"
    (tmp_path / "mine.py").write_text(text + body)
    more = ("--predictor", tmp_path / "mine.py", "--jobs", jobs)
    done = run_here(capsys, *words(folder, *more))
    done.failed(2, "mine (", "staging 50%", "mine.py, line 5", "ZeroDivisionError")
    (tmp_path / "mine.py").write_text(f"{text}__init__(self, geometry, slots):\n        a\n")
    run_here(capsys, *words(folder, *more)).failed(2, "mine.py, line 5", "NameError")


def test_a_worker_that_dies_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom prefetchd.predictor import Predictor\n\nclass Mine(Predictor):\n"
        "    def predict(self, now_ns, limit):\n        os._exit(9)\n"
    )
    done = run_here(capsys, *words(folder, "--predictor", tmp_path / "mine.py", "--jobs", "2"))
    done.failed(3, "a worker process ended", "--jobs")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--staging", "1%"], ["staging 1%", "too small"]),
        (["--staging", "much"], ["staging much"]),
        (["--predictor", "nosuch"], ["no predictor", "nosuch"]),
        (["--evict", "nosuch"], ["no eviction", "nosuch"]),
        (["--device-profile", "nosuch"], ["no drive profile"]),
        (["--lead-ms", "-1"], ["lead of -1"]),
        (["--limit-blocks-s", "nan"], ["no rate"]),
        (["--json", "-", "--csv", "-"], ["stdout"]),
        (["--csv", "nosuch/s.csv"], ["nosuch/s.csv", "--csv"]),
        (["d.npz"], ["called 'd'"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(
    more: list[str],
    said: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    run_here(capsys, *words(folder, *more)).failed(2, *said)
