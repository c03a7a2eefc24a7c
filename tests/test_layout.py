"""Geometry to bytes: published figures, windows and states, pages and padding, identity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.kv_parts import (
    DTYPE_BITS,
    LayerGroup,
    Part,
    attention,
    dsa,
    gated_delta,
    lightning,
    mla,
)
from prefetchd.layout import Layout, LayoutError, padded_bytes, uniform
from prefetchd.presets import PRESETS, preset
from prefetchd.roofline import roofline

KIB, MIB, GIB = 2**10, 2**20, 2**30
MI_TOKENS = 2**20


def one(group: LayerGroup, block_tokens: int = 16) -> Layout:
    return Layout("test", (group,), block_tokens)


# --- published figures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3-70b", 327_680),
        ("llama-3-8b", 131_072),
        ("deepseek-v3", 70_272),
        ("smollm2-135m", 23_040),  # 22.5 KiB
        ("qwen3-8b", 147_456),
        ("qwen3-32b", 262_144),
        ("qwen3-235b-a22b", 192_512),
        ("qwen3-next-80b-a3b", 24_576),  # 12 of 48 layers grow
    ],
)
def test_presets_grow_by_the_published_bytes_per_token(name: str, bytes_per_token: int) -> None:
    assert preset(name).bytes_per_token == bytes_per_token


def test_long_contexts_of_published_models() -> None:
    llama, deepseek = preset("llama-3-70b"), preset("deepseek-v3")
    assert llama.stored_bytes(131_072) == 40 * GIB
    assert llama.stored_bytes(MI_TOKENS) == 320 * GIB
    assert round(deepseek.stored_bytes(MI_TOKENS) / GIB, 1) == 68.6
    assert round(deepseek.stored_bytes(MI_TOKENS) / 1e9, 1) == 73.7


@pytest.mark.parametrize(
    ("group", "bytes_per_token"),
    [
        (attention(1, 64, 64, 128, "fp16"), 32 * KIB),
        (attention(1, 64, 8, 128, "fp16"), 4 * KIB),
        (attention(1, 64, 1, 128, "fp16"), 512),
        (mla(1), 1_152),
        (mla(1, dtype="fp8"), 576),
        (mla(1, dtype="fp4"), 288),
        (attention(1, 8, 8, 128, "int4"), KIB),
    ],
)
def test_bytes_per_token_and_layer(group: LayerGroup, bytes_per_token: int) -> None:
    assert group.bytes_per_token == bytes_per_token


def test_kinds_are_named_by_their_heads() -> None:
    kinds = [attention(1, 8, kv_heads, 64).kind for kv_heads in (8, 2, 1)]
    assert kinds == ["MHA", "GQA", "MQA"]


def test_linear_states_are_constant() -> None:
    delta = gated_delta(1)
    assert [state.state_bytes for state in delta.states] == [4 * MIB, 128 * KIB]
    assert lightning(1).state_bytes == 4 * MIB
    layout = one(lightning(3))
    assert layout.stored_bytes(1) == layout.stored_bytes(MI_TOKENS) == 12 * MIB
    assert layout.bytes_per_token == 0
    assert layout.layers == 0
    with pytest.raises(LayoutError, match="only states"):
        layout.slot_bytes(4096)


def test_sparse_attention_stores_all_and_loads_the_top_and_the_indexer() -> None:
    layout = one(dsa(1))
    assert layout.groups[0].crossover_tokens == 9_216
    assert layout.stored_bytes(100_000) == 100_000 * (1_152 + 256)
    assert layout.loaded_bytes(100_000) == 2_048 * 1_152 + 100_000 * 256
    assert layout.loaded_bytes(1_000) == layout.stored_bytes(1_000)
    at, latents = 9_216, 2_048 * 1_152
    assert at * 256 == latents < (at + 1) * 256
    assert dsa(1, indexer_dtype="fp8").crossover_tokens == 18_432
    assert preset("deepseek-v3.2").stored_bytes(MI_TOKENS) == 83.875 * GIB


def test_windows_bound_what_is_kept() -> None:
    layout = one(attention(1, 8, 8, 64, window=1_024, sinks=4))
    entry = 2 * 8 * 64 * 2
    assert layout.stored_bytes(1_000) == 1_000 * entry
    assert layout.stored_bytes(50_000) == 1_028 * entry
    assert layout.bytes_per_token == 0
    gemma = preset("gemma-3-27b")
    assert gemma.stored_bytes(50_000) == (10 * 50_000 + 52 * 1_024) * 2 * 16 * 128 * 2
    assert gemma.pattern[:7] == (0, 0, 0, 0, 0, 1, 0)


def test_deepseek_v4_pro_as_far_as_its_figures_go() -> None:
    """From its published layers; 9.62 GiB in BF16 is the engine team's measurement."""
    layout = preset("deepseek-v4-pro")
    per_token = 30 * (512 // 4 * 2 + 128 // 4 * 2) + 31 * 512 * 2 // 128
    window = 61 * 128 * 512 * 2
    assert layout.bytes_per_token == per_token == 9_848
    assert layout.stored_bytes(MI_TOKENS) == per_token * MI_TOKENS + window
    assert round(layout.stored_bytes(MI_TOKENS) / GIB, 2) == 9.62
    assert layout.block_tokens == 256
    classes = layout.page_classes(4096)
    assert [c.page_bytes for c in classes] == [65_536, 16_384, 2_048]
    assert [c.layers for c in classes] == [61, 30, 31]
    assert [c.pages_per_block for c in classes] == [30 + 61 * 4, 30, 31]
    assert classes[0].windowed_pages == 61 * 4


def test_deepseek_v4_pro_quantised_is_below_the_measured_figure_and_says_so() -> None:
    layout = preset("deepseek-v4-pro", dtype="fp8", indexer_dtype="fp4")
    computed = layout.stored_bytes(MI_TOKENS) / GIB
    assert 4.34 < computed < 4.35  # measured: about 4.8, with scales and a bf16 rotary part
    assert any("4.34 GiB" in note and "4.8 GiB" in note for note in layout.notes)


# --- rows, pages and padding ------------------------------------------------------------------


@given(
    elements=st.integers(1, 5_000),
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    rows=st.integers(1, 64),
    scale=st.integers(0, 16),
)
def test_no_nibble_is_lost(elements: int, dtype: str, rows: int, scale: int) -> None:
    entry = Part("kv", elements, dtype, rows, scale).entry_bytes
    bits = rows * (elements * DTYPE_BITS[dtype] + 8 * scale)
    assert bits <= entry * 8 < bits + 8 * rows


@pytest.mark.parametrize(
    ("layout", "page_bytes", "slots"),
    [
        (preset("deepseek-v3"), 18_432, (18_432, 20_480, 32_768)),
        (one(attention(1, 64, 8, 128, "fp8", scale_bytes=4)), 33_792, (33_792, 36_864, 49_152)),
        (uniform(2, 3_098_112), 3_098_112, (3_098_112, 3_100_672, 3_112_960)),
        (preset("smollm2-135m"), 12_288, (12_288, 12_288, 16_384)),
    ],
)
def test_pages_are_exact_and_slots_padded(
    layout: Layout, page_bytes: int, slots: tuple[int, int, int]
) -> None:
    assert layout.page_bytes == page_bytes
    for alignment, slot in zip((512, 4_096, 16_384), slots, strict=True):
        assert layout.slot_bytes(alignment) == slot
        assert layout.padding_share(alignment) == pytest.approx(1 - page_bytes / slot)
        (only,) = layout.page_classes(alignment)
        assert only.padding_share == only.runtime_padding_share


def test_several_classes_share_the_slot_of_the_largest() -> None:
    layout = preset("deepseek-v3.2")
    assert (layout.layers, layout.model_layers) == (122, 61)
    assert layout.page_sizes().tolist() == [18_432, 4_096] * 61
    assert layout.block_bytes == 61 * (18_432 + 4_096)
    assert layout.slot_bytes(4096) == 20_480
    assert layout.padding_share(4096) == pytest.approx(0.45)
    latent, indexer = layout.page_classes(4096)
    assert latent.padding_share == pytest.approx(0.1)
    assert indexer.padding_share == 0
    assert indexer.runtime_padding_share == pytest.approx(0.8)


def test_pages_follow_the_models_own_order() -> None:
    small, large = attention(2, 8, 1, 64), attention(1, 8, 2, 64)
    layout = Layout("mixed", (small, large), pattern=(0, 1, 0))
    assert layout.page_sizes().tolist() == [4_096, 8_192, 4_096]


@given(size=st.integers(0, 2**40), power=st.integers(0, 20))
def test_padding_is_the_least_multiple(size: int, power: int) -> None:
    padded = padded_bytes(size, 2**power)
    assert padded % 2**power == 0
    assert 0 <= padded - size < 2**power


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_consistent_and_can_be_shown(name: str) -> None:
    layout = preset(name)
    sizes = layout.page_sizes()
    assert (len(sizes), int(sizes.sum())) == (layout.layers, layout.block_bytes)
    classes = layout.page_classes(4096)
    assert sum(c.pages_per_block for c in classes) == layout.layers
    assert sum(c.pages_per_block * c.page_bytes for c in classes) == layout.block_bytes
    shown = layout.describe(4096)
    assert all(len(row) == len(shown.columns) for row in shown.rows)
    assert len(shown.rows) == len(classes) + (layout.state_bytes > 0)
    assert f"{layout.page_bytes:,}" in shown.rows[0]
    for tokens in (0, 1, 100, 5_000, 300_000):
        assert layout.loaded_bytes(tokens) <= layout.dense_step_bytes(tokens)


# --- whether dense decode is possible ---------------------------------------------------------


def test_the_roofline_says_what_a_device_cannot_do() -> None:
    step_ns = 20_000_000
    verdict = roofline(preset("llama-3-70b"), 131_072, 7 * 10**9, step_ns)
    assert verdict.dense_bytes == verdict.loaded_bytes == 40 * GIB
    assert verdict.dense_read_ns == -(-40 * GIB * 10**9 // (7 * 10**9))
    assert not verdict.possible
    assert "40 GiB" in verdict.words
    assert "is not possible" in verdict.words
    short = roofline(preset("smollm2-135m"), 2_048, 7 * 10**9, step_ns)
    assert short.possible
    assert "is possible" in short.words
    sparse = roofline(preset("deepseek-v3.2"), 131_072, 500 * 10**9, step_ns)
    assert "top-k" in sparse.words
    assert sparse.loaded_read_ns < step_ns < sparse.dense_read_ns


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: preset("llama-9"), "smollm2-135m"),
        (lambda: preset("llama-3-8b", dtype="bf17"), "unknown data type 'bf17'"),
        (lambda: preset("deepseek-v4-pro", block_tokens=16), "multiple of 128 tokens"),
        (lambda: preset("deepseek-v4-pro", block_tokens=64), "multiple of 128 tokens"),
        (lambda: preset("llama-3-8b", block_tokens=0), "tokens per block"),
        (lambda: uniform(0, 4096), "opaque layers is 0"),
        (lambda: uniform(2, -1), "elements of part 'page' is -1"),
        (lambda: uniform(2, 2**30 + 1), "larger than 1 GiB"),
        (lambda: attention(1, 8, True, 64), "KV heads is True"),
        (lambda: Part("kv", 8, "bf16", sinks=4), "sinks but no window"),
        (lambda: LayerGroup("empty", 1), "cache nothing"),
        (lambda: Layout("none", ()), "number of layers"),
        (lambda: Layout("bad", (mla(2),), pattern=(0, 1)), "does not match"),
        (lambda: uniform(2, 4096).slot_bytes(4095), "not a power of two"),
        (lambda: uniform(2, 4096).slot_bytes(0), "alignment in bytes is 0"),
        (lambda: uniform(2, 4096).stored_bytes(-1), "context length is -1"),
        (lambda: roofline(uniform(2, 4096), 16, 0, 1), "bandwidth"),
    ],
)
def test_what_cannot_be_is_refused_in_words(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(LayoutError, match=says):
        make()
