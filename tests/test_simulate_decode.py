"""`prefetchd simulate decode`: what its figures are, that they repeat to the byte, what it refuses.

The small trace has 6 steps of 4 layers; with a step of warm-up 20 demands are measured.
"""

from __future__ import annotations

import math
from importlib.resources import as_file, files
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prefetchd import metrics
from prefetchd.bench.decode_options import EMBEDDED_TRACE
from prefetchd.bench.report import write_report
from prefetchd.bench.runs import CONTROLS, staging_slots
from prefetchd.bench.tables import print_replay
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.dpu import Dpu, DpuError, read_dpu
from prefetchd.lab.simulate_decode import SimulateSettings, simulate_decode
from tests.replays import (
    LAYERS,
    PAGE_BYTES,
    STEPS,
    replay_words,
    run_child,
    run_here,
    workload,
    write_trace,
)

LAYER_US = 100.0
MEASURED = (STEPS - 1) * LAYERS
DRIVE = DriveProfile(name="test", read_gb_s=4.096, write_gb_s=1.0, read_us=100)
PAGE_US = PAGE_BYTES / 4096


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.npz")


def simulated(trace: Path, *, requests: int = 1, **changes: object) -> metrics.Result:
    decode = workload(trace, requests=requests, shared=0.5)
    settings = SimulateSettings(
        page_bytes=PAGE_BYTES,
        staging_slots=staging_slots(decode, 0.5),
        layer_us=LAYER_US,
        top_k=2,
        warmup_steps=1,
        **changes,  # type: ignore[arg-type]
    )
    return simulate_decode(decode, settings, DRIVE)


def run_of(result: metrics.Result, name: str) -> metrics.Run:
    return next(run for run in result.runs if run.name == name)


def words(trace: Path, *more: str | Path) -> list[str | Path]:
    quick = ("--layer-us", "100", "--page-bytes", "4KiB", "--top-k", "2", "--warmup", "1")
    return ["simulate", "decode", trace, *quick, "--staging", "50%", "--json", "-", *more]


# --- figures ---


def test_without_hints_a_predictor_changes_nothing_that_is_read() -> None:
    """What the eviction learns, and when, depends on the demands alone."""
    with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as path:
        decode = workload(path, top_k=16, steps=40)
    settings = SimulateSettings(
        staging_slots=staging_slots(decode, 0.1),
        predictors=("none", "attention"),
        controls=(),
        hints=False,
        warmup_steps=4,
    )
    runs = simulate_decode(decode, settings, DRIVE).runs
    assert [run.name for run in runs] == ["none", "attention"]
    assert runs[0].outcomes.miss > 0
    assert runs[0].outcomes == runs[1].outcomes
    assert runs[0].device_bytes == runs[1].device_bytes


def test_the_controls_are_what_they_are_called(trace: Path) -> None:
    result = simulated(trace)
    pages = [d.pages for step in workload(trace).demands[1:] for d in step]
    assert [run.name for run in result.runs] == [*CONTROLS, "auto"]
    for run in result.runs:
        assert run.outcomes.total == sum(len(demanded) for demanded in pages)
        assert (run.failures, run.verified_pages, run.cpu_us_per_page) == ({}, 0, None)
        assert run.decision_us == metrics.Distribution()
    resident, cold = run_of(result, "resident"), run_of(result, "cold")
    assert (resident.hit_rate, resident.device_bytes, resident.stalled_share) == (1.0, 0, 0.0)
    assert resident.tpot_ms == LAYERS * LAYER_US / 1e3
    assert cold.miss_rate == 1.0
    assert cold.device_bytes == cold.outcomes.total * PAGE_BYTES
    waits_us = [100 + len(demanded) * PAGE_US for demanded in pages]
    assert cold.tpot_ms == pytest.approx(
        (MEASURED * LAYER_US + sum(waits_us)) / 1e3 / (STEPS - 1), rel=1e-6
    )
    assert cold.stall_us.max == pytest.approx(max(waits_us), rel=1e-6)


def test_a_step_takes_its_compute_and_its_stalls(trace: Path) -> None:
    for run in simulated(trace).runs:
        assert run.stall_us.n == MEASURED
        assert run.tpot_ms >= LAYERS * LAYER_US / 1e3
        assert run.tpot_ratio == pytest.approx(run.tpot_ms / (LAYERS * LAYER_US / 1e3))
        assert (run.stalled_share == 0) == (run.tpot_ratio == 1.0)


def test_beladys_bound_is_no_worse_than_what_evicts_without_prefetch(trace: Path) -> None:
    result = simulated(trace, controls=("none",), predictors=("none",), evict="cycle")
    belady, clairvoyant = result.bounds
    assert belady.miss_rate is not None
    assert all((run.miss_rate or 0) >= belady.miss_rate for run in result.runs)
    assert belady.reads_per_needed == belady.miss_rate
    assert belady.tpot_ms is None
    assert clairvoyant.hit_rate is not None
    assert clairvoyant.hit_rate >= 1 - belady.miss_rate
    assert all(run.tpot_ms >= (clairvoyant.tpot_ms or 0) for run in result.runs)


def test_several_requests_and_their_arrivals(trace: Path) -> None:
    result = simulated(trace, requests=3, controls=("resident", "none"))
    demanded = workload(trace, requests=3, shared=0.5).demands[1:]
    expected = sum(len(d.pages) for step in demanded for d in step)
    assert [run.outcomes.total for run in result.runs] == [expected] * 3


def test_the_link_and_the_cost_of_deciding_are_modelled(trace: Path) -> None:
    free = simulated(trace)
    dpu = Dpu(name="slow", decision_us=30.0, link_gb_s=0.4096)
    costly = simulated(trace, dpu=dpu)
    resident = run_of(costly, "resident")
    pages = [len(d.pages) for step in workload(trace).demands[1:] for d in step]
    handover_us = sum(pages) * PAGE_BYTES / 409.6
    assert resident.tpot_ms == pytest.approx(
        (MEASURED * LAYER_US + handover_us) / 1e3 / (STEPS - 1)
    )
    assert resident.effective_latency_us is not None
    assert run_of(free, "resident").effective_latency_us == 0
    auto = run_of(costly, "auto")
    assert (auto.decision_us.p50, auto.decision_us.max) == (30.0, 30.0)
    assert costly.device.gpu.engine == "at 0.4096 GB/s"
    assert costly.settings.more["dpu"] == "slow"


def test_rounds_draw_slow_reads_of_their_own(trace: Path) -> None:
    decode = workload(trace)
    settings = SimulateSettings(
        page_bytes=PAGE_BYTES,
        staging_slots=staging_slots(decode, 0.5),
        layer_us=LAYER_US,
        warmup_steps=1,
        rounds=3,
        controls=("cold",),
        predictors=(),
    )
    tail = msgspec.structs.replace(DRIVE, read_tail=((0.5, 120.0), (1.0, 900.0)))
    [steady] = simulate_decode(decode, settings, DRIVE).runs
    [unsteady] = simulate_decode(decode, settings, tail).runs
    assert len(set(steady.tpot_ms_rounds)) == 1
    assert len(set(unsteady.tpot_ms_rounds)) == 3


def test_the_outcomes_are_those_of_a_replay_with_the_same_eviction(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without prefetch nothing depends on time, so a real run must find the very same pages."""
    replayed = run_here(
        capsys, *replay_words(trace, tmp_path / "store", "--device", "threads"), "--controls=none"
    ).result()
    result = run_here(capsys, *words(trace, "--controls", "none")).result()
    assert run_of(result, "none").outcomes == run_of(replayed, "none").outcomes
    assert run_of(result, "none").device_bytes == run_of(replayed, "none").device_bytes
    assert run_of(result, "none").per_layer == run_of(replayed, "none").per_layer
    assert run_of(result, "none").far == run_of(replayed, "none").far


# --- the command ---


def test_the_same_seed_gives_the_same_bytes_under_any_hash_seed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "drive.toml"
    drive.write_text(
        'name = "x"\nread_gb_s = 4\nwrite_gb_s = 1\nread_us = 100\n'
        "read_tail = [[0.9, 110.0], [1.0, 400.0]]\n"
    )
    told = []
    for hash_seed, seed in (("0", "1"), ("1", "1"), ("4242", "1"), ("0", "2")):
        monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        more = ("--device-profile", drive, "--seed", seed, "--requests", "2")
        done = run_child(words(trace, *more))
        assert done.code == 0, done.err
        told.append(done.out)
    assert told[0] == told[1] == told[2]
    assert told[3] != told[0]


def test_the_json_says_what_it_is(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_here(capsys, *words(trace))
    result = done.result()
    assert result.schema == "prefetchd.simulate.decode/1"
    assert (result.device.kind, result.device.name) == ("SIMULATED", "8-pages-per-300us")
    assert (result.settings.seed, result.settings.rounds) == (1, 1)
    assert metrics.encode(result).decode().strip() == done.out.strip()
    assert not math.isnan(result.runs[0].tpot_ms)


def test_table_and_report_show_the_bound(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulated(trace)
    print_replay(result)
    out = capsys.readouterr().out
    assert "SIMULATED: a modelled drive under a virtual clock" in " ".join(out.split())
    assert [line for line in out.splitlines() if line.startswith("belady ")]
    assert "on none" not in out
    write_report(result, tmp_path / "report.html")
    body = (tmp_path / "report.html").read_text().split("<script")[0]
    assert '<th scope="row">belady</th>' in body
    assert "prefetchd simulate &middot;" in body
    for untrue in ("in real time", "from none", "prefetchd replay", "GPU device modelled"):
        assert untrue not in body


def test_staging_is_the_dpus_unless_it_is_given(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dpu = tmp_path / "dpu.toml"
    dpu.write_text('name = "d"\ndecision_us = 5\ncores = 2\nstaging_bytes = 131072\n')
    base = [word for word in words(trace, "--controls", "none") if word not in ("--staging", "50%")]
    given: list[list[str | Path]] = [["--dpu", dpu], ["--dpu", dpu, "--staging", "60%"], []]
    slots = [run_here(capsys, *base, *m).result().settings.staging_slots for m in given]
    pages = workload(trace).geometry.pages
    assert slots == [32, int(0.6 * pages), pages // 4]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--device-profile", "nosuch"], ["no drive profile", "8-pages-per-300us"]),
        (["--dpu", "nosuch.toml"], ["nosuch.toml", "ENOENT"]),
        (["--predictor", "nosuch"], ["no predictor", "nosuch"]),
        (["--controls", "nosuch"], ["no control", "nosuch"]),
        (["--evict", "nosuch"], ["no eviction", "nosuch"]),
        (["--warmup", "6"], ["leave none to measure"]),
        (["--staging", "4KiB"], ["too small"]),
    ],
)
def test_what_makes_no_sense_is_told_with_exit_code_2(
    more: list[str], said: list[str], trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(capsys, *words(trace), *more).failed(2, *said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cores = 0", "cores is 0"),
        ("decision_us = -1", "decision_us is -1"),
        ("cores = 2\nspeed = 1", "line 2: there is no key speed.*decision_us, cores"),
        ("link_gb_s = []", "line 1: link_gb_s: expected a number, got a list"),
        ("= x", "cannot be used"),
    ],
)
def test_a_dpu_that_makes_no_sense(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "dpu.toml").write_text(text)
    with pytest.raises(DpuError, match=said):
        read_dpu(tmp_path / "dpu.toml")


def test_a_dpus_handover() -> None:
    assert Dpu().handover_ns(1 << 20) == 0
    assert Dpu(link_gb_s=25.0).handover_ns(np.int64(25_000)) == 1_000  # type: ignore[arg-type]


def test_it_is_said_where_the_seed_changes_nothing(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "the seed changes nothing"
    for more in ("--rounds 2", "--seed 7"):
        assert told in run_here(capsys, *words(trace), *more.split()).out
    for more in ("", "--seed 7 --device-profile samsung-pm1743"):
        assert told not in run_here(capsys, *words(trace), *more.split()).out


def test_a_trace_without_hints_is_no_fault_of_the_predictor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "bare.npz", hint_ids=None, hint_mass=None)
    told = "no hints: predictors that follow hints saw none"
    done = run_here(capsys, *words(path))
    assert told in str(done.result().notes)
    assert told not in run_here(capsys, *words(path), "--no-hints").out
    score = run_here(capsys, "score", path, *words(path)[3:], "--jobs", "1")
    assert told in score.out
