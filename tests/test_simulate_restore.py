"""`simulate restore`: outcomes worked out by hand, sums, and the same bytes under any hash seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prefetchd.bench.restore import RestoreLog
from prefetchd.bench.restore_replay import Plan
from prefetchd.bench.restore_result import (
    SIMULATED,
    RestoreResult,
    RestoreSettings,
    decode,
    run_figures,
)
from prefetchd.bench.restore_result import staged_share as staged_share_of
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.lab.simulate_restore import limited, run_plan, simulate_restore
from tests.replays import run_child, run_here
from tests.test_restore_requests import chat, write

MS = 1_000_000
WORDS = ["--staging-blocks", "64", "--limit-blocks-s", "100", "--lead-ms", "20", "--json", "-"]


def traffic(*requests: tuple[float, Sequence[int]], name: str = "invented") -> Requests:
    """Requests as (seconds, blocks); blocks are numbered by first need."""
    chains = [np.array(blocks, np.int64) for _, blocks in requests]
    count = len(requests)
    return Requests(
        name=name,
        arrival_ns=np.array([int(at * 1e9) for at, _ in requests], np.int64),
        starts=np.cumsum([0, *(len(chain) for chain in chains)]),
        blocks=np.concatenate(chains),
        session=np.zeros(count, np.int64),
        stops=("",) * count,
        think_ns=np.zeros(count, np.int64),
        quantum_ns=0,
        how="invented",
    )


def settings(load: Requests, **changes: object) -> RestoreSettings:
    """A device of 10 blocks a second, a consumer of 100, staging for eight."""
    told: dict[str, object] = {
        "trace": load.name,
        "trace_how": load.how,
        "requests": len(load),
        "blocks": load.distinct,
        "block_bytes": 4096,
        "staging_blocks": 8,
        "leads_ms": [150.0],
        "hints": True,
        "limit_blocks_s": 10.0,
        "consume_blocks_s": 100.0,
        "group_blocks": 1,
        "speed": 1.0,
        "evict": "lru",
        "depth": 128,
        "rounds": 1,
        "seed": 1,
    }
    return RestoreSettings(**(told | changes))  # type: ignore[arg-type]


PUSHED_OUT = traffic((0, [0, 1, 2]), (5, range(3, 7)), (6, range(7, 11)), (10, [0, 1, 2]))
"""Between its first and its last request a staging of eight is filled with others' blocks."""


def run(load: Requests, predictor: str, lead_ms: float = 150, **changes: object) -> RestoreLog:
    made = settings(load, **changes)
    plan = Plan(predictor, False, predictor, lead_ms, made.staging_blocks)
    return run_plan(load, made, plan, DriveModel(limited(made)))


def waits_ms(log: RestoreLog) -> list[float]:
    return [float(wait) / MS for wait in np.concatenate(log.waits_ns)]


def test_without_prefetch_every_block_that_is_gone_is_waited_for_in_turn() -> None:
    log = run(PUSHED_OUT, "none")
    assert log.outcomes.tolist() == [0, 0, 0, 3]
    assert waits_ms(log) == [100, 100, 100]
    # 100 ms each, and 10 ms after the first and the second for the consumer.
    assert log.ready_ns.tolist() == [-1, -1, -1, 320 * MS]


def test_a_hint_ahead_of_time_has_blocks_there_in_turn() -> None:
    # Read from 9.85 s on: there at 9.95, 10.05 and 10.15 s; asked for at 10, 10.01 and 10.06 s.
    log = run(PUSHED_OUT, "cross_request")
    assert log.outcomes.tolist() == [0, 1, 2, 0]
    assert waits_ms(log) == [0, 40, 90]
    assert log.ready_ns.tolist()[3] == 150 * MS
    assert run(PUSHED_OUT, "cross_request", 300).outcomes.tolist() == [0, 3, 0, 0]


def test_without_a_hint_two_blocks_are_demanded_ahead_and_the_rest_is_guessed() -> None:
    # Demanded at 9.85 s: there at 9.95 and 10.05 s, the latter after the start; then, at 10.07 s,
    # the third is asked for, which is there at 10.15 s.
    log = run(PUSHED_OUT, "cross_request", hints=False)
    assert log.outcomes.tolist() == [0, 0, 1, 2]
    assert waits_ms(log) == [100, 200, 80]
    assert log.early == 0
    # At 9.7 s: both are there in time, and the guess, too.
    log = run(PUSHED_OUT, "cross_request", 300, hints=False)
    assert log.outcomes.tolist() == [0, 1, 0, 2]
    assert log.early == 2
    assert staged_share_of(log) == 1


def test_without_prefetch_nothing_is_covered_though_one_read_serves_two_requests() -> None:
    twice = traffic((0, [0, 1, 2]), (5, range(3, 7)), (6, range(7, 11)), (10, [0]), (10, [0]))
    log = run(twice, "none")
    assert log.outcomes.tolist() == [0, 0, 1, 1]
    figures = run_figures(
        "none",
        control=True,
        evict="lru",
        lead_ms=150,
        rounds=[log],
        blocks_needed=len(twice.blocks),
        page_bytes=4096,
    )
    assert figures.prefetch.coverage == 0


def test_requests_go_on_in_the_order_in_which_they_were_answered() -> None:
    load = traffic((0, [0]), (5, range(1, 5)), (6, range(5, 11)), (10, [0]), (10.05, [0]))
    log = run(load, "none")
    assert log.outcomes.tolist() == [0, 0, 1, 1]
    assert waits_ms(log) == [100, 50]  # both at once: by one read


def test_blocks_put_are_kept_until_written_or_found_once_they_are() -> None:
    """Half of the slots may be kept: of six blocks four are found at once, two once written."""
    load = traffic((0, range(6)), (1, [*range(6), 6]))
    made = settings(load)
    slow = DriveProfile(name="x", read_gb_s=1, write_gb_s=4096 / 1e9, read_us=0, units=1)  # 1/s
    log = run_plan(
        load, made, Plan("none", False, "none", 0, made.staging_blocks), DriveModel(slow)
    )
    assert log.outcomes.tolist() == [4, 0, 0, 0]
    assert log.unstored == 2
    assert staged_share_of(log) == pytest.approx(4 / 6)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight sessions in turn over one common block; each turn adds three blocks."""
    lines, free, chains = [], 1, [[0] for _ in range(8)]
    for number in range(60):
        chain = chains[number % 8]
        chain += range(free, free + 3)
        free += 3
        lines.append(chat(50 * number, list(chain)))
    return write(tmp_path / "chat.jsonl", lines)


@pytest.mark.parametrize("hints", ["--hints", "--no-hints"])
def test_every_reusable_block_has_one_outcome(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], hints: str
) -> None:
    page = tmp_path / "r.html"
    done = run_here(capsys, "simulate", "restore", trace, *WORDS, hints, "--report", page)
    assert done.code == 0, done.err
    result = decode(done.out.encode())
    load = read_requests(trace)
    reusable = int(load.reusable().sum())
    assert [run.name for run in result.runs] == ["resident", "none", "cross_request"]
    for made in result.runs:
        assert made.outcomes.total + made.unstored == reusable
        assert made.failures == {}
        assert made.reuse_share == pytest.approx(reusable / len(load.blocks))
        assert made.verified_pages == 0
        assert made.cpu_share is None
        assert made.decision_us.n == 0
    assert result.runs[0].staged_share == 1
    assert result.runs[1].prefetch.issued == 0
    assert result.runs[2].prefetch.issued > 0
    belady = result.bounds[0].hit_rate
    assert belady is not None
    assert (result.runs[1].staged_share or 0) <= belady <= 1
    assert (result.schema, result.device.kind) == (SIMULATED, "SIMULATED")
    assert "SIMULATED: a modelled drive under a virtual clock" in page.read_text()


def test_words_and_bounds_of_the_report_are_those_of_a_simulation(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    done = run_here(capsys, "simulate", "restore", trace, *WORDS[:2], "--report", page)
    body = page.read_text().split("<script")[0]
    for told in (done.out, body):
        assert "device as in the profile 8-pages-per-300us" in " ".join(told.split())
        for untrue in ("on none", "as measured", "speed x", "lateness", "not limited"):
            assert untrue not in told
    for bound, label_at in (("belady", '["","belady"]'), ("clairvoyant", '["clairvoyant",""]')):
        assert f'<th scope="row">{bound}</th>' in body
        assert f'"text":{label_at}' in page.read_text()


def test_the_same_call_gives_the_same_bytes_under_any_hash_seed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "tail.toml"
    profile.write_text(
        'name = "tail"\nread_gb_s = 0.001\nwrite_gb_s = 0.001\nread_us = 100\n'
        "read_tail = [[0.9, 200.0], [1.0, 90000.0]]\n"
    )
    words: list[str | Path] = ["simulate", "restore", trace, "--json", "-", "--block-bytes", "4KiB"]
    words += ["--device-profile", profile, "--staging-blocks", "64", "--lead-ms", "5"]
    outs = []
    for hashing, seed in (("1", "1"), ("2", "1"), ("3", "2")):
        monkeypatch.setenv("PYTHONHASHSEED", hashing)
        done = run_child([*words, "--seed", seed])
        assert done.code == 0, done.err
        outs.append(done.out)
    assert outs[0] == outs[1]
    assert outs[0].replace('"seed": 1', '"seed": 2') != outs[2]


def test_a_result_can_be_had_through_python_and_says_what_was_modelled() -> None:
    made, slow = settings(PUSHED_OUT), DriveProfile(name="x", read_gb_s=1, write_gb_s=1, read_us=0)
    result = simulate_restore(
        PUSHED_OUT, made, [Plan("none", True, "none", 0, made.staging_blocks)], slow
    )
    assert isinstance(result, RestoreResult)
    assert "one after another" in result.device.engine


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--lead-ms", "-1"), "--lead-ms"),
        (("--staging-blocks", "0"), "--staging-blocks"),
        (("--block-bytes", "5000"), "--block-bytes"),
        (("--limit-blocks-s", "nan"), "--limit-blocks-s"),
        (("--limit-blocks-s", "1e15"), "--limit-blocks-s 1e+15"),
        (("--limit-blocks-s", "1e-9"), "--limit-blocks-s 1e-09"),
        (("--limit-blocks-s", "0.244", "--block-bytes", "4KiB"), "give 0.245 to 2.44141e+11"),
        (("--consume-blocks-s", "1e-12"), "--consume-blocks-s 1e-12"),
        (("--consume-blocks-s", "inf"), "--consume-blocks-s inf"),
        (("--controls", "cold"), "cold"),
        (("--evict", "mru"), "mru"),
        (("--predictor", "nobody"), "nobody"),
        (("--device-profile", "nothing"), "nothing"),
        (("--dpu", "nothing.toml"), "nothing.toml"),
        (("--lead-ms", "20"), "twice"),
    ],
)
def test_wrong_options_end_in_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], told: str
) -> None:
    run_here(capsys, "simulate", "restore", trace, *WORDS, *more).failed(2, told)


def test_a_trace_of_more_than_a_year_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day_ms = 86_400_000
    path = write(tmp_path / "long.jsonl", [chat(0, [1, 2]), chat(400 * day_ms, [1, 2])])
    run_here(capsys, "simulate", "restore", path, *WORDS).failed(2, "long.jsonl", "400 days")


def test_blocks_are_of_the_bytes_that_the_trace_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "io.csv"
    path.write_text("timestamp,op,size,key\n0,write,419430400,a\n1,read,419430400,a\n")
    for words, size in (((), 2 << 20), (("--block-bytes", "64KiB"), 65536)):
        done = run_here(capsys, "simulate", "restore", path, "--json", "-", *words)
        assert json.loads(done.out)["settings"]["block_bytes"] == size
        done = run_here(
            capsys, "score", path, "--jobs", "1", "--staging", "50%", "--json", "-", *words
        )
        assert json.loads(done.out)["settings"]["block_bytes"] == size


def test_a_block_of_a_trace_takes_whole_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = tmp_path / "io.csv", tmp_path / "io.npz"
    source.write_text("timestamp,op,size,key\n0,write,9000,a\n1,read,9000,a\n")
    words = ["--block-bytes", "4500"]
    assert run_here(capsys, "trace", "convert", source, "--out", path, *words).code == 0
    done = run_here(capsys, "simulate", "restore", path, "--json", "-")
    assert json.loads(done.out)["settings"]["block_bytes"] == 8192
    run_here(capsys, "simulate", "restore", path, *words).failed(2, "--block-bytes 4500")
