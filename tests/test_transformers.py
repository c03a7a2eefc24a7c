"""A model whose KV cache is in prefetchd says the same tokens, now and after a restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefetchd import Options, block_keys
from tests.tiny_model import LAYERS, builtin_cache, prompt, stored, tiny_model, torch, usual, word

adapter = pytest.importorskip("prefetchd.adapters.transformers")

BLOCKS = 40
QUIET = Options(predictor="attention", staging_bytes=1 << 18)  # 64 pages of 160, float32


def test_the_base_package_imports_nothing_of_it() -> None:
    code = (
        "import sys, prefetchd, prefetchd.cli\n"
        "print([name for name in ('torch', 'transformers', 'prefetchd.adapters') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("dtype", "length"),
    [("float32", 1), ("float32", 17), ("float32", 200), ("bfloat16", 200), ("float16", 200)],
)
def test_exact_mode_says_the_same_tokens(dtype: str, length: int, tmp_path: Path) -> None:
    model, ids, new = tiny_model(dtype=dtype), prompt(length), 36  # two blocks and more
    expected = usual(model, ids, new)
    with adapter.open(model, tmp_path / "kv", blocks=24) as kv:
        assert stored(kv, ids, new) == expected
        assert kv.runtime.stats().outcomes["miss"] > 0 or length < 200
        if dtype == "float32":
            assert stored(kv, ids, new) == expected  # found again in the same process
    with adapter.open(model, tmp_path / "kv", blocks=24) as kv, torch.no_grad():
        found, theirs = kv.cache(ids), builtin_cache(model, ids)
        known = (length - 1) // 16 * 16
        assert found.get_seq_length() == known
        for layer in theirs.layers:
            layer.keys, layer.values = layer.keys[:, :, :known], layer.values[:, :, :known]
        ours, usually = (model(ids[:, known:], **{word(): one}).logits for one in (found, theirs))
        assert torch.equal(ours, usually)  # bit by bit, after a restart
        if dtype == "float32":
            assert stored(kv, ids, new) == expected


def test_pages_that_are_padded_on_the_medium_are_gathered_without_it(tmp_path: Path) -> None:
    model = tiny_model(num_attention_heads=2, num_key_value_heads=1, head_dim=10)
    ids = prompt(100)
    with adapter.open(model, tmp_path / "kv", blocks=24) as kv:
        assert kv.runtime.slot_bytes > kv.runtime.page_bytes
        assert stored(kv, ids, 20) == usual(model, ids, 20)


def test_another_process_finds_the_prompt(tmp_path: Path) -> None:
    model, ids = tiny_model(), prompt(300)
    with adapter.open(model, tmp_path / "kv", blocks=BLOCKS) as kv:
        said = stored(kv, ids, 30)
    assert said == usual(model, ids, 30)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import prefetchd.adapters.transformers as adapter\n"
        "from tests.tiny_model import prompt, stored, tiny_model\n"
        f"with adapter.open(tiny_model(), Path(sys.argv[1]), blocks={BLOCKS}) as kv:\n"
        "    print(kv.cache(prompt(300)).get_seq_length(), *stored(kv, prompt(300), 30))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "kv")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert [int(word) for word in done.stdout.split()] == [288, *said]


def test_a_longer_prompt_goes_on_where_a_shorter_one_ended() -> None:
    model, ids = tiny_model(), prompt(300)
    with adapter.open(model, None, blocks=BLOCKS) as kv:
        stored(kv, ids[:, :100], 2)
        assert kv.cache(ids).get_seq_length() == 96
        assert kv.cache(prompt(300, seed=2)).get_seq_length() == 0
        assert stored(kv, ids, 20) == usual(model, ids, 20)


def test_blocks_have_the_names_of_the_whole_chain_and_each_token_is_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = tiny_model(), prompt(150)
    hashed = []

    def counting(tokens: list[int], *places: Any, **more: Any) -> list[bytes]:
        hashed.append(len(tokens))
        return block_keys(tokens, *places, **more)

    monkeypatch.setattr(adapter, "block_keys", counting)
    with adapter.open(model, None, blocks=BLOCKS) as kv:
        stored(kv, ids[:, :100], 2)
        assert sum(hashed) == 99 + 96  # those that are looked for, and those that are stored
        hashed.clear()
        said = stored(kv, ids, 40)  # goes on after six blocks that are found
        assert sum(hashed) == 149 + (189 - 96) // 16 * 16
        everything = [*ids[0].tolist(), *said]
        assert len(kv.runtime.find(block_keys(everything, kv.layout))) == 11


def test_sequences_take_turns(tmp_path: Path) -> None:
    """What one has asked for ahead of time does not keep the other from room."""
    model = tiny_model()
    options = replace(QUIET, staging_bytes=1 << 17, demand_timeout_s=5.0)
    ids = [prompt(220, seed) for seed in (1, 2)]
    with adapter.open(model, None, blocks=BLOCKS, options=options) as kv, torch.no_grad():
        caches = [kv.cache() for _ in ids]
        said: list[list[int]] = [[], []]
        for one, cache in zip(ids, caches, strict=True):
            kv.prefill(cache, one)
        following = [one[:, -1:] for one in ids]
        for _ in range(20):
            for number, cache in enumerate(caches):
                logits = model(following[number], **{word(): cache}).logits
                following[number] = logits[:, -1:].argmax(-1)
                said[number].append(int(following[number]))
    assert said == [usual(model, one, 20) for one in ids]


def test_another_models_keys_and_values_are_never_found(tmp_path: Path) -> None:
    ids = prompt(100)
    with adapter.open(tiny_model(), tmp_path / "kv", blocks=BLOCKS) as kv:
        stored(kv, ids, 2)
    other, turned = (
        tiny_model(seed=2),
        tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    )
    nearly = tiny_model()
    nearly.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1e-3
    first = adapter.layout_of(tiny_model())
    for model in (other, turned, nearly):
        assert adapter.layout_of(model).fingerprint() != first.fingerprint()
        with pytest.raises(Exception, match="layout"):
            adapter.open(model, tmp_path / "kv", blocks=BLOCKS)
    assert adapter.layout_of(tiny_model()).fingerprint() == first.fingerprint()


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    model, ids = tiny_model(), prompt(100)
    for namespace, found in (("one", 0), ("two", 0), ("one", 96)):
        options = replace(QUIET, namespace=namespace)
        with adapter.open(model, tmp_path / "kv", blocks=BLOCKS, options=options) as kv:
            assert kv.cache(ids).get_seq_length() == found
            stored(kv, ids, 2)


def since_5_24(input_ids: Any, cache: Any = None) -> None: ...
def before_5_24(input_ids: Any, past_key_values: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("named", "name"), [(since_5_24, "cache"), (before_5_24, "past_key_values")]
)
def test_the_cache_is_given_under_the_name_that_the_model_has(
    named: Callable[..., None], name: str
) -> None:
    model = tiny_model()
    assert adapter.cache_word(SimpleNamespace(forward=named)) == name
    with adapter.open(model, None, blocks=BLOCKS) as kv, torch.no_grad():
        cache = kv.cache()
        kv._begins(model, (), {"input_ids": prompt(5), name: cache})
        assert cache.sequence.tokens == prompt(5)[0].tolist()


# --- sparse ---


def test_sparse_mode_with_all_blocks_says_the_same_tokens_and_fewer_read_less() -> None:
    model, ids = tiny_model(), prompt(300)
    expected = usual(model, ids, 20)
    with adapter.open(model, None, blocks=BLOCKS) as kv:
        for kind in ("mean", "minmax", "2bit", "4bit"):
            sparse = adapter.Sparse(blocks=BLOCKS, kind=kind)
            assert stored(kv, ids, 20, sparse=sparse) == expected
        before = sum(kv.runtime.stats().outcomes.values())
        stored(kv, ids, 20, sparse=adapter.Sparse(blocks=2))
        asked = sum(kv.runtime.stats().outcomes.values()) - before
    # The prompt's last token reads all once, to sum the far blocks up; 19 choose 2 blocks a layer.
    assert asked <= LAYERS * (1 + 19 + 20 * 2)


def test_sparse_steps_are_measured_as_a_replay_measures_them() -> None:
    model, ids = tiny_model(), prompt(400)
    with adapter.open(model, None, blocks=BLOCKS, options=QUIET) as kv:
        stored(kv, ids, 1)
        meter = kv.meter(warmup_steps=4)
        stored(kv, ids, 30, sparse=adapter.Sparse(blocks=3), meter=meter)
        run = meter.figures("sparse")
        assert run.outcomes.total == (len(run.step_ms) - 4) * LAYERS * 3
        assert len(run.per_layer.miss) == LAYERS
        assert sum(run.per_layer.miss) == run.outcomes.miss
        assert run.hit_rate is not None
        assert run.stall_us.n == (len(run.step_ms) - 4) * LAYERS
        with pytest.raises(ValueError, match="decode more tokens"):
            kv.meter().figures("nothing")


def test_summaries_recall_what_exact_scores_choose() -> None:
    from prefetchd.adapters.summaries import exact_logits, masses, scaled, summary

    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 60, 16, 16, generator=generator)
    queries = torch.randn(20, 4, 16, generator=generator)
    recall = {}
    for kind in ("mean", "minmax", "2bit", "4bit"):
        made = summary(kind)
        made.add(keys[:, :23])
        made.add(keys[:, 23:])
        shares = []
        for query in queries:
            turned = scaled(query * 4, 2)
            best = set(torch.topk(masses(exact_logits(keys, turned)), 16).indices.tolist())
            mine = torch.topk(masses(made.logits(turned)), 16).indices.tolist()
            shares.append(len(best.intersection(mine)) / 16)
        recall[kind] = float(np.mean(shares))
    assert recall["4bit"] > 0.9 > recall["2bit"] > max(recall["mean"], recall["minmax"])
    with pytest.raises(ValueError, match="there are mean"):
        summary("3bit")


# --- what is refused ---


def test_what_cannot_be_right_is_refused() -> None:
    model, ids = tiny_model(), prompt(40)
    with adapter.open(model, None, blocks=BLOCKS) as kv:
        with pytest.raises(ValueError, match="batch of 2"):
            kv.generate(torch.cat([ids, ids]), max_new_tokens=2)
        with pytest.raises((ValueError, NotImplementedError), match="beams"):
            stored(kv, ids, 2, num_beams=2)
        with pytest.raises(ValueError, match="no padding"):
            model(ids, attention_mask=torch.arange(40)[None] > 3, **{word(): kv.cache()})
        with pytest.raises(ValueError, match="positions from 0"):
            model(ids, position_ids=torch.arange(1, 41)[None], **{word(): kv.cache()})
        with pytest.raises(ValueError, match="pass input_ids"):
            model(inputs_embeds=torch.zeros(1, 4, 64), **{word(): kv.cache()})
        with pytest.raises(ValueError, match="call the model itself"):
            model.model(ids, **{word(): kv.cache()})
        cache = kv.cache()
        for refused in (cache.reset, lambda: cache.crop(1), lambda: cache.reorder_cache(None)):
            with pytest.raises(NotImplementedError, match="a stored cache"):
                refused()


def test_models_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match="sliding_attention"):
        adapter.layout_of(tiny_model(layer_types=["full_attention", "sliding_attention"] * 2))
    model = tiny_model()
    with adapter.open(model, None, blocks=BLOCKS) as kv:
        del model.model.layers[2].self_attn.q_proj
        with pytest.raises(ValueError, match="lacks q_proj"):
            kv.cache(sparse=adapter.Sparse())
    with pytest.raises(ValueError, match="at least one far block"):
        adapter.Sparse(blocks=0)


def test_staging_that_is_too_small_for_a_layer_is_told_with_the_way_out() -> None:
    model, ids = tiny_model(), prompt(300)
    options = replace(QUIET, staging_bytes=10 * 4096)
    with (
        adapter.open(model, None, blocks=BLOCKS, options=options) as kv,
        pytest.raises(ValueError, match="more staging"),
    ):
        stored(kv, ids, 2)
