"""A small day of sessions: caps and times are kept, nothing leaks, and what is broken is told.

`python -m tests.day_campaign` runs a whole one over recorded sessions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd.lab.requests import Requests, read_requests
from tests.day_books import CapWatch, Violation, check_books, check_growth, check_quiet
from tests.day_campaign import Setup, campaign, summary
from tests.day_requests import Traffic
from tests.day_trace import HOUR_NS, lay_out

SMALL = Setup(
    hours=1.0,
    blocks=256,
    cap_bytes=2 << 20,
    staging=96,
    batch=8,
    ttl_s=600.0,
    check_every=25,
    predictor="cross_request",
)


def invented(path: Path, sessions: int = 12, calls: int = 14) -> Requests:
    """Sessions whose prompts grow from call to call, a minute or so apart, with sub-agents."""
    random = np.random.default_rng(3)
    lines = []
    for _ in range(sessions):
        length, at_s = int(random.integers(8, 16)), 0.0
        requests: list[dict[str, Any]] = []
        for number in range(calls):
            requests.append(_call(at_s, [[0, length]]))
            if number % 5 == 4:
                own = [[0, 4], [5000 + 100 * number, 6]]
                agent = [_call(1.0, own), _call(9.0, own)]
                requests.append({"t": at_s + 2, "type": "subagent", "requests": agent})
            length += int(random.integers(1, 4))
            at_s += float(random.integers(5, 120))
        lines.append(json.dumps({"requests": requests}))
    path.write_text("\n".join(lines) + "\n")
    return read_requests(path)


def _call(at_s: float, runs: list[list[int]]) -> dict[str, Any]:
    return {"t": at_s, "type": "n", "hash_runs": runs, "stop": "tool_use", "think_time": 2.0}


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Requests:
    return lay_out(invented(tmp_path_factory.mktemp("day") / "s.jsonl"), SMALL.hours, 150, 1)


@pytest.mark.parametrize("device", ["uring", "threads", "memory"])
def test_a_day_keeps_its_cap_and_its_times_and_leaks_nothing(
    device: str, day: Requests, tmp_path: Path
) -> None:
    folder = None if device == "memory" else tmp_path / "kv"
    outcome = campaign(folder, day, replace(SMALL, device=device))
    check_growth(outcome.prints[0], outcome.prints[-1])
    writes = outcome.stats.store_writes
    assert outcome.tally.requests == len(day)
    assert outcome.peak_bytes <= SMALL.cap_bytes
    assert min(writes.blocks_evicted, writes.blocks_expired, outcome.tally.verified) > 100
    assert outcome.tally.open_most > 1
    assert outcome.kept == (-1 if folder is None else outcome.stats.blocks_visible)
    assert "hit share" in summary(outcome)


def test_sessions_overlap_come_again_with_fresh_blocks_and_end_with_the_day(
    tmp_path: Path,
) -> None:
    requests = invented(tmp_path / "s.jsonl", sessions=3)
    whole, sampled = lay_out(requests, 0.5, 150, 1), lay_out(requests, 0.5, 150, 4)
    assert np.unique(whole.session).tolist() == list(range(12))
    assert whole.arrival_ns.max() < 0.5 * HOUR_NS
    assert (np.diff(whole.arrival_ns) >= 0).all()
    first, again = np.flatnonzero(whole.session == 0), np.flatnonzero(whole.session == 3)
    assert (np.diff(whole.session) < 0).any(), "sessions overlap"
    for one, other in zip(first.tolist(), again.tolist(), strict=False):
        assert (whole.chain(other) - whole.chain(one) == requests.distinct).all()
    assert 3 * len(whole.blocks) < 12.5 * len(sampled.blocks) < 5 * len(whole.blocks)


def test_what_does_not_hold_is_told(day: Requests) -> None:
    """The campaign must be able to fail: each promise is broken once behind its back."""
    with SMALL.open(None) as runtime:
        traffic = Traffic(runtime, day, SMALL.ttl_s, SMALL.batch)
        chain = day.chain(0)
        traffic._put(1, chain)
        traffic.calm()
        check_books(runtime)
        catalog = runtime._parts.catalog
        behind = runtime._puts.behind  # what it keeps is pinned, too
        assert runtime.engine.wait(lambda: not behind._kept, runtime.engine.clock() + 20 * 10**9)
        with runtime.demand(runtime.pages(traffic.look(chain).blocks[:1], 0)) as ticket:
            with pytest.raises(Violation, match="wrong bytes"):
                traffic.check_bytes(ticket.view(0)[None].copy(), chain[1:2])
            with pytest.raises(Violation, match="slots are pinned"):
                check_quiet(runtime)
        check_quiet(runtime)
        watch = CapWatch(runtime, SMALL.cap_bytes)
        catalog.blocks_used += SMALL.blocks
        with pytest.raises(Violation, match="the cap is"):
            watch.look()
        catalog.blocks_used -= SMALL.blocks
        extent = catalog.free.take()
        with pytest.raises(Violation, match="extents used"):
            check_books(runtime)
        catalog.free.give_back(extent)
        check_books(runtime)
        runtime.room.wall_ns = lambda: 0  # its clock stands, the day's goes on
        traffic.now_ns += int(SMALL.ttl_s * 1e9)
        with pytest.raises(Violation, match="whose time is over"):
            traffic.look(chain)
