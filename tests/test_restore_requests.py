"""Request traces: what is read is what the file says; what cannot be read is told in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd.lab.request_lines import SESSION_GAP_NS
from prefetchd.lab.requests import read_requests
from prefetchd.lab.spool import spread_bursts
from prefetchd.lab.trace_format import TraceError


def write(path: Path, lines: list[Any]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def chat(timestamp: int, ids: list[int]) -> dict[str, Any]:
    told = {"input_length": 512 * len(ids), "output_length": 1}
    return {"timestamp": timestamp, "hash_ids": ids, **told}


def test_bursts_are_spread_over_the_quantum_and_reuse_is_counted(tmp_path: Path) -> None:
    lines = [chat(0, [9, 4]), chat(0, [9, 5]), chat(3000, [9, 4, 6]), chat(3000, [9, 5, 7, 7])]
    load = read_requests(write(tmp_path / "t.jsonl.gz", lines))
    assert load.quantum_ns == 3_000_000_000
    assert load.arrival_ns.tolist() == [0, 1_500_000_000, 3_000_000_000, 4_500_000_000]
    assert [load.chain(n).tolist() for n in range(4)] == [[0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    assert load.reusable().tolist() == [0, 1, 2, 2]
    assert "3 s" in load.how
    assert read_requests(tmp_path / "t.jsonl.gz", 3).distinct == 4
    assert load.faster(10).arrival_ns.tolist()[1] == 150_000_000


def test_groups_of_blocks_become_one_and_the_rest_is_dropped(tmp_path: Path) -> None:
    lines = [chat(0, [7, 1, 2, 3, 4]), chat(5, [7, 1, 2, 9]), chat(9, [7])]
    load = read_requests(write(tmp_path / "t.jsonl", lines), group=2)
    assert [load.chain(n).tolist() for n in range(3)] == [[0, 1], [0, 2], []]
    assert load.reusable().tolist() == [0, 1, 0]
    with pytest.raises(TraceError, match="6 blocks"):
        read_requests(tmp_path / "t.jsonl", group=6)


def test_exact_timestamps_are_left_alone() -> None:
    times = np.array([0, 5, 7, 7, 12], np.int64)
    assert spread_bursts(times)[1] == 0
    assert spread_bursts(times)[0] is times


def call(at_s: float, runs: list[list[int]], **more: Any) -> dict[str, Any]:
    return {
        "t": at_s,
        "type": "n",
        "hash_runs": runs,
        "stop": "tool_use",
        "think_time": 2.0,
        **more,
    }


def test_sessions_get_global_ids_and_sub_agents_their_place_in_time(tmp_path: Path) -> None:
    agent = {"t": 4.0, "type": "subagent", "requests": [call(1.0, [[5, 2]], stop="end_turn")]}
    lines = [
        {"id": "a", "requests": [call(0.0, [[1, 3]]), agent, call(9.0, [[1, 3], [8, 1]])]},
        {"id": "b", "requests": [call(0.5, [[1, 2]])]},
    ]
    load = read_requests(write(tmp_path / "s.jsonl", lines))
    assert [load.chain(n).tolist() for n in range(4)] == [[0, 1, 2], [3, 4], [0, 1, 2, 5], [6, 7]]
    times = [0, 5_000_000_000, 9_000_000_000, SESSION_GAP_NS + 500_000_000]
    assert load.arrival_ns.tolist() == times
    assert load.session.tolist() == [0, 0, 0, 1]
    assert load.stops == ("tool_use", "end_turn", "tool_use", "tool_use")
    assert load.think_ns.tolist() == [2_000_000_000] * 4
    assert len(read_requests(tmp_path / "s.jsonl", 2)) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "is empty"),
        (b"[1]\n", "line 1"),
        (b'{"timestamp": 0, "hash_ids": [1]}\n{"timest', "line 2"),
        (b'{"hash_ids": [1]}\n', "has no timestamp"),
        (b'{"timestamp": 0, "hash_ids": ["x"]}\n', "cannot be used"),
        (b'{"timestamp": 0, "hash_ids": [-1]}\n', "hash_ids: Expected `int` >= 0"),
        (b'{"timestamp": 0, "hash_ids": []}\n', "names no block"),
        (b'{"other": 0}\n', "neither hash_ids"),
        (b'{"requests": [{"t": 0, "type": "n"}]}\n', "has no hash_runs"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(tmp_path: Path, text: bytes, told: str) -> None:
    (tmp_path / "t.jsonl").write_bytes(text)
    with pytest.raises(TraceError, match=told):
        read_requests(tmp_path / "t.jsonl")


def test_a_cut_file_is_told(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.jsonl.gz", [chat(n, [0, n]) for n in range(500)]).read_bytes()
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="cut short"):
        read_requests(tmp_path / "t.jsonl.gz")
