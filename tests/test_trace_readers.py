"""Readers of raw formats: what each field becomes, what is refused, and that they stream."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.lab.attention import read_attention
from prefetchd.lab.request_csv import CsvSettings
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.lab.sources import trace_source
from prefetchd.lab.spool import chains, runs_of
from prefetchd.lab.trace_format import TraceError, TraceHeader, TraceWriter, open_trace
from prefetchd.lab.trace_schema import Columns
from tests.replays import trace_columns, write_trace
from tests.test_restore_requests import call, chat, write

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:46.6805901,1025,109
2023-11-16 18:16:46.6805900Z,0,7
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type
5,a,1,ChatGPT,472,18,Conversation log
7,b,1,GPT-4,513,0,API log
9,a,1,ChatGPT,100,5,Conversation log
"""
OBJECTS = """Timestamp,Operation,Object_Size_Bytes,Tier,Key,Phase
1740553426.000000,Write,300,Tier-0,u0,Prefill
1740553426.500000,Read,300,Tier-0,u0,Decode
1740553426.600000,Write,300,Tier-2,u0,Evict
1740553427.000000,Write,100,Tier-0,u1,Prefill
1740553428.000000,Read,350,Tier-2,u0,Decode
1740553429.000000,Read,100,Tier-2,u0,Decode
"""


def read(path: Path, settings: CsvSettings | None = None, **options: Any) -> tuple[Any, Columns]:
    with trace_source(path, settings, **options) as source:
        chunks = list(source.chunks())
        names = chunks[0] if chunks else ()
        return source.header, {name: np.concatenate([c[name] for c in chunks]) for name in names}


def text(path: Path, data: str) -> Path:
    path.write_bytes(gzip.compress(data.encode()) if path.suffix == ".gz" else data.encode())
    return path


def copy(source: Path, out: Path) -> Path:
    """In our own format."""
    with trace_source(source) as found, TraceWriter(out, found.header) as writer:
        for chunk in found.chunks():
            writer.write(chunk)
    return out


def same_requests(one: Requests, other: Requests) -> None:
    for name in ("arrival_ns", "starts", "blocks", "session", "think_ns", "input_tokens", "agent"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.stops == other.stops
    assert (one.name, one.how, one.quantum_ns) == (other.name, other.how, other.quantum_ns)


def test_the_embedded_traces_are_the_same_in_our_own_format(tmp_path: Path) -> None:
    data = files("prefetchd.data")
    with as_file(data / "conversation_demo.jsonl.gz") as path:
        same_requests(read_requests(copy(path, tmp_path / "c.npz")), read_requests(path))
        same_requests(read_requests(tmp_path / "c.npz", 7), read_requests(tmp_path / "c.npz", 7))
        assert len(read_requests(tmp_path / "c.npz", 7)) == 7
    with as_file(data / "summ_pydocs_demo.npz") as path:
        one, other = read_attention(path), read_attention(copy(path, tmp_path / "a.npz"))
    assert (one.name, one.prompt_tokens, one.block_tokens) == (
        (other.name, other.prompt_tokens, other.block_tokens)
    )
    for name in ("block_ids", "mass", "hint_ids", "hint_mass"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).dtype == getattr(other, name).dtype


def test_sessions_keep_sub_agents_think_times_and_stop_reasons(tmp_path: Path) -> None:
    def agent(at_s: float, first: int) -> dict[str, Any]:
        inner = [call(1.0, [[first, 2]], stop="end_turn", out=3)]
        return {"t": at_s, "type": "subagent", "requests": inner}

    main = {"in": 640, "out": 5}
    requests = [call(0.0, [[1, 9]], **main), agent(4.0, 20), agent(4.5, 30), call(9.0, [[1, 10]])]
    path = write(tmp_path / "s.jsonl", [{"block_size": 64, "requests": requests}])
    header, columns = read(path)
    assert header.block_tokens == 64
    assert columns["agent"].tolist() == [0, 1, 2, 0]
    assert columns["session"].tolist() == [0, 0, 0, 0]
    assert [header.stops[code] for code in columns["stop"].tolist()] == (
        ["tool_use", "end_turn", "end_turn", "tool_use"]
    )
    assert columns["think_ns"].tolist() == [2_000_000_000] * 4
    assert columns["input_tokens"].tolist() == [640, -1, -1, -1]
    assert columns["output_tokens"].tolist() == [5, 3, 3, -1]
    load = read_requests(copy(path, tmp_path / "s.npz"))
    same_requests(load, read_requests(path))
    assert load.agent is not None
    assert load.agent.tolist() == [0, 1, 2, 0]


@given(blocks=st.lists(st.integers(0, 40), max_size=30))
def test_a_chain_is_its_runs_each_block_once(blocks: list[int]) -> None:
    mine = runs_of(np.array(blocks, np.int64))
    once = list(dict.fromkeys(blocks))
    sizes, found = chains([mine, runs_of(np.arange(3)), mine])
    assert sizes.tolist() == [len(once), 3, len(once)]
    assert found.tolist() == [*once, 0, 1, 2, *once]


def test_lengths_alone_become_requests_without_reuse_and_only_if_asked(tmp_path: Path) -> None:
    azure = text(tmp_path / "azure.csv", AZURE)
    burst = text(tmp_path / "burst.csv.gz", BURSTGPT)
    for path in (azure, burst):
        with pytest.raises(TraceError, match=r"no block identity.*--no-reuse"):
            read_requests(path)
    settings = CsvSettings(block_tokens=512, without_reuse=True)
    header, columns = read(azure, settings)
    assert not header.identity
    assert "WITHOUT REUSE" in header.how
    assert columns["arrival_ns"].tolist() == [0, 100, 60_000_000_000]
    assert columns["sizes"].tolist() == [1, 3, 0]
    assert columns["blocks"].tolist() == [0, 1, 2, 3]
    assert columns["input_tokens"].tolist() == [374, 1025, 0]
    assert columns["output_tokens"].tolist() == [44, 109, 7]
    header, columns = read(burst, settings)
    assert columns["session"].tolist() == [0, 1, 0]
    assert columns["arrival_ns"].tolist() == [0, 2_000_000_000, 4_000_000_000]
    assert len(read(burst, settings, limit=2)[1]["sizes"]) == 2
    with TraceWriter(tmp_path / "t.npz", header) as writer:
        writer.write(columns)
    load = read_requests(tmp_path / "t.npz")
    assert "WITHOUT REUSE" in load.name
    assert not load.reusable().any()


def test_objects_are_runs_of_blocks_and_keep_them_as_they_grow(tmp_path: Path) -> None:
    path = text(tmp_path / "io.csv", OBJECTS)
    header, columns = read(path, CsvSettings(block_bytes=100))
    sizes = columns["sizes"].tolist()
    chains = np.split(columns["blocks"], np.cumsum(sizes)[:-1])
    expected = [[0, 1, 2], [0, 1, 2], [3], [0, 1, 2, 4], [0]]
    assert [chain.tolist() for chain in chains] == expected
    assert columns["session"].tolist() == [0, 0, 1, 0, 0]
    assert columns["arrival_ns"].tolist()[1] == 500_000_000
    assert header.block_bytes == 100
    assert "Object_Size_Bytes" in header.how
    assert "1 moves" in header.how
    lenient = OBJECTS.replace("Object_Size_Bytes", "size").replace("Timestamp", "time")
    _, other = read(text(tmp_path / "io2.csv", lenient), CsvSettings(block_bytes=100))
    assert np.array_equal(other["blocks"], columns["blocks"])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("a,b\n1,2\n", "are not those of MLPerf"),
        (AZURE + "2023-11-16,4\n", "line 5 has only 2 fields"),
        (AZURE + "yesterday,4,5\n", "line 5 cannot be used"),
        (AZURE + "2023-11-16,-1000,5\n", "line 5 .*'-1000' is no number of tokens"),
        (BURSTGPT + "x,a,1,ChatGPT,1,2,log\n", "line 5 cannot be used"),
        (OBJECTS + "1,Trim,1,Tier-0,k,Decode\n", "line 8 .*'Trim' is neither Read nor Write"),
        (OBJECTS + "inf,Read,1,Tier-0,k,Decode\n", "line 8 cannot be used"),
        (OBJECTS + "1,Read,1e300,Tier-0,k,Decode\n", "an object of"),
        (OBJECTS + "1,Read,-5,Tier-0,k,Decode\n", "line 8 .*an object of -5 bytes"),
        ('{"timestamp": 0, "hash_ids": [1.5]}', "line 1 .*hash_ids: Expected `int`, got `float`"),
        ('{"timestamp": 0, "hash_ids": null}', "line 1 .*hash_ids: Expected `array`, got `null`"),
        ('{"timestamp": 0, "hash_ids": [-1]}', "line 1 .*hash_ids: Expected `int` >= 0"),
        ('{"timestamp": 0, "hash_ids": [1], "block_size": -1}', "line 1 .*blocks of -1 tokens"),
        ('{"requests": [{"t": 0, "type": "n", "hash_runs": [[1]]}]}', "line 1 .*hash_runs: "),
        (
            '{"requests": [{"t": 0, "type": "n", "hash_runs": [], "think_time": -1}]}',
            "line 1 .*think_time is -1",
        ),
        ('{"requests": []}\n{"requests": [], "hash_id_scope": "global"}', "line 2 .*hash_id_scope"),
        ('{"block_size": 64, "requests": []}\n{"requests": [], "block_size": 16}', "blocks of 16"),
        ("Timestamp,Operation\n", "are not those of MLPerf"),
        (
            '{"requests": [{"t": 0, "type": "n", "hash_runs": [[0, 9999999], [0, 9999999]]}]}',
            "claim 19999998",
        ),
        (  # whose sum is 0 in 64 bits
            '{"requests": [{"t": 0, "type": "n", "hash_runs": ['
            + f"[0, {(1 << 62) - 1}], " * 4
            + "[0, 4]]}]}",
            "line 1 .*hash_runs: Expected `int` <= 16777216",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_told(tmp_path: Path, data: str, told: str) -> None:
    path = text(tmp_path / "t.csv", data)
    with pytest.raises(TraceError, match=told) as error:
        read(path, CsvSettings(without_reuse=True))
    assert str(path) in str(error.value)


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd more")
    with pytest.raises(TraceError, match="zstd -d"):
        read(path)
    path.write_bytes(b"Timestamp,Operation,Size,Key\n\xff\xfe\n")
    with pytest.raises(TraceError, match="no line of CSV"):
        read(path)
    (tmp_path / "t.gz").write_bytes(gzip.compress(OBJECTS.encode())[:-20])
    with pytest.raises(TraceError, match="cut short"):
        read(tmp_path / "t.gz")


def test_a_trace_of_the_other_kind_is_told(tmp_path: Path) -> None:
    attention = write_trace(tmp_path / "a.npz")
    requests = write(tmp_path / "r.jsonl", [chat(0, [1, 2])])
    for path in (attention, copy(attention, tmp_path / "a2.npz")):
        with pytest.raises(TraceError, match="replay decode"):
            read_requests(path)
    for path in (requests, copy(requests, tmp_path / "r2.npz")):
        with pytest.raises(TraceError, match="replay restore"):
            read_attention(path)


def test_more_blocks_than_a_recording_can_number_fit_into_our_own_format(tmp_path: Path) -> None:
    columns = trace_columns()
    ids = columns["block_ids"].astype(np.uint32) + 100_000
    header = TraceHeader(
        kind="decode", name="wide", block_tokens=16, layers=4, kv_heads=2, synthetic=True
    )
    with TraceWriter(tmp_path / "t.npz", header) as writer:
        writer.write({"block_ids": ids, "mass": columns["mass"]})
    trace = read_attention(tmp_path / "t.npz")
    assert trace.name == "wide (SYNTHETIC)"
    assert trace.geometry.blocks == int(ids.max()) + 1
    assert np.array_equal(trace.block_ids, ids)


def test_requests_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [chat(5, [1]), chat(0, [2]), chat(9, [3]), chat(7, [4])])
    nothing_told = {**chat(3, [5]), "input_length": None}
    bare = write(tmp_path / "bare.jsonl", [nothing_told])
    assert read(bare)[1]["input_tokens"].tolist() == [-1]
    assert read(path)[1]["blocks"].tolist() == [2, 1, 4, 3]


def test_the_first_requests_are_the_earliest_whatever_the_order(tmp_path: Path) -> None:
    lines = [chat(5, [1]), chat(0, [2]), chat(9, [3]), chat(7, [4]), chat(1, [5])]
    path = write(tmp_path / "t.jsonl", lines)
    assert read(path, limit=2)[1]["blocks"].tolist() == [2, 5]
    rising = write(tmp_path / "rising.jsonl", sorted(lines, key=lambda line: line["timestamp"]))
    with rising.open("a") as file:
        file.write("never read")
    assert read(rising, limit=4)[1]["blocks"].tolist() == [2, 5, 1, 4]


def test_a_file_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    data = json.dumps(chat(0, [1, 2])).encode()
    for name, held in (("t.gz", data), ("t", gzip.compress(data)), ("b", b"\xef\xbb\xbf" + data)):
        (tmp_path / name).write_bytes(held)
        assert read(tmp_path / name)[1]["blocks"].tolist() == [1, 2]


def test_blocks_are_of_the_size_that_a_trace_tells(tmp_path: Path) -> None:
    def tokens(block_tokens: int, **more: int) -> int:
        line = {"timestamp": 0, "hash_ids": [0, 1, 2], "input_length": 3 * block_tokens - 1, **more}
        header, _ = read(text(tmp_path / "t.jsonl", json.dumps(line)))
        assert ("but of how many?" in header.how) == (header.block_tokens == 0)
        return int(header.block_tokens)

    assert tokens(512) == 512
    assert tokens(16) == 0, "512 is not assumed where the lengths speak against it"
    assert tokens(16, block_size=16) == 16


def test_sessions_may_tell_ids_one_by_one_and_share_them(tmp_path: Path) -> None:
    runs = [[3, 2], [9, 1]]
    one = {"requests": [call(0.0, runs)]}
    ids = {**call(0.0, runs), "hash_ids": [3, 4, 9]}
    del ids["hash_runs"]
    other = {"requests": [ids]}
    blocks = read(write(tmp_path / "own.jsonl", [one, other]))[1]["blocks"].tolist()
    assert blocks == [3, 4, 9, 13, 14, 19]
    lines = [{**line, "hash_id_scope": "global"} for line in (one, other)]
    header, columns = read(write(tmp_path / "shared.jsonl", lines))
    assert columns["blocks"].tolist() == [3, 4, 9, 3, 4, 9]
    assert "the trace's own" in header.how


@pytest.mark.parametrize("zone", ["+02:00", "+0200", "+02"])
def test_a_date_has_a_zone_or_is_utc(tmp_path: Path, zone: str) -> None:
    lines = f"2023-11-16 18:00:00,1,1\n2023-11-16 18:00:01Z,1,1\n2023-11-16 20:00:02.5{zone},1,1\n"
    data = text(tmp_path / "t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    arrivals = read(data, CsvSettings(without_reuse=True))[1]["arrival_ns"]
    assert arrivals.tolist() == [0, 1_000_000_000, 2_500_000_000]


def peak_of_copy(path: Path, out: Path) -> int:
    tracemalloc.start()
    try:
        copy(path, out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_large_file_of_requests_needs_no_memory_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with path.open("w") as file:
        for number in range(1200):
            line = chat(number, list(range(number * 10, number * 10 + 500)))
            file.write(json.dumps({**line, "prompt": "x" * 50_000}) + "\n")
    assert path.stat().st_size > 50 << 20
    assert peak_of_copy(path, tmp_path / "t.npz") < 12 << 20
    assert open_trace(tmp_path / "t.npz").header.length == 1200


def test_a_large_recording_needs_no_memory_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    ids = np.zeros((8000, 4, 8, 64), np.uint16)
    np.savez_compressed(path, block_ids=ids, mass=ids.astype(np.float16), block_tokens=16)
    size = 2 * ids.nbytes
    assert size > 60 << 20
    assert peak_of_copy(path, tmp_path / "o.npz") < 12 << 20
    assert open_trace(tmp_path / "o.npz").header.length == 8000


@pytest.mark.parametrize("field", ["-5,10", "10,-5", "many,10", "10,nan", "inf,1", ",3"])
def test_a_number_of_tokens_that_is_none_is_told_with_its_line(field: str, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    good = "2023-11-16 18:17:03.0,100,5"
    path.write_text(
        f"TIMESTAMP,ContextTokens,GeneratedTokens\n{good}\n2023-11-16 18:17:04.0,{field}\n"
    )
    with pytest.raises(TraceError, match=r"line 3 cannot be used: '.*' is no number of tokens"):
        read(path, CsvSettings(without_reuse=True))
