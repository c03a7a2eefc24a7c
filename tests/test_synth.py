"""Synthetic decodes: they measure as what they were fitted to, at any size, and say what they are.

The tolerances are those of one draw: a decode of the fitted size with another seed is as far off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest

from prefetchd.bench.decode_options import EMBEDDED_TRACE
from prefetchd.lab import synth_tuning
from prefetchd.lab.attention import AttentionTrace, read_attention
from prefetchd.lab.belady import belady_misses
from prefetchd.lab.synth import (
    POOL_BLOCKS,
    Adversary,
    Columns,
    Shape,
    collect,
    generate,
    shape_like,
)
from prefetchd.lab.synth_fit import AttentionFit, measure, read_fit
from prefetchd.lab.synth_model import Aims, first_aims
from prefetchd.lab.synth_tables import MEASURES
from prefetchd.lab.synth_tuning import tuned
from prefetchd.lab.trace_format import open_trace
from prefetchd.lab.trace_schema import TraceError
from prefetchd.lab.workload import single
from prefetchd.model import Ids, Mask
from tests.replays import replay_words, run_here

Capture = pytest.CaptureFixture[str]
SEED = 101  # no trial decode of the fit has it


@pytest.fixture(scope="module")
def real() -> AttentionTrace:
    with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as path:
        return read_attention(path)


@pytest.fixture(scope="module")
def fit(real: AttentionTrace) -> AttentionFit:
    return measure(real)


@pytest.fixture(scope="module")
def aims(fit: AttentionFit) -> Aims:
    return tuned(fit)


@pytest.fixture(scope="module")
def made(aims: Aims, fit: AttentionFit) -> AttentionTrace:
    return collect("made", aims, shape_like(fit), seed=SEED)


def far_picks(trace: AttentionTrace, ids: np.ndarray, step: int) -> Mask:
    """Which far blocks are among a step's ids, [layer, head, block]."""
    marked = np.zeros((*ids.shape[1:3], trace.geometry.blocks), bool)
    np.put_along_axis(marked, ids[step].astype(np.int64), True, axis=-1)
    blocks = np.arange(trace.geometry.blocks)
    found: Mask = marked & (blocks > 0) & (blocks <= trace.frontier(step) - 64)
    return found


def test_measures_are_counted_as_they_are_defined() -> None:
    """Two layers, two heads; 100 blocks; a far block that stays and one that is new each step."""
    steps = 20
    ids = np.zeros((steps, 2, 2, 4), np.uint16)
    ids[..., 1] = 99
    ids[..., 2] = 5
    ids[..., 3] = 6 + np.arange(steps)[:, None, None]
    ids[:, 1, 1, 3] = 30  # the second head of the upper layer keeps to its own
    mass = np.broadcast_to(np.array([0.5, 0.25, 0.125, 0.0625], np.float16), ids.shape)
    hints = np.concatenate([ids[..., [2, 0, 1]], ids[:, [0, 0], :, 3:], ids[..., :2]], axis=3)
    hints[..., 4:] = (50, 51)
    trace = AttentionTrace("t", ids, mass, hints, hints.astype(np.float16), 1599, 16)
    fit = measure(trace, top_k=4)
    assert fit.far_overlap == pytest.approx([5 / 8] * 5 + [0])  # all of 5, and 30
    assert fit.far_picks == [[2, 2], [2, 2]]
    assert fit.far_share == 0.5
    assert fit.layer_overlap == pytest.approx((2 + 1) / 4)
    assert fit.head_shared == [2, 1]
    assert fit.needed_width == [4, 5]
    assert fit.never == pytest.approx(3 / 8)
    assert fit.novelty == pytest.approx(3 / 8)
    assert fit.sink_mass == [0.5, 0.5]
    assert fit.window_mass == [0.25, 0.25]
    assert fit.mass_by_rank == [[0.5, 0.25, 0.125, 0.0625]] * 2
    assert fit.hint_recall == pytest.approx([3 / 4, 3 / 4])  # 30 is never hinted
    assert fit.hint_precision[0] == pytest.approx(3 / 4)
    assert fit.hint_miss_again == 1


def test_a_synthetic_decode_measures_as_the_real_one(
    fit: AttentionFit, made: AttentionTrace
) -> None:
    found = measure(made)
    off = {words: get(found) - get(fit) for words, get in MEASURES}
    assert not {words: by for words, by in off.items() if abs(by) > 0.08}
    assert np.mean(list(map(abs, off.values()))) < 0.03
    # Layers differ as they do: in picks, in how long these last, in what sinks take.
    for name in ("far_overlap_by_layer", "sink_mass", "window_mass", "needed_width"):
        one, other = (np.array(getattr(each, name)) for each in (fit, found))
        assert np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1] > 0.8, name
    picks = [np.mean(each.far_picks, axis=1) for each in (fit, found)]
    assert np.corrcoef(*picks)[0, 1] > 0.95
    ranks = np.mean(fit.mass_by_rank, 0) - np.mean(found.mass_by_rank, 0)
    assert np.abs(ranks).max() < 0.08


def test_caches_miss_as_often_as_on_the_real_one(
    real: AttentionTrace, made: AttentionTrace
) -> None:
    for share in (0.25, 0.15):
        one, other = (misses(trace, share) for trace in (real, made))
        assert other == pytest.approx(one, rel=0.3), share


def misses(trace: AttentionTrace, share: float) -> tuple[float, float]:
    """Share of pages missed after step 16 with LRU and with Belady's optimum."""
    load = single(trace, top_k=16)
    demands, slots = load.future(), int(share * load.geometry.pages)
    warm = 16 * load.geometry.layers
    pages = sum(map(len, demands[warm:]))
    lru, best = lru_misses(demands, slots), belady_misses(demands, slots)
    return sum(lru[warm:]) / pages, float(best[warm:].sum()) / pages


def lru_misses(demands: list[Ids], slots: int) -> list[int]:
    held: OrderedDict[int, None] = OrderedDict()
    missed = []
    for demand in demands:
        pages = demand.tolist()
        missed.append(sum(page not in held for page in pages))
        for page in pages:
            held[page] = None
            held.move_to_end(page)
        while len(held) > slots:
            held.popitem(last=False)
    return missed


BYTES = """
import hashlib, sys
from pathlib import Path
from prefetchd.lab.attention import read_attention
from prefetchd.lab.synth import Adversary, Shape, generate
from prefetchd.lab.synth_fit import measure
from prefetchd.lab.synth_model import first_aims
aims = first_aims(measure(read_attention(Path(sys.argv[1]))))
shape = Shape(32768, 20, 8, 2, ranks=16, hint_ranks=32)
told = hashlib.sha256()
for columns in generate(aims, shape, seed=7, adversary=Adversary(8), chunk_steps=16):
    for name, values in columns.items():
        told.update(name.encode() + values.tobytes())
print(told.hexdigest())
"""


def test_the_same_seed_is_the_same_bytes_under_any_hash_seed() -> None:
    def told(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as path:
            command = [sys.executable, "-c", BYTES, str(path)]
            return subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment, timeout=60
            ).stdout

    assert told("1") == told("2")


def test_chunks_do_not_matter_and_seeds_do(fit: AttentionFit) -> None:
    def told(seed: int, chunk_steps: int) -> bytes:
        shape = Shape(20_000, 10, 4, 2, ranks=16, hint_ranks=32)
        chunks = list(generate(first_aims(fit), shape, seed=seed, chunk_steps=chunk_steps))
        assert sum(len(chunk["mass"]) for chunk in chunks) == 10
        return b"".join(
            np.concatenate([chunk[name] for chunk in chunks]).tobytes() for name in chunks[0]
        )

    assert told(1, 3) == told(1, 10)
    assert told(1, 10) != told(2, 10)


def test_any_context_takes_the_same_memory_and_keeps_the_picks(fit: AttentionFit) -> None:
    peaks = []
    for tokens, ids_type in ((1 << 17, np.uint16), (1 << 20, np.uint32)):
        shape = Shape(tokens, 40, 12, 4, ranks=24, hint_ranks=32)
        tracemalloc.start()
        chunks: list[Columns] = list(generate(first_aims(fit), shape, seed=3, chunk_steps=4))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        ids = np.concatenate([chunk["block_ids"] for chunk in chunks])
        mass = np.concatenate([chunk["mass"] for chunk in chunks])
        assert ids.dtype == ids_type
        assert ids.shape == (40, 12, 4, 24)
        assert (np.diff(np.sort(ids, axis=3).astype(np.int64), axis=3) > 0).all()
        assert (np.diff(mass, axis=3) <= 0).all()
        frontiers = (tokens + np.arange(40)) // 16
        ages = frontiers[:, None, None, None] - ids.astype(np.int64)
        assert ages.min() == 0  # the newest block is in, and none that is not written yet
        far = (ages >= 64) & (ids > 0)
        assert far[..., :16].mean() == pytest.approx(fit.far_share, abs=0.05)
        assert len(np.unique(ids[far])) > POOL_BLOCKS // 2
        spread = np.histogram(ids[far], bins=4, range=(0, int(frontiers[0])))[0]
        assert (spread > 0).all()  # from all of the context
    assert peaks[1] == pytest.approx(peaks[0], rel=0.25)


def test_the_context_may_outgrow_the_columns(fit: AttentionFit) -> None:
    tokens = 16 * (POOL_BLOCKS - 2)
    shape = Shape(tokens, 80, 3, 2, ranks=16, hint_ranks=16)
    ids = np.concatenate([x["block_ids"] for x in generate(first_aims(fit), shape, seed=1)])
    assert int(ids.max()) == shape.blocks - 1 > POOL_BLOCKS
    assert (np.diff(np.sort(ids, axis=3).astype(np.int64), axis=3) > 0).all()


@pytest.mark.parametrize("tokens", [3955, 1 << 17])
def test_a_jump_leaves_history_and_stale_hints_worthless(fit: AttentionFit, tokens: int) -> None:
    shape = Shape(tokens, 40, 12, 3, ranks=24, hint_ranks=32)
    plain, jumping, misled = (
        collect("t", first_aims(fit), shape, seed=4, adversary=adversary)
        for adversary in (None, Adversary(16), Adversary(16, wrong_hints=True))
    )

    def overlap(trace: AttentionTrace, step: int, before: int) -> float:
        now, then = (far_picks(trace, trace.block_ids[..., :16], at) for at in (step, before))
        return float((now & then).sum() / now.sum())

    def recall(trace: AttentionTrace, step: int) -> float:
        assert trace.hint_ids is not None
        now = far_picks(trace, trace.block_ids[..., :16], step)[1:]
        return float((now & far_picks(trace, trace.hint_ids, step)[1:]).sum() / now.sum())

    for jump in (16, 32):
        assert overlap(plain, jump, jump - 1) > 0.5
        assert overlap(jumping, jump, jump - 1) < 0.15
        assert overlap(jumping, jump + 7, jump + 1) > 0.4
        assert recall(jumping, jump) > 0.8
        assert recall(misled, jump) < 0.35
    assert recall(misled, 15) > 0.8
    assert "adversarial" in misled.synthetic
    assert "hints tell of those before" in misled.synthetic


def test_the_command_writes_a_trace_that_everything_calls_synthetic(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth_tuning, "GAINS", (1.0,))
    saved, out, again = tmp_path / "fit.json", tmp_path / "s.npz", tmp_path / "again" / "s.npz"
    again.parent.mkdir()
    size = ("--tokens", "3K", "--layers", "3", "--kv-heads", "2", "--steps", "20", "--seed", "9")
    with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as demo:
        words = ("trace", "synth", demo, *size, "--fit-out", saved, "--out", out, "--check")
        done = run_here(capsys, *words)
    assert done.code == 0, done.err
    assert "SYNTHETIC: generated, not recorded: fitted to summ_pydocs_demo, seed 9" in done.out
    assert "SYNTHETIC %" in done.out
    assert read_fit(saved).origin == "summ_pydocs_demo"
    run_here(capsys, "trace", "synth", saved, *size, "--out", again)
    assert again.read_bytes() == out.read_bytes()
    header = open_trace(out).header
    assert header.synthetic
    assert (header.layers, header.kv_heads, header.prompt_tokens) == (3, 2, 3072)
    trace = read_attention(out)
    assert "fitted to summ_pydocs_demo" in single(trace, top_k=16).synthetic
    assert "SYNTHETIC decode trace" in run_here(capsys, "trace", "info", out).out
    quick = ("--controls", "none", "--top-k", "16", "--staging", "50%")
    result = run_here(capsys, *replay_words(out, tmp_path / "store", *quick)).result()
    assert result.settings.trace == "s (SYNTHETIC)"
    assert result.notes[0].startswith("SYNTHETIC: the trace was generated, not recorded")
    simulated = run_here(capsys, "simulate", "decode", out, *quick, "--json", "-").result()
    assert simulated.notes == result.notes[:1]


def test_what_cannot_be_made_is_told(tmp_path: Path, capsys: Capture, fit: AttentionFit) -> None:
    with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as demo:
        words: list[str | Path] = ["trace", "synth", demo, "--out", tmp_path / "s.npz"]
        run_here(capsys, *words, "--tokens", "1000").failed(2, "62 blocks", "needs 80")
        run_here(capsys, *words, "--wrong-hints").failed(2, "--adversarial")
        run_here(capsys, *words[:-1], tmp_path).failed(2, "already there")
    assert not (tmp_path / "s.npz").exists()
    other = tmp_path / "other.json"
    other.write_text('{"version": 1}')
    run_here(capsys, "trace", "synth", other, "-o", tmp_path / "s.npz").failed(2, "no fit")
    none = tmp_path / "none.npz"
    run_here(capsys, "trace", "synth", none, "-o", tmp_path / "s.npz").failed(2, "no trace")
    newer = tmp_path / "newer.json"
    newer.write_bytes(fit.encode().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(TraceError, match="version 2"):
        read_fit(newer)
