"""Reading traces: what a good one says, and how each kind of bad one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd.lab.attention import read_attention
from prefetchd.lab.attention_npz import read_recording
from prefetchd.lab.trace_format import TraceError
from prefetchd.lab.workload import single
from prefetchd.model import NO_IDS, Geometry
from tests.replays import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    RANKS,
    STEPS,
    trace_columns,
    workload,
    write_trace,
)

COLUMNS = trace_columns()
IDS, MASS = COLUMNS["block_ids"], COLUMNS["mass"]


def test_a_layer_needs_the_union_of_its_heads_heaviest_blocks(tmp_path: Path) -> None:
    trace = read_attention(write_trace(tmp_path / "t.npz"))
    assert (trace.name, trace.steps, trace.ranks) == ("t", STEPS, RANKS)
    assert trace.geometry == Geometry(LAYERS, BLOCKS)
    for top_k in range(1, RANKS + 1):
        blocks, scores = trace.need(3, 2, top_k)
        ids, mass = IDS[3, 2, :, :top_k], MASS[3, 2, :, :top_k]
        assert blocks.tolist() == sorted(set(ids.reshape(-1).tolist()))
        for block, score in zip(blocks, scores, strict=True):
            assert score == mass[ids == block].max()


def test_hints_are_pages_of_their_layer_and_the_first_layer_has_none(tmp_path: Path) -> None:
    trace = read_attention(write_trace(tmp_path / "t.npz"))
    assert trace.hint(0, 0, 2) is None
    hint = trace.hint(1, 3, 2)
    assert hint is not None
    assert (hint.pages % LAYERS == 3).all()
    bare = read_attention(write_trace(tmp_path / "bare.npz", hint_ids=None, hint_mass=None))
    assert bare.hint(1, 3, 2) is None


def test_a_block_that_is_only_foreseen_has_a_place(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.npz", hint_ids=IDS + 30)
    assert read_attention(path).geometry.blocks == BLOCKS + 30
    assert workload(path).hints[0][1] is not None


def test_other_integers_and_floats_are_taken_if_they_fit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"block_ids": IDS.astype(np.int64), "mass": MASS.astype(np.float32)}
    trace = read_attention(write_trace(tmp_path / "t.npz", prompt_tokens=None, **changes))
    assert np.array_equal(trace.block_ids, IDS)
    assert trace.mass.dtype == np.float16
    assert trace.prompt_tokens == 0


def test_a_recording_of_a_long_context_has_wide_ids_and_is_converted_unrounded(
    tmp_path: Path,
) -> None:
    ids, mass = IDS.astype(np.uint32) + 100_000, MASS.astype(np.float32) + np.float32(1e-6)
    changes: dict[str, Any] = {"block_ids": ids, "mass": mass, "hint_ids": None, "hint_mass": None}
    path = write_trace(tmp_path / "t.npz", **changes)
    assert read_attention(path).geometry.blocks == int(ids.max()) + 1
    (chunk,) = read_recording(path).chunks()
    assert np.array_equal(chunk["block_ids"], ids)
    assert np.array_equal(chunk["mass"], mass)


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint16])
def test_padding_is_no_block(tmp_path: Path, dtype: Any) -> None:
    ids, mass = IDS.astype(dtype), MASS.copy()
    ids[..., 2:] = np.array(-1).astype(dtype)
    mass[..., 2:] = 0
    hints, foreseen = ids.copy(), mass.copy()
    hints[:, 0], foreseen[:, 0] = ids[0, 0, 0, -1], 0  # of the first layer nothing is foreseen
    changes: dict[str, Any] = {"hint_ids": hints, "hint_mass": foreseen}
    trace = read_attention(write_trace(tmp_path / "t.npz", block_ids=ids, mass=mass, **changes))
    assert trace.geometry.blocks == int(IDS[..., :2].max()) + 1
    assert trace.need(1, 1, 4)[0].tolist() == np.unique(IDS[1, 1, :, :2]).tolist()
    hint = trace.hint(1, 1, 4)
    assert hint is not None
    assert np.array_equal(np.unique(hint.pages // LAYERS), np.unique(IDS[1, 1, :, :2]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mass": None}, r"lacks mass \(it has block_ids"),
        ({"block_ids": None, "mass": None}, "lacks block_ids, mass"),
        ({"hint_mass": None}, "hint_ids and hint_mass differ in shape"),
        ({"mass": MASS[:-1]}, "differ in shape.*incomplete"),
        ({"hint_ids": IDS[:-1], "hint_mass": MASS[:-1]}, "hints are for.*cut short or mixed up"),
        ({"block_ids": IDS[0], "mass": MASS[0]}, r"must be \[step, layer, KV head, rank\]"),
        ({"block_ids": IDS[:0], "mass": MASS[:0]}, "not of shape"),
        ({"block_ids": IDS.astype(np.float32)}, "whole numbers, not float32"),
        ({"block_ids": IDS.astype(np.int64) - 1}, "run from -1"),
        ({"hint_ids": IDS.astype(np.int64) + (1 << 24)}, "hint_ids run from"),
        ({"mass": MASS.astype("U4")}, "floating-point numbers"),
        ({"mass": MASS * np.float16(np.nan)}, "must be finite"),
        ({"hint_mass": MASS * np.float16(-1)}, "hint_mass must be finite and from 0"),
        ({"mass": MASS.astype(np.float32) + 1e5}, "from 0 to 65504"),
        ({"block_tokens": np.int64(0)}, "at least 1, not 0"),
        ({"block_tokens": np.array([1, 2])}, "must be one whole number"),
        ({"prompt_tokens": np.float64(7)}, "must be one whole number"),
    ],
)
def test_a_trace_that_is_not_whole_is_told_by_column(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = write_trace(tmp_path / "t.npz", **changes)
    with pytest.raises(TraceError, match=told) as error:
        read_attention(path)
    assert str(path) in str(error.value)


def test_what_is_no_trace_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(TraceError, match="there is no trace"):
        read_attention(path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="is empty"):
        read_attention(path)
    path.write_text("block_ids")
    with pytest.raises(TraceError, match="is no"):
        read_attention(path)
    np.save(tmp_path / "t.npy", IDS)
    with pytest.raises(TraceError, match="is no"):
        read_attention(tmp_path / "t.npy")
    np.savez(path, block_ids=np.array([None, {}]), mass=MASS)
    with pytest.raises(TraceError, match=r"cannot be read as an \.npz"):
        read_attention(path)
    with pytest.raises(TraceError, match="is a folder"):
        read_attention(tmp_path)


def test_a_trace_cut_short_or_damaged_anywhere_is_a_trace_error_or_the_same_trace(
    tmp_path: Path,
) -> None:
    whole = write_trace(tmp_path / "t.npz").read_bytes()
    path = tmp_path / "bad.npz"
    for length in range(1, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError):
            read_attention(path)
    random = np.random.default_rng(11)
    for place, bit in zip(
        random.integers(0, len(whole), 300), random.integers(0, 8, 300), strict=True
    ):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            trace = read_attention(path)
        except TraceError:
            continue
        assert np.array_equal(trace.block_ids, IDS)


def test_more_than_was_recorded_cannot_be_replayed(tmp_path: Path) -> None:
    trace = read_attention(write_trace(tmp_path / "t.npz"))
    assert single(trace, top_k=RANKS).steps == STEPS
    assert single(trace, top_k=1, steps=2).steps == 2
    with pytest.raises(TraceError, match="at most 4"):
        single(trace, top_k=RANKS + 1)


def test_requests_share_the_prefix_and_nothing_else(tmp_path: Path) -> None:
    load = workload(write_trace(tmp_path / "t.npz"), requests=3, shared=0.5)
    prompt = BLOCKS - 2
    shared = prompt // 2
    assert load.geometry == Geometry(LAYERS, shared + 3 * (BLOCKS - shared))
    chains = [hint.blocks for step in sorted(load.arrivals) for hint in load.arrivals[step]]
    assert [len(chain) for chain in chains] == [prompt, prompt]
    assert np.intersect1d(chains[0], chains[1]).tolist() == list(range(shared))
    for number, step in enumerate(load.demands):
        for layer, demand in enumerate(step):
            assert len(np.unique(demand.pages)) == len(demand.pages)
            assert (demand.pages % LAYERS == layer).all()
            last = max(int((demand.pages // LAYERS).max()), shared)
            assert (last - shared) // (BLOCKS - shared) <= number  # a request a stride


def test_a_prompt_longer_than_the_trace_has_blocks(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.npz", prompt_tokens=np.int64(1000 * BLOCK_TOKENS))
    assert workload(path, requests=2, shared=1.0).geometry.blocks == BLOCKS


def test_far_pages_are_neither_the_sink_nor_recent(tmp_path: Path) -> None:
    ids = np.array([0, 1, 35, 36, 37, 99], np.uint16).reshape(1, 1, 1, 6)
    changes: dict[str, Any] = {"block_ids": ids, "mass": np.ones(ids.shape, np.float16)}
    changes |= {"hint_ids": None, "hint_mass": None, "prompt_tokens": np.int64(1600)}
    [[demand]] = workload(write_trace(tmp_path / "t.npz", **changes), top_k=6).demands
    assert demand.pages[demand.far].tolist() == [1, 35, 36]
    assert NO_IDS.dtype == demand.pages.dtype
