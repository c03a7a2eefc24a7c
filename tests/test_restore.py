"""`replay restore`: its counts add up, every block is verified, bad input ends in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetchd.bench.restore_result import RestoreResult, decode
from prefetchd.lab.requests import read_requests
from tests.replays import run_here, write_trace
from tests.test_restore_requests import call, chat, write

REQUESTS = 40


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Eight sessions in turn over one common block; each turn adds three blocks."""
    lines, free, chains = [], 1, [[0] for _ in range(8)]
    for number in range(REQUESTS):
        chain = chains[number % 8]
        chain += range(free, free + 3)
        free += 3
        lines.append(chat(10 * number, list(chain)))
    return write(tmp_path / "chat.jsonl", lines)


def words(trace: Path, folder: Path, *more: str | Path) -> list[str | Path]:
    quick = ["--idle-s", "0", "--staging-blocks", "64", "--lead-ms", "20", "--json", "-"]
    fast = ["--consume-blocks-s", "5000"]
    return ["replay", "restore", trace, "--store", folder, *quick, *fast, *more]


def replayed(out: str) -> RestoreResult:
    return decode(out.encode())


@pytest.mark.parametrize("hints", ["--hints", "--no-hints"])
def test_every_reusable_block_has_one_outcome_and_was_verified(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], hints: str
) -> None:
    page = tmp_path / "r.html"
    done = run_here(
        capsys, *words(trace, tmp_path / "s", hints, "--lead-ms", "5", "--report", page)
    )
    assert done.code == 0, done.err
    result = replayed(done.out)
    reusable = int(read_requests(trace).reusable().sum())
    assert [(run.name, run.lead_ms) for run in result.runs] == [
        ("resident", 20.0),
        ("none", 20.0),
        ("cross_request", 20.0),
        ("cross_request", 5.0),
    ]
    for run in result.runs:
        assert run.outcomes.total + run.unstored == reusable
        assert run.verified_pages == run.outcomes.total
        assert run.failures == {}
        assert run.lateness_ms.n == REQUESTS
        assert run.time_to_ready_ms.n == REQUESTS - 1
        assert run.reuse_share == pytest.approx(reusable / len(read_requests(trace).blocks))
        fetched = run.prefetch
        assert fetched.useful + fetched.late + fetched.wasted <= fetched.issued
    resident, none, guided = result.runs[:3]
    assert resident.outcomes.retained == resident.outcomes.total
    assert resident.device_bytes == 0
    assert none.prefetch.issued == none.outcomes.timely == 0
    assert guided.prefetch.issued > 0
    assert list((tmp_path / "s").iterdir()) == []
    assert "Time to ready" in page.read_text()


def test_sessions_of_small_blocks_are_grouped_into_larger_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a sub-agent that knows nothing of its session, and requests too short for a block."""
    agent = {"t": 0.05, "type": "subagent", "requests": [call(0.01, [[600, 17]])]}
    turns = [call(0.02 * turn, [[0, 40 + 8 * turn]]) for turn in range(10)]
    sessions = [{"requests": [*turns, agent, call(0.3, [[900, 3]])]}]
    trace = write(tmp_path / "sessions.jsonl", sessions)
    grouped = words(trace, tmp_path / "s", "--group-blocks", "8", "--controls", "resident")
    result = replayed(run_here(capsys, *grouped).out)
    assert (result.settings.group_blocks, result.settings.blocks) == (8, 5 + 9 + 2)
    assert "every 8 blocks" in result.settings.trace_how
    for run in result.runs:
        assert run.outcomes.total + run.unstored == sum(5 + turn for turn in range(9))
        assert run.failures == {}
    run_here(capsys, *words(trace, tmp_path / "s", "--group-blocks", "200")).failed(2, "200 blocks")


def test_a_replay_that_reads_nothing_does_not_call_the_device_measured(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--limit-blocks-s", "5000", "--controls", "resident", "--predictor", "none")
    everything = (*more, "--requests", "3", "--staging-blocks", "64")
    result = replayed(run_here(capsys, *words(trace, tmp_path / "s", *everything)).out)
    assert [run.device_bytes for run in result.runs] == [0, 0]
    assert result.device.kind == "UNREAD"
    assert "UNREAD: no run read anything" in " ".join(result.device.notes)


def test_a_limited_device_is_called_emulated(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--limit-blocks-s", "20000", "--requests", "38", "--controls", "none")
    result = replayed(run_here(capsys, *words(trace, tmp_path / "s", *more)).out)
    assert (result.device.kind, result.device.name) == ("EMULATED", "emulated")
    assert "EMULATED" in " ".join(result.device.notes)
    assert result.settings.requests == 38


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--lead-ms", "-1"), "--lead-ms"),
        (("--staging-blocks", "0"), "--staging-blocks"),
        (("--block-bytes", "5000"), "--block-bytes"),
        (("--requests", "0"), "--requests"),
        (("--limit-blocks-s", "-3"), "--limit-blocks-s"),
        (("--limit-blocks-s", "nan"), "--limit-blocks-s"),
        (("--limit-blocks-s", "0.1", "--block-bytes", "4KiB"), "--limit-blocks-s 0.1"),
        (("--limit-blocks-s", "1", "--speed", "0.01", "--block-bytes", "4KiB"), "give 24.415 to"),
        (("--consume-blocks-s", "0"), "--consume-blocks-s"),
        (("--speed", "0"), "--speed"),
        (("--controls", "cold"), "cold"),
        (("--evict", "mru"), "mru"),
        (("--predictor", "nobody"), "nobody"),
        (("--device", "memory"), "memory"),
        (("--lead-ms", "20"), "twice"),
    ],
)
def test_wrong_options_end_in_one_line(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    told: str,
) -> None:
    run_here(capsys, *words(trace, tmp_path / "s", *more)).failed(2, told)


def test_a_missing_trace_and_a_decode_trace_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.jsonl"
    run_here(capsys, *words(missing, tmp_path / "s")).failed(2, "there is no trace", "none.jsonl")
    recorded = write_trace(tmp_path / "decode.npz")
    run_here(capsys, *words(recorded, tmp_path / "s")).failed(2, "replay decode")
