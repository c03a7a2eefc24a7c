"""`prefetchd trace`: what it says, what it writes, and how it refuses."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd.lab.attention import read_attention
from prefetchd.lab.requests import read_requests
from prefetchd.lab.trace_format import TraceHeader, TraceWriter, open_trace
from tests.replays import LAYERS, STEPS, replay_words, run_here, write_trace
from tests.test_restore_requests import call, chat, write
from tests.test_trace_readers import AZURE, text

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    lines = [chat(1000 * n, [0, 1, n % 3 + 2, n + 10]) for n in range(20)]
    return write(tmp_path / "chats.jsonl", lines)


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    inner = [call(1.0, [[9, 2]], stop="end_turn")]
    lines = [
        {
            "block_size": 512,
            "requests": [
                call(0.0, [[0, 4]]),
                {"t": 2.0, "type": "subagent", "requests": inner},
                call(5.0 + n, [[0, 5]]),
            ],
        }
        for n in range(3)
    ]
    return write(tmp_path / "agents.jsonl", lines)


def info(capsys: Capture, *words: str | Path) -> dict[str, Any]:
    done = run_here(capsys, "trace", "info", *words, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def made(capsys: Capture, out: Path, *words: str | Path) -> Path:
    done = run_here(capsys, "trace", *words, "--out", out)
    assert done.code == 0, done.err
    assert str(out) in done.out
    return out


def test_info_counts_requests(chats: Path, agents: Path, tmp_path: Path, capsys: Capture) -> None:
    found = info(capsys, chats)
    restore = found["restore"]
    load = read_requests(chats)
    assert (restore["requests"], restore["blocks"]) == (20, 80)
    assert restore["distinct_blocks"] == load.distinct
    assert restore["reuse_share"] == load.reusable().sum() / 80
    assert restore["once_share"] == 20 / 25
    assert restore["input_tokens"] == 512 * 80
    assert found["cannot"] == [
        "no stop reasons and think times: retention by either cannot be judged"
    ]
    ours = made(capsys, tmp_path / "c.npz", "convert", chats)
    again = info(capsys, ours)
    assert again["format"] == "prefetchd.trace.restore/1"
    assert again["restore"] == restore
    restore = info(capsys, agents)["restore"]
    assert (restore["sessions"], restore["agent_requests"]) == (3, 3)
    assert restore["stops"] == {"tool_use": 6, "end_turn": 3}
    shown = run_here(capsys, "trace", "info", agents).out
    assert "requests of sub-agents" in shown
    assert "stopped: end_turn" in shown


def test_reuse_is_counted_alike_whatever_the_chunks(chats: Path, tmp_path: Path) -> None:
    from prefetchd.lab.restore_info import RestoreCounter
    from prefetchd.lab.sources import trace_source
    from prefetchd.lab.trace_schema import pieces

    with trace_source(chats) as source:
        [chunk] = source.chunks()
        found = []
        for size in (1, 200, 1 << 20):
            counter = RestoreCounter(source.header)
            for piece in pieces("restore", chunk, size):
                counter.add(piece)
            found.append(counter.done())
    assert found[0] == found[1] == found[2]


def test_info_counts_a_decode(tmp_path: Path, capsys: Capture) -> None:
    path = write_trace(tmp_path / "t.npz")
    found = info(capsys, path, "--top-k", "2")["decode"]
    trace = read_attention(path)
    needs = [
        [set(trace.need(step, layer, 2)[0].tolist()) for layer in range(LAYERS)]
        for step in range(STEPS)
    ]
    pages = sum(len(need) for step in needs for need in step)
    assert found["pages_per_layer"] == pytest.approx(pages / STEPS / LAYERS)
    for lag in (1, 2, 4):
        pairs = [
            (needs[step][layer], needs[step - lag][layer])
            for step in range(lag, STEPS)
            for layer in range(LAYERS)
        ]
        kept = sum(len(now & then) for now, then in pairs)
        assert found["overlap"][str(lag)] == pytest.approx(kept / sum(len(n) for n, _ in pairs))
    assert "8" not in found["overlap"]
    assert found["hint_recall"] == 1.0  # what is foreseen is what is needed, and more
    bare = write_trace(tmp_path / "bare.npz", hint_ids=None, hint_mass=None)
    assert "no hints" in run_here(capsys, "trace", "info", bare).out


def test_lengths_alone_say_what_they_are_no_use_for(tmp_path: Path, capsys: Capture) -> None:
    azure = text(tmp_path / "azure.csv", AZURE)
    assert "no block identity" in " ".join(info(capsys, azure)["cannot"])
    out = tmp_path / "a.npz"
    run_here(capsys, "trace", "convert", azure, "-o", out).failed(2, "no block identity")
    assert not out.exists()
    made(capsys, out, "convert", azure, "--no-reuse", "--block-tokens", "64")
    found = info(capsys, out)
    assert "WITHOUT REUSE" in found["how"]
    assert found["restore"]["reuse_share"] == 0
    assert found["restore"]["blocks"] == 6 + 17


def test_a_converted_decode_replays_as_the_recording_does(tmp_path: Path, capsys: Capture) -> None:
    path = write_trace(tmp_path / "t.npz")
    words = ("convert", path, "--name", "mine", "--licence", "CC0")
    ours = made(capsys, tmp_path / "o.npz", *words)
    assert info(capsys, ours)["licence"] == "CC0"
    runs = [
        run_here(capsys, *replay_words(one, tmp_path / f"s-{one.stem}", "--controls", "none"))
        for one in (path, ours)
    ]
    one, other = [{run.name: run.outcomes for run in done.result().runs} for done in runs]
    assert one["none"] == other["none"]


def test_cut_keeps_what_is_asked_for(chats: Path, tmp_path: Path, capsys: Capture) -> None:
    whole = read_requests(chats)
    few = read_requests(made(capsys, tmp_path / "1.npz", "cut", chats, "--requests", "5"))
    assert len(few) == 5
    assert "cut: the first 5" in few.how
    span = ("cut", chats, "--from", "3", "--to", "7")
    middle = read_requests(made(capsys, tmp_path / "2.npz", *span))
    assert middle.arrival_ns.tolist() == [0, 10**9, 2 * 10**9, 3 * 10**9]
    assert [len(middle.chain(n)) for n in range(4)] == [len(whole.chain(n)) for n in range(3, 7)]
    decode = write_trace(tmp_path / "t.npz")
    short = made(capsys, tmp_path / "3.npz", "cut", decode, "--steps", "2")
    assert read_attention(short).steps == 2
    refusals: list[tuple[list[str | Path], str]] = [
        ([decode, "--from", "1"], "steps and no times"),
        ([decode, "--requests", "1"], "use --steps"),
        ([chats, "--steps", "1"], "use --requests"),
        ([chats], "say what to keep"),
        ([chats, "--from", "9000"], "nothing of trace chats is left"),
    ]
    for words, told in refusals:
        run_here(capsys, "trace", "cut", *words, "-o", tmp_path / "4.npz").failed(2, told)
    assert not (tmp_path / "4.npz").exists()


def test_merged_traces_interleave_and_share_blocks_only_if_told(
    chats: Path, agents: Path, tmp_path: Path, capsys: Capture
) -> None:
    one, other = read_requests(chats), read_requests(agents)
    load = read_requests(made(capsys, tmp_path / "m.npz", "merge", chats, agents))
    assert len(load) == len(one) + len(other)
    assert load.distinct == one.distinct + other.distinct
    assert len(np.unique(load.session)) == 20 + 3
    times = np.sort(np.concatenate([one.arrival_ns, other.arrival_ns]), kind="stable")
    assert np.array_equal(load.arrival_ns, times)
    assert sorted(set(load.stops)) == ["", "end_turn", "tool_use"]
    assert load.agent is not None
    assert int((load.agent > 0).sum()) == 3
    of_chats = [load.stops[n] == "" for n in range(len(load))]
    assert [len(load.chain(n)) for n in np.flatnonzero(of_chats).tolist()] == [4] * 20
    twice = ("merge", chats, chats)
    shared = made(capsys, tmp_path / "s.npz", *twice, "--shared")
    assert read_requests(shared).distinct == one.distinct
    assert info(capsys, shared)["restore"]["sessions"] == 40
    apart = made(capsys, tmp_path / "d.npz", *twice)
    assert read_requests(apart).reusable().sum() == 2 * one.reusable().sum()


def test_merging_many_chunks_is_the_same_as_sorting(tmp_path: Path, capsys: Capture) -> None:
    random = np.random.default_rng(3)
    paths = []
    for number in range(3):
        header = TraceHeader(kind="restore", name=f"t{number}")
        arrivals = np.sort(random.integers(0, 1000, 400))
        arrivals -= arrivals[0]
        paths.append(tmp_path / f"{number}.npz")
        with TraceWriter(paths[-1], header) as writer:
            for part in np.array_split(np.arange(400), 1 + 7 * number):
                sizes = random.integers(0, 4, len(part))
                ones = np.zeros(len(part), np.int64)
                writer.write(
                    {
                        "arrival_ns": arrivals[part],
                        "sizes": sizes,
                        "blocks": random.integers(0, 50, int(sizes.sum())),
                        "session": ones,
                        "stop": ones.astype(np.uint16),
                        "think_ns": arrivals[part] * 10 + number,
                    }
                )
    merged = open_trace(made(capsys, tmp_path / "m.npz", "merge", *paths))
    times = np.concatenate([chunk["arrival_ns"] for chunk in merged.chunks()])
    marks = np.concatenate([chunk["think_ns"] for chunk in merged.chunks()])
    assert merged.header.length == 1200
    assert (np.diff(times.astype(np.int64)) >= 0).all()
    assert np.array_equal(marks.astype(np.int64) // 10, times)


def test_what_cannot_be_merged_or_written_is_told(
    chats: Path, agents: Path, tmp_path: Path, capsys: Capture
) -> None:
    decode, out = write_trace(tmp_path / "t.npz"), tmp_path / "o.npz"
    small = write(tmp_path / "small.jsonl", [{"block_size": 64, "requests": [call(0, [[1, 1]])]}])
    for words, told in (
        ([chats], "two or more"),
        ([chats, decode], "only restore traces are merged"),
        ([chats, small], "block_tokens 64, 512"),
        ([chats, tmp_path / "none"], "there is no trace"),
    ):
        run_here(capsys, "trace", "merge", *words, "-o", out).failed(2, told)
    run_here(capsys, "trace", "convert", chats, "-o", chats).failed(2, "already there")
    run_here(capsys, "trace", "convert", chats, "-o", tmp_path).failed(2, "already there")
    nowhere = tmp_path / "no" / "o.npz"
    run_here(capsys, "trace", "convert", chats, "-o", nowhere).failed(2, "no folder")
    made(capsys, out, "convert", chats)
    made(capsys, out, "convert", agents, "--force")
    assert read_requests(out).name == "agents"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def lru_misses(accesses: list[int], slots: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for one in accesses:
        misses += one not in cache
        cache[one] = None
        cache.move_to_end(one)
        if len(cache) > slots:
            cache.popitem(last=False)
    return misses


def test_libcachesim_reads_what_is_written_for_it(
    chats: Path, tmp_path: Path, capsys: Capture
) -> None:
    lcs = pytest.importorskip("libcachesim")
    path = made(capsys, tmp_path / "c.csv", "convert", chats, "--to", "libcachesim")
    given = lcs.ReaderInitParam()
    given.time_field, given.obj_id_field, given.obj_size_field = 1, 2, 3
    given.has_header, given.has_header_set, given.obj_id_is_num = True, True, True
    reader = lcs.TraceReader(str(path), lcs.TraceType.CSV_TRACE, given)
    seen = [(one.clock_time, one.obj_id, one.obj_size) for one in reader]
    load = read_requests(chats)
    assert len(seen) == len(load.blocks)
    assert seen[0] == (0, 0, 1)
    assert seen[-1][0] == 19
    ids = [one[1] for one in seen]
    reader.reset()
    ratio, _ = lcs.LRU(6).process_trace(reader)
    assert ratio == pytest.approx(lru_misses(ids, 6) / len(ids))
    assert lru_misses(load.blocks.tolist(), 6) == lru_misses(ids, 6)


def test_a_decode_for_libcachesim_is_its_pages(tmp_path: Path, capsys: Capture) -> None:
    decode = write_trace(tmp_path / "t.npz")
    words = ("convert", decode, "--to", "libcachesim", "--top-k", "2", "--block-bytes", "64KiB")
    rows = made(capsys, tmp_path / "d.csv", *words).read_text().splitlines()
    trace = read_attention(decode)
    expected = ["time,obj_id,obj_size"]
    for step in range(STEPS):
        for layer in range(LAYERS):
            blocks, _ = trace.need(step, layer, 2)
            pages = trace.geometry.page_ids(blocks, layer).tolist()
            expected += [f"{step},{page},65536" for page in pages]
    assert rows == expected
