"""`replay restore`: its counts add up, every block is verified, bad input ends in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefetchd.bench.restore_result import RestoreResult, decode
from prefetchd.device import OP, READ, WRITE, File
from prefetchd.devices.limited import Limited
from prefetchd.devices.memory import Memory
from prefetchd.lab.requests import read_requests
from tests.replays import run_here, write_trace
from tests.test_restore_requests import chat, write

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
    none = result.runs[0]
    assert none.prefetch.issued == none.outcomes.timely == 0
    assert result.runs[1].prefetch.issued > 0
    assert list((tmp_path / "s").iterdir()) == []
    assert "Time to ready" in page.read_text()


def test_a_limited_device_is_called_emulated(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--limit-blocks-s", "20000", "--requests", "20", "--controls", "")
    result = replayed(run_here(capsys, *words(trace, tmp_path / "s", *more)).out)
    assert result.device.kind in ("EMULATED", "RAM")
    assert "EMULATED" in " ".join(result.device.notes)
    assert result.settings.requests == 20


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--lead-ms", "-1"), "--lead-ms"),
        (("--staging-blocks", "0"), "--staging-blocks"),
        (("--block-bytes", "5000"), "--block-bytes"),
        (("--requests", "0"), "--requests"),
        (("--limit-blocks-s", "-3"), "--limit-blocks-s"),
        (("--limit-blocks-s", "nan"), "--limit-blocks-s"),
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
    run_here(capsys, *words(missing, tmp_path / "s")).failed(2, "none.jsonl", "there is no trace")
    recorded = write_trace(tmp_path / "decode.npz")
    run_here(capsys, *words(recorded, tmp_path / "s")).failed(2, "replay decode")


def test_the_limited_device_serves_reads_in_order_and_writes_at_once() -> None:
    arena = np.zeros(8 * 4096, np.uint8)
    inner = Memory([File(-1, "memory", 1 << 20)], arena, 8)
    device = Limited(inner, 4096 * 1000)  # a page a millisecond
    ops = np.zeros(5, OP)
    ops["tag"] = np.arange(5)
    ops["memory"] = np.arange(5) * 4096
    ops["length"] = 4096
    ops["kind"] = [READ, READ, READ, WRITE, READ]
    assert device.submit(ops) == 5
    seen: list[int] = []
    while len(seen) < 5:
        device.wait(1_000_000_000)
        seen += device.reap()["tag"].tolist()
    assert [tag for tag in seen if tag != 3] == [0, 1, 2, 4]
    assert seen[0] == 3
    assert device.in_flight == 0
    device.close()
    device.close()


def test_a_limit_of_nothing_is_refused() -> None:
    arena = np.zeros(4096, np.uint8)
    inner = Memory([File(-1, "memory", 1 << 20)], arena, 8)
    with pytest.raises(ValueError, match="lets nothing through"):
        Limited(inner, 0)
    inner.close()
