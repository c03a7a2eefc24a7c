"""Geometries of well-known models, by name, as their published configurations give them.

Decides which layers a model has; the bytes follow in `layout`. A figure that is not published is
not made up: the preset's notes say what is left out. Data types are those of the cache, not of the
weights: "bf16" unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prefetchd.kv_parts import (
    LayerGroup,
    LayoutError,
    attention,
    compressed,
    dsa,
    gated_delta,
    lightning,
    mla,
)
from prefetchd.layout import Layout

Build = Callable[[str, str], Layout]
"""From the data types of the cache and of the indexer to a layout."""

V4_BLOCK_TOKENS = 256
"""A whole c128a page and whole 64-token window pages: the logical block of published engines."""


def grouped(layers: Sequence[LayerGroup]) -> tuple[tuple[LayerGroup, ...], tuple[int, ...]]:
    """Join one-layer groups in model order into groups of equal layers and their pattern."""
    index: dict[LayerGroup, int] = {}
    pattern = tuple(index.setdefault(layer, len(index)) for layer in layers)
    joined = [replace(layer, layers=pattern.count(number)) for layer, number in index.items()]
    return tuple(joined), pattern


def repeated(cycle: Sequence[LayerGroup], layers: int) -> tuple[LayerGroup, ...]:
    """`layers` one-layer groups that go round a cycle from its start."""
    return tuple(cycle[layer % len(cycle)] for layer in range(layers))


def _dense(name: str, layers: int, heads: int, kv_heads: int, head_dim: int) -> Build:
    def build(dtype: str, indexer_dtype: str) -> Layout:
        return Layout(name, (attention(layers, heads, kv_heads, head_dim, dtype),))

    return build


def _mixed(
    name: str, cycle: Callable[[str], Sequence[LayerGroup]], layers: int, *notes: str
) -> Build:
    def build(dtype: str, indexer_dtype: str) -> Layout:
        groups, pattern = grouped(repeated(cycle(dtype), layers))
        return Layout(name, groups, pattern=pattern, notes=notes)

    return build


def _qwen3_next(dtype: str) -> Sequence[LayerGroup]:
    delta = gated_delta(1, heads=32, conv_channels=8192)
    return (delta, delta, delta, attention(1, 16, 2, 256, dtype))


def _minimax(dtype: str) -> Sequence[LayerGroup]:
    return (*repeated([lightning(1)], 7), attention(1, 64, 8, 128, dtype))


def _gemma3(dtype: str) -> Sequence[LayerGroup]:
    local = attention(1, 32, 16, 128, dtype, window=1024)
    return (*repeated([local], 5), attention(1, 32, 16, 128, dtype))


def _gpt_oss(dtype: str) -> Sequence[LayerGroup]:
    return (attention(1, 64, 8, 64, dtype, window=128), attention(1, 64, 8, 64, dtype))


def _deepseek_v3(dtype: str, indexer_dtype: str) -> Layout:
    return Layout("deepseek-v3", (mla(61, dtype=dtype),))


def _deepseek_v32(dtype: str, indexer_dtype: str) -> Layout:
    note = (
        "the indexer is counted without scales; engines keep it in FP8 with 4 bytes of scale per "
        "entry (give indexer_dtype)"
    )
    group = dsa(61, dtype=dtype, indexer_dtype=indexer_dtype)
    return Layout("deepseek-v3.2", (group,), notes=(note,))


def _deepseek_v4_pro(dtype: str, indexer_dtype: str) -> Layout:
    heavy = compressed(1, 128, dtype=dtype)
    light = compressed(1, 4, dtype=dtype, indexer=128, top=1024, indexer_dtype=indexer_dtype)
    groups, pattern = grouped((heavy, heavy, *repeated([light, heavy], 59)))
    notes = (
        "61 layers: 30 c4a with an indexer, 31 c128a, each with a 128-token window; entries of 512 "
        "elements shared by keys and values",
        "not counted: the running state of the compressors (less than one entry's tokens per "
        "layer; its format is the engine's own), the draft layer for multi-token prediction",
        "FP8 and FP4 figures are of the elements alone (4.34 GiB at 1 Mi tokens); the records of "
        "deployed engines also hold scales and a rotary part in bf16, so what is measured there is "
        "more (about 4.8 GiB)",
    )
    return Layout("deepseek-v4-pro", groups, V4_BLOCK_TOKENS, pattern, notes=notes)


_STATE_NOTE = "states are counted in fp32, the whole convolution window included"
_SINK_NOTE = "attention sinks are learned numbers of the model here: no cached tokens"

PRESETS: dict[str, Build] = {
    "smollm2-135m": _dense("smollm2-135m", 30, 9, 3, 64),
    "llama-3-8b": _dense("llama-3-8b", 32, 32, 8, 128),
    "llama-3-70b": _dense("llama-3-70b", 80, 64, 8, 128),
    "qwen3-8b": _dense("qwen3-8b", 36, 32, 8, 128),
    "qwen3-32b": _dense("qwen3-32b", 64, 64, 8, 128),
    "qwen3-235b-a22b": _dense("qwen3-235b-a22b", 94, 64, 4, 128),
    "qwen3-next-80b-a3b": _mixed("qwen3-next-80b-a3b", _qwen3_next, 48, _STATE_NOTE),
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3.2": _deepseek_v32,
    "deepseek-v4-pro": _deepseek_v4_pro,
    "minimax-text-01": _mixed("minimax-text-01", _minimax, 80, _STATE_NOTE),
    "gemma-3-27b": _mixed("gemma-3-27b", _gemma3, 62),
    "gpt-oss-120b": _mixed("gpt-oss-120b", _gpt_oss, 36, _SINK_NOTE),
}


def preset(
    name: str,
    *,
    dtype: str = "bf16",
    indexer_dtype: str | None = None,
    block_tokens: int | None = None,
) -> Layout:
    """The layout of a known model. `block_tokens`: 16, or 256 for deepseek-v4-pro, unless given.

    `indexer_dtype` is `dtype` unless given. Raises LayoutError for an unknown name or data type.
    """
    if name not in PRESETS:
        raise LayoutError(
            f"there is no preset {name!r}: take one of {', '.join(PRESETS)}, or give the model's "
            "config.json"
        )
    layout = PRESETS[name](dtype, indexer_dtype or dtype)
    return layout if block_tokens is None else replace(layout, block_tokens=block_tokens)
