"""A model's own decode, recorded: what it attended to, in bounded memory, ready to be replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd.lab.attention import read_attention
from prefetchd.lab.trace_format import TraceError, open_trace
from tests.replays import QUICK, run_here
from tests.tiny_model import GREEDY, LAYERS, prompt, save_tiny, tiny_model, torch, usual

recording = pytest.importorskip("prefetchd.adapters.recording")
PROMPT, NEW = 200, 40


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "tiny.trace"
    model, ids = tiny_model(), prompt(PROMPT)
    with recording.Recorder(model, path, name="tiny", licence="CC0") as recorder:
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
        said = model.generate(ids, **given, **GREEDY)[0, PROMPT:].tolist()
        assert max(len(recorder._kept), len(recorder._step)) <= recording.KEPT_STEPS
    assert said == usual(model, ids, NEW)  # and it says what it always says
    assert recorder.steps == NEW - 1
    assert model.config._attn_implementation == "sdpa"
    return path


def test_what_is_recorded_is_what_the_model_attends_to(trace: Path) -> None:
    recorded = read_attention(trace)
    header = open_trace(trace).header
    assert (recorded.steps, header.layers, header.kv_heads) == (NEW - 1, LAYERS, 2)
    assert (recorded.prompt_tokens, recorded.block_tokens, header.licence) == (PROMPT, 16, "CC0")
    model = tiny_model()
    tokens = torch.tensor([prompt(PROMPT)[0].tolist() + usual(model, prompt(PROMPT), NEW)])
    model.set_attn_implementation("eager")
    for step in (0, 20, NEW - 2):
        upto = PROMPT + step + 1
        with torch.no_grad():
            weights = model(tokens[:, :upto], output_attentions=True).attentions
        for layer in range(LAYERS):
            last = weights[layer][0, :, -1].view(2, 2, upto).mean(dim=1).numpy()
            padded = np.pad(last, ((0, 0), (0, -upto % 16))).reshape(2, -1, 16).sum(axis=2)
            ids = recorded.block_ids[step, layer].astype(np.int64)
            assert np.allclose(
                np.take_along_axis(padded, ids, 1), recorded.mass[step, layer], atol=2e-3
            )
            assert (np.diff(recorded.mass[step, layer].astype(np.float32)) <= 0).all()


def test_hints_foresee_most_of_the_next_layer(trace: Path) -> None:
    recorded = read_attention(trace)
    assert recorded.hint(3, 0, 2) is None
    shares = []
    for step in range(recorded.steps):
        for layer in range(1, LAYERS):
            hint = recorded.hint(step, layer, 2)
            assert hint is not None
            needed = recorded.geometry.page_ids(recorded.need(step, layer, 2)[0], layer)
            shares.append(np.isin(needed, hint.pages).mean())
    assert np.mean(shares) > 0.5


def test_a_recorded_trace_is_replayed_and_simulated(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(capsys, "trace", "info", trace, "--json", "--top-k", "2")
    assert json.loads(done.out)["decode"]["steps"] == NEW - 1
    for command in ("replay", "simulate"):
        options = QUICK if command == "replay" else QUICK[4:]
        done = run_here(capsys, command, "decode", trace, *options, "--steps", "8")
        assert done.code == 0, done.err


def test_what_is_no_plain_decode_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    model, path = tiny_model(), tmp_path / "out.trace"
    one, other = prompt(40), prompt(30, seed=2)

    def record(*prompts: Any) -> None:
        with recording.Recorder(model, path, name="wrong"):
            for ids in prompts:
                given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4}
                model.generate(ids, **given, **GREEDY)

    with pytest.raises(TraceError, match="a batch of 2"):
        record(torch.cat([one, one]))
    with pytest.raises(TraceError, match="one sequence at a time"):
        record(one, other)
    with pytest.raises(TraceError, match="nothing was written"):
        record()
    assert list(tmp_path.iterdir()) == []
    assert model.config._attn_implementation == "sdpa"


def test_the_command_records_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text, out = save_tiny(tmp_path / "model"), tmp_path / "text", tmp_path / "out.trace"
    text.write_text("It was a dark and stormy night; the rain fell in torrents. " * 6)
    words = ("trace", "record", folder, "--prompt", text, "--out", out, "--tokens", "12")
    done = run_here(capsys, *words, "--prompt-tokens", "200")
    assert done.code == 0, done.err
    assert "11 steps" in done.out
    assert read_attention(out).prompt_tokens == 200
    run_here(capsys, *words).failed(2, "already there")
    run_here(capsys, "trace", "record", tmp_path, "--prompt", text, "-o", tmp_path / "x").failed(
        2, "no folder with a causal model"
    )
