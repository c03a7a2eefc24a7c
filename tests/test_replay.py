"""Replays of a small decode: what their result says must add up, whatever the timing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import metrics
from prefetchd.bench.replay import ReplaySettings, Report, prepare_store
from prefetchd.engine import Engine
from prefetchd.metrics import Run
from tests.replays import (
    LAYERS,
    PAGE_BYTES,
    QUICK,
    STEPS,
    replay_words,
    run_child,
    run_here,
    workload,
    write_trace,
)

ROUNDS, WARMUP = 2, 2
PREDICTORS = ("none", "sliding_window", "attention", "cross_request", "auto")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "tiny.npz")


@pytest.fixture(scope="module")
def replayed(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, str]:
    """One replay of everything: the JSON as it was written, the report, stderr."""
    folder = tmp_path_factory.mktemp("replayed")
    words = replay_words(trace, folder / "store", "--rounds", str(ROUNDS), "--layer-us", "50")
    words += ["--warmup", str(WARMUP), "--json", folder / "r.json", "--report", folder / "r.html"]
    for name in PREDICTORS:
        words += ["--predictor", name]
    done = run_child(words)
    assert done.code == 0, done.err
    assert "vs" in done.out
    return json.loads((folder / "r.json").read_bytes()), (folder / "r.html").read_text(), done.err


@pytest.fixture(scope="module")
def runs(replayed: tuple[Any, str, str]) -> dict[str, Run]:
    result = metrics.decode(json.dumps(replayed[0]).encode())
    return {run.name: run for run in result.runs}


def demanded(trace: Path) -> list[int]:
    """Pages demanded in each step, counted from the trace's columns alone."""
    ids = np.load(trace)["block_ids"][..., :2]
    return [
        sum(len(np.unique(ids[step, layer])) for layer in range(LAYERS)) for step in range(STEPS)
    ]


FIELDS = {
    "": "schema regime device settings runs notes",
    "device": "name engine file_system kind gpu notes",
    "settings": "trace steps warmup_steps rounds layers blocks page_bytes staging_share "
    "staging_slots top_k layer_us hints evict depth seed",
    "run": "name control evict outcomes hit_rate miss_rate stalled_share tpot_ms tpot_ratio "
    "effective_latency_us effective_latency_ratio stall_us prefetch device_bytes achieved_depth "
    "device_gb_s decision_us cpu_us_per_page failures verified_pages",
    "outcomes": "retained timely late miss",
    "stall_us": "p50 p99 p999 max n",
    "prefetch": "issued useful late wasted pollution accuracy coverage wasted_bytes",
    "decision_us": "p50 p99",
}


def test_the_json_has_every_field_that_is_promised(replayed: tuple[Any, str, str]) -> None:
    result = replayed[0]
    assert result["schema"] == "prefetchd.replay.decode/1"
    assert result["regime"] == "sparse decode"
    assert result["device"]["kind"] in ("MEASURED", "RAM", "CACHED")
    assert set(FIELDS[""].split()) <= set(result)
    for part in ("device", "settings"):
        assert set(FIELDS[part].split()) <= set(result[part])
    for run in result["runs"]:
        assert set(FIELDS["run"].split()) <= set(run)
        for part in ("outcomes", "stall_us", "prefetch", "decision_us"):
            assert set(FIELDS[part].split()) <= set(run[part])


def test_every_demanded_page_has_one_outcome_and_was_verified(
    runs: dict[str, Run], trace: Path
) -> None:
    pages = demanded(trace)
    for run in runs.values():
        assert run.outcomes.total == ROUNDS * sum(pages[WARMUP:])
        assert run.verified_pages == ROUNDS * sum(pages)
        assert run.failures == {}
        assert sum(run.per_layer.miss) == run.outcomes.miss
        assert sum(run.per_layer.late) == run.outcomes.late
        assert run.stall_us.n == ROUNDS * (STEPS - WARMUP) * LAYERS
        assert len(run.step_ms) == STEPS
        assert len(run.tpot_ms_rounds) == ROUNDS


def test_the_figures_follow_from_the_counts(runs: dict[str, Run]) -> None:
    resident = runs["resident"]
    for run in runs.values():
        found, fetched = run.outcomes, run.prefetch
        assert run.hit_rate == pytest.approx((found.retained + found.timely) / found.total)
        assert run.miss_rate == pytest.approx(found.miss / found.total)
        assert run.tpot_ratio == pytest.approx(run.tpot_ms / resident.tpot_ms)
        assert run.effective_latency_us is not None
        assert resident.effective_latency_us is not None
        assert run.effective_latency_ratio == pytest.approx(
            run.effective_latency_us / resident.effective_latency_us
        )
        assert fetched.useful + fetched.late + fetched.wasted <= fetched.issued
        assert fetched.wasted_bytes == fetched.wasted * PAGE_BYTES
        assert run.device_bytes % PAGE_BYTES == 0
        assert fetched.reads_per_needed == pytest.approx(
            run.device_bytes / PAGE_BYTES / found.total
        )
        assert (found.miss + found.late > 0) == bool(run.stalled_share)


def test_the_controls_are_what_they_claim(runs: dict[str, Run]) -> None:
    assert list(runs)[:4] == ["resident", "none", "cold", "oracle"]
    assert [run.control for run in runs.values()] == [True] * 4 + [False] * len(PREDICTORS)
    resident, cold, none = runs["resident"].outcomes, runs["cold"].outcomes, runs["none"].outcomes
    assert resident.retained == resident.total
    assert runs["resident"].device_bytes == 0
    assert cold.miss == cold.total
    assert none.timely == none.late == runs["none"].prefetch.issued == 0
    assert 0 < none.miss < none.total
    assert runs["oracle"].outcomes.miss <= none.miss
    assert runs["none+cycle"].prefetch.issued == 0


def test_the_report_shows_every_run_and_is_named_with_its_whole_path(
    replayed: tuple[Any, str, str], runs: dict[str, Run]
) -> None:
    _, page, err = replayed
    assert not [name for name in runs if name not in page]
    named = [line for line in err.splitlines() if line.startswith("report: ")]
    assert Path(named[0].removeprefix("report: ")).is_absolute()


def test_json_on_stdout_is_json_alone(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(capsys, *replay_words(trace, tmp_path / "s", "--controls", " none,"))
    assert [run.name for run in done.result().runs] == ["none", "auto"]
    assert json.loads(done.out)["settings"]["trace"] == "tiny"


OWN = """
from prefetchd.predictor import Guess, Predictor


class Mine(Predictor):
    def on_page_hint(self, hint):
        raise ArithmeticError("a hint came")
"""


def test_a_predictor_is_taken_from_a_file_and_hears_of_hints_only_if_there_are_any(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = replay_words(trace, tmp_path / "s", "--controls", "", "--predictor", "./mine.py")
    quiet = run_here(capsys, *words, "--no-hints").result()
    assert [run.name for run in quiet.runs] == ["mine"]
    assert not quiet.settings.hints
    run_here(capsys, *words).failed(2, "mine.py, line 7", "on_page_hint", "a hint came")


@pytest.mark.parametrize(("word", "tends"), [("--tend", True), ("--no-tend", False)])
def test_a_replay_runs_and_says_whether_the_host_thread_tends_the_engine(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    tends: bool,
) -> None:
    tended: list[int] = []
    tend = Engine.tend

    def noting(engine: Engine, until_ns: int) -> None:
        tended.append(until_ns)
        tend(engine, until_ns)

    monkeypatch.setattr(Engine, "tend", noting)
    result = run_here(capsys, *replay_words(trace, tmp_path / "s", "--controls", "", word)).result()
    assert result.settings.more["tend"] is tends
    assert len(tended) == (STEPS * LAYERS if tends else 0)
    assert result.runs[0].verified_pages == sum(demanded(trace))


@pytest.mark.parametrize("predictor", ["none", "cross_request"])
def test_requests_that_share_a_prefix_fetch_it_once(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], predictor: str
) -> None:
    words = replay_words(trace, tmp_path / "s", "--requests", "3", "--shared", "50%")
    words += ["--staging", "100%", "--warmup", "0", "--controls", "", "--predictor", predictor]
    [run] = run_here(capsys, *words).result().runs
    load = workload(trace, requests=3, shared=0.5)
    alone = workload(trace, requests=3, shared=0.0)
    needed = len(np.unique(np.concatenate(load.future())))
    pages_read = run.device_bytes // PAGE_BYTES
    assert load.geometry.pages < alone.geometry.pages
    assert run.outcomes.total == sum(len(demand.pages) for step in load.demands for demand in step)
    if predictor == "none":
        assert pages_read == run.outcomes.miss == needed
    else:
        assert needed <= pages_read <= load.geometry.pages
        assert run.prefetch.issued > 0
        assert run.outcomes.miss < needed


def test_a_store_that_is_there_already_is_not_written_again(trace: Path, tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        settings = ReplaySettings(page_bytes=PAGE_BYTES)
        prepare_store(tmp_path / "s", workload(trace), settings, Report(say=said.append))
    assert said == ["writing the store"]


@pytest.mark.parametrize("device", ["threads", "liburing", "uring"])
def test_the_result_names_the_engine_that_ran(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    words = replay_words(trace, tmp_path / "s", "--controls", "", "--device", device)
    result = run_here(capsys, *words).result()
    if device == "threads" or result.device.name != "threads":
        assert result.device.name == device
        assert {"threads": "aiofiles"}.get(device, "io_uring") in result.device.engine
    else:
        assert "io_uring" in " ".join(result.device.notes)


def test_the_embedded_trace_replays_from_any_folder(tmp_path: Path) -> None:
    words = ["replay", "decode", *QUICK, "--steps", "2", "--controls", "none", "--json", "-"]
    result = run_child(words, cwd=tmp_path).result()
    assert result.settings.trace == "summ_pydocs_demo"
    assert [run.name for run in result.runs] == ["none", "auto"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_replay_leaves_nothing_behind(
    number: int, code: int, trace: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "prefetchd.cli", "replay", "decode", str(trace), *QUICK]
    child = subprocess.Popen(
        [*command, "--layer-us", "1e6"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with child:
        assert child.stderr is not None
        assert str(tmp_path) in child.stderr.readline()
        child.send_signal(number)
        assert "Traceback" not in child.stderr.read()
    assert child.returncode == code
    assert list(tmp_path.iterdir()) == []
