"""Sessions laid side by side: when each begins, what is live, and blocks taken together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefetchd.bench.restore_result import decode
from prefetchd.lab.agents import interleaved, live_contexts
from tests.replays import run_here
from tests.test_restore_requests import call, write
from tests.test_simulate_restore import traffic

SECOND = 1_000_000_000


def test_sessions_begin_apart_and_then_as_others_end() -> None:
    load = replace(
        traffic((0, [0]), (9, [0, 1]), (30, [2]), (33, [2, 3]), (60, [4]), (62, [4, 5])),
        session=np.array([0, 0, 1, 1, 2, 2]),
        stops=tuple("abcdef"),
    )
    # The first lasts until 9 s, the second from 2 to 5 s; the third begins at 5 s.
    both = interleaved(load, 2, gap_s=2)
    assert (both.arrival_ns / SECOND).tolist() == [0, 2, 5, 5, 7, 9]
    assert both.stops == ("a", "c", "d", "e", "f", "b")
    assert [both.chain(n).tolist() for n in range(6)] == [[0], [1], [1, 2], [3], [3, 4], [0, 5]]
    assert live_contexts(both).tolist() == [1, 2, 3, 2, 3, 2]
    assert len(interleaved(load, 2, limit=3)) == 3
    with pytest.raises(ValueError, match="3 sessions cannot be 4"):
        interleaved(load, 4)


def test_agents_are_simulated_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three agents, two at a time, whose context grows by four short blocks a turn."""
    turns = [call(10.0 * n, [[0, 40 + 4 * n]]) for n in range(5)]
    trace = write(tmp_path / "agents.jsonl", [{"requests": turns}] * 3)
    words = ["--live-sessions", "2", "--group-blocks", "4", "--take-blocks", "8"]
    words += ["--live-share", "50%", "--limit-blocks-s", "100", "--lead-ms", "50", "--json", "-"]
    done = run_here(capsys, "simulate", "restore", trace, *words)
    assert done.code == 0, done.err
    result = decode(done.out.encode())
    assert (result.settings.requests, result.settings.blocks) == (15, 3 * 14)
    none, predicted = result.runs[1:]
    assert none.outcomes.total == 3 * (10 + 11 + 12 + 13)
    # Half of one to two contexts: the other turn pushes out what is needed next.
    assert result.settings.staging_blocks == 9
    assert none.at_start_share is not None
    assert predicted.at_start_share is not None
    assert predicted.at_start_share > none.at_start_share
    run_here(capsys, "simulate", "restore", trace, "--live-share", "x").failed(2, "--live-share")
    run_here(capsys, "simulate", "restore", trace, "--live-sessions", "4").failed(2, "3 sessions")
