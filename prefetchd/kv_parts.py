"""What one layer of a model caches: the parts that grow with context and the states that do not.

Decides the bytes of an entry, of a layer and of one decode step, and names the kinds of attention
by their parts. Refuses to know blocks, pages and alignments (`layout`), and which model has what
(`presets`, `hf_config`). All arithmetic is in whole bytes; a row of half-byte elements that ends
in the middle of a byte is rounded up to the next one, on purpose: no nibble is lost, and each row
starts on a byte of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

DTYPE_BITS = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "fp4": 4,
    "raw": 8,  # bytes of an engine's own making, see `uniform`
}
LAYERS_MAX = 4096
NUMBER_MAX = 2**31 - 1  # of elements, tokens and bytes of one row: far above any model


class LayoutError(Exception):
    """A layout cannot be as asked: what, where, why and what to do, in one message."""


def check_count(value: object, what: str, low: int, high: int = NUMBER_MAX) -> int:
    """Return `value` if it is a whole number in `low..high`; LayoutError naming `what` if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise LayoutError(f"{what} is {value!r}; it must be a whole number from {low} to {high:,}")
    return value


def _row_bytes(elements: int, dtype: str) -> int:
    return -(-elements * DTYPE_BITS[dtype] // 8)


def _check_dtype(dtype: str, what: str) -> None:
    if dtype not in DTYPE_BITS:
        known = ", ".join(DTYPE_BITS)
        raise LayoutError(f"{what} has the unknown data type {dtype!r}; known are {known}")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of cached entry in a layer: `rows` rows of `elements`, once per `stride` tokens.

    `scale_bytes` follow each row (scales of a quantised row, or what is kept at a higher
    precision). With a `window` only the last `window` tokens and the first `sinks` are ever
    needed. `top`: a step loads at most so many entries (None: all). `page_tokens`: tokens in one
    page where that is less than the block.
    """

    name: str
    elements: int
    dtype: str
    rows: int = 1
    scale_bytes: int = 0
    stride: int = 1
    window: int | None = None
    sinks: int = 0
    top: int | None = None
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_dtype(self.dtype, f"part {self.name!r}")
        for field, low in (("elements", 1), ("rows", 1), ("stride", 1)):
            check_count(getattr(self, field), f"{field} of part {self.name!r}", low)
        for field in ("scale_bytes", "sinks"):
            check_count(getattr(self, field), f"{field} of part {self.name!r}", 0)
        for field in ("window", "top", "page_tokens"):
            if getattr(self, field) is not None:
                check_count(getattr(self, field), f"{field} of part {self.name!r}", 1)
        if self.sinks and self.window is None:
            raise LayoutError(f"part {self.name!r} has sinks but no window: give it a window")

    @property
    def entry_bytes(self) -> int:
        return self.rows * (_row_bytes(self.elements, self.dtype) + self.scale_bytes)

    def entries(self, context_tokens: int) -> int:
        """Entries kept at a context length. One exists once its `stride` tokens are complete."""
        if self.window is not None:
            context_tokens = min(context_tokens, self.window + self.sinks)
        return context_tokens // self.stride

    def stored_bytes(self, context_tokens: int) -> int:
        return self.entries(context_tokens) * self.entry_bytes

    def loaded_bytes(self, context_tokens: int) -> int:
        """What one step reads: everything kept, or the `top` entries of it."""
        entries = self.entries(context_tokens)
        return (entries if self.top is None else min(entries, self.top)) * self.entry_bytes


@dataclass(frozen=True, slots=True)
class State:
    """What a layer keeps of any context at the same size: `elements` numbers (the whole array)."""

    name: str
    elements: int
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        _check_dtype(self.dtype, f"state {self.name!r}")
        check_count(self.elements, f"elements of state {self.name!r}", 1)

    @property
    def state_bytes(self) -> int:
        return _row_bytes(self.elements, self.dtype)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind; `kind` is a label for people ("GQA", "MLA", ...) and changes no byte."""

    kind: str
    layers: int
    parts: tuple[Part, ...] = ()
    states: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.layers, f"the number of {self.kind} layers", 1, LAYERS_MAX)
        if not self.parts and not self.states:
            raise LayoutError(f"the {self.kind} layers cache nothing: leave them out")

    @property
    def bytes_per_token(self) -> int:
        """Growth per token of one layer, rounded up to a whole byte; windows and states are 0."""
        return growth_bytes([part for part in self.parts if part.window is None])

    @property
    def state_bytes(self) -> int:
        """Constant bytes of one layer."""
        return sum(state.state_bytes for state in self.states)

    def stored_bytes(self, context_tokens: int) -> int:
        """Bytes of all layers of the group at a context length."""
        growing = sum(part.stored_bytes(context_tokens) for part in self.parts)
        return self.layers * (growing + self.state_bytes)

    def loaded_bytes(self, context_tokens: int) -> int:
        """Bytes that one decode step reads, over all layers of the group."""
        growing = sum(part.loaded_bytes(context_tokens) for part in self.parts)
        return self.layers * (growing + self.state_bytes)

    @property
    def crossover_tokens(self) -> int | None:
        """The context above which the parts read whole (the indexer) outweigh the top entries.

        top x entry bytes / growth of what is read whole; None without a top-k selection.
        """
        limited = sum((part.top or 0) * part.entry_bytes for part in self.parts)
        whole = [part for part in self.parts if part.top is None and part.window is None]
        if not limited or not whole:
            return None
        period = lcm(*(part.stride for part in whole))
        return limited * period // sum(period // p.stride * p.entry_bytes for p in whole)


def growth_bytes(parts: Sequence[Part]) -> int:
    """Bytes per token of parts with unequal strides, summed exactly and then rounded up."""
    period = lcm(*(part.stride for part in parts))
    return -(-sum(period // part.stride * part.entry_bytes for part in parts) // period)


# --- the kinds of attention ---


def attention(
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "bf16",
    *,
    window: int | None = None,
    sinks: int = 0,
    scale_bytes: int = 0,
) -> LayerGroup:
    """MHA, GQA or MQA, and with a window SWA: 2 x KV heads x head dimension per token."""
    kind = "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
    rows = 2 * check_count(kv_heads, "the number of KV heads", 1)
    name = "kv" if window is None else "window"
    part = Part(name, head_dim, dtype, rows, scale_bytes, window=window, sinks=sinks)
    return LayerGroup(kind if window is None else f"SWA-{kind}", layers, (part,))


def mla(
    layers: int, latent: int = 512, rope: int = 64, dtype: str = "bf16", *, scale_bytes: int = 0
) -> LayerGroup:
    """Multi-head latent attention: one latent with its rotary part, shared by keys and values."""
    return LayerGroup("MLA", layers, (Part("latent", latent + rope, dtype, 1, scale_bytes),))


def dsa(
    layers: int,
    *,
    latent: int = 512,
    rope: int = 64,
    indexer: int = 128,
    top: int = 2048,
    dtype: str = "bf16",
    indexer_dtype: str | None = None,
) -> LayerGroup:
    """MLA with an indexer entry per token: stores all, loads `top` latents and all the indexer."""
    latents = Part("latent", latent + rope, dtype, top=top)
    return LayerGroup("DSA", layers, (latents, Part("indexer", indexer, indexer_dtype or dtype)))


def gated_delta(
    layers: int,
    *,
    heads: int = 64,
    key_dim: int = 128,
    value_dim: int = 128,
    conv_channels: int = 8192,
    conv_kernel: int = 4,
    dtype: str = "fp32",
) -> LayerGroup:
    """Gated DeltaNet: a (heads, key, value) state and the inputs of a short convolution."""
    state = State("delta", heads * key_dim * value_dim, dtype)
    conv = State("convolution", conv_channels * conv_kernel, dtype)
    return LayerGroup("gated-delta", layers, states=(state, conv))


def lightning(
    layers: int, *, heads: int = 64, key_dim: int = 128, value_dim: int = 128, dtype: str = "fp32"
) -> LayerGroup:
    """Lightning linear attention: a (heads, key, value) state."""
    return LayerGroup(
        "lightning", layers, states=(State("linear", heads * key_dim * value_dim, dtype),)
    )


def compressed(
    layers: int,
    ratio: int,
    elements: int = 512,
    dtype: str = "bf16",
    *,
    window: int = 128,
    indexer: int = 0,
    top: int | None = None,
    indexer_dtype: str | None = None,
    scale_bytes: int = 0,
) -> LayerGroup:
    """A V4-style layer: keys and values are one entry per `ratio` tokens, beside a full window.

    With an `indexer` (elements per entry) a step loads the `top` entries and all the indexer.
    Ratio 0 is a layer with the window only. Window pages are of 64 tokens, as published engines
    have them, so that one is as large as the entries of a 256-token block at ratio 4.
    """
    full = Part("window", elements, dtype, 1, scale_bytes, window=window, page_tokens=64)
    if not ratio:
        return LayerGroup("window", layers, (full,))
    name = f"c{ratio}a"
    entries = Part(name, elements, dtype, 1, scale_bytes, ratio, top=top if indexer else None)
    parts: tuple[Part, ...] = (entries, full)
    if indexer:
        parts = (entries, Part("indexer", indexer, indexer_dtype or dtype, stride=ratio), full)
    return LayerGroup(name, layers, parts)
