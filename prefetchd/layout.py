"""From a model's geometry to bytes: per token, per page, per block, per step, and with padding.

Decides how many bytes a KV cache has and where one page of it ends. Refuses to know files, devices
and engines: an alignment comes in as a number.

Each part of a layer (`kv_parts`) gives pages of its own, because sparse attention reads a whole
indexer but only some pages of what it indexes. A block can be used only when the pages of all its
parts are there; a model with states needs its states besides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from math import lcm
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefetchd.kv_parts import (
    LAYERS_MAX,
    LayerGroup,
    LayoutError,
    Part,
    check_count,
    growth_bytes,
)

__all__ = ["Description", "Layout", "LayoutError", "PageClass", "padded_bytes", "uniform"]

BLOCK_TOKENS_MAX = 2**16
PAGE_BYTES_MAX = 2**30
"""One page is one I/O, and a device takes at most 1 GiB in one."""


@dataclass(frozen=True, slots=True)
class PageClass:
    """All pages of one physical size. `windowed_pages` of them serve only a moving window."""

    page_bytes: int
    parts: tuple[str, ...]
    layers: int
    pages_per_block: int
    windowed_pages: int
    slot_bytes: int
    """The page padded to the alignment asked for, on its own."""
    padding_share: float
    """Padding in such a slot."""
    runtime_padding_share: float
    """Padding in the runtime's slots, which all have the size of the largest class."""


@dataclass(frozen=True, slots=True)
class Description:
    """A layout as a table: a title, column heads, rows of the same length, and notes."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's KV geometry, and what follows from it in bytes.

    `pattern[i]` is the group of model layer i (empty: the groups one after another). `content`
    tells apart equal geometries with other bytes (an engine's own block format, a model's name);
    it is part of the fingerprint, `name` and `notes` are not. Raises LayoutError.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    block_tokens: int = 16
    pattern: tuple[int, ...] = ()
    content: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.block_tokens, f"tokens per block of {self.name}", 1, BLOCK_TOKENS_MAX)
        counts = [group.layers for group in self.groups]
        check_count(sum(counts), f"the number of layers of {self.name}", 1, LAYERS_MAX)
        if not self.pattern:
            order = tuple(g for g, count in enumerate(counts) for _ in range(count))
            object.__setattr__(self, "pattern", order)
        elif [self.pattern.count(g) for g in range(len(counts))] != counts or (
            len(self.pattern) != sum(counts)
        ):
            raise LayoutError(f"the layer pattern of {self.name} does not match its groups' sizes")
        for part in (part for group in self.groups for part in group.parts):
            self._check_paging(part)

    def _check_paging(self, part: Part) -> None:
        tokens = part.page_tokens or self.block_tokens
        if self.block_tokens % tokens or tokens % part.stride:
            step = lcm(part.page_tokens or 1, part.stride)
            raise LayoutError(
                f"a block of {self.block_tokens} tokens of {self.name} does not hold whole pages "
                f"of part {part.name!r}: use a multiple of {step} tokens per block"
            )
        if tokens // part.stride * part.entry_bytes > PAGE_BYTES_MAX:
            raise LayoutError(
                f"a page of part {part.name!r} of {self.name} is larger than 1 GiB, the most that "
                f"one read takes: use fewer than {self.block_tokens} tokens per block"
            )

    # --- bytes by context ---

    @property
    def model_layers(self) -> int:
        """Layers of the model that cache anything."""
        return len(self.pattern)

    @property
    def bytes_per_token(self) -> int:
        """Growth per token over all layers, rounded up; windows and states are not in it."""
        parts = [p for g in self.groups for p in g.parts * g.layers if p.window is None]
        return growth_bytes(parts)

    @property
    def state_bytes(self) -> int:
        """Constant bytes of one sequence, over all layers."""
        return sum(group.layers * group.state_bytes for group in self.groups)

    def stored_bytes(self, context_tokens: int) -> int:
        """Bytes of one sequence at a context length: windows bounded, states constant."""
        check_count(context_tokens, "the context length", 0)
        return sum(group.stored_bytes(context_tokens) for group in self.groups)

    def loaded_bytes(self, context_tokens: int) -> int:
        """Bytes that one decode step reads when attention loads only its top entries."""
        check_count(context_tokens, "the context length", 0)
        return sum(group.loaded_bytes(context_tokens) for group in self.groups)

    def dense_step_bytes(self, context_tokens: int) -> int:
        """Bytes that one decode step of one sequence reads when attention reads all it has."""
        return self.stored_bytes(context_tokens)

    # --- pages ---

    def _pages(self, part: Part) -> list[int]:
        """The exact bytes of each page that a block has of this part in one layer."""
        tokens = part.page_tokens or self.block_tokens
        return [tokens // part.stride * part.entry_bytes] * (self.block_tokens // tokens)

    def page_sizes(self) -> NDArray[np.int64]:
        """Exact bytes of each page of a block, shape (layers,), int64, in page order.

        Page order: model layers from first to last, in a layer its parts, in a part its tokens.
        """
        per_group = [
            [size for part in group.parts for size in self._pages(part)] for group in self.groups
        ]
        return np.array([size for g in self.pattern for size in per_group[g]], np.int64)

    @property
    def layers(self) -> int:
        """Pages per block, which is what the runtime counts as layers.

        The number of model layers where each has one part; more with indexers, fewer with states.
        """
        return len(self.page_sizes())

    @property
    def page_bytes(self) -> int:
        """Exact bytes of a page; of the largest class where there are several."""
        sizes = self.page_sizes()
        if not len(sizes):
            raise LayoutError(f"{self.name} has no pages, only states: there is nothing to page")
        return int(sizes.max())

    @property
    def block_bytes(self) -> int:
        """Payload of one block: the exact bytes of all its pages, windowed ones included."""
        return int(self.page_sizes().sum())

    def slot_bytes(self, alignment_bytes: int) -> int:
        """The runtime's slot: the largest page padded to the alignment (see `padding_share`)."""
        return padded_bytes(self.page_bytes, alignment_bytes)

    def padding_share(self, alignment_bytes: int) -> float:
        """The share of the runtime's slots that no page fills, over a whole block."""
        return 1 - self.block_bytes / (self.layers * self.slot_bytes(alignment_bytes))

    def page_classes(self, alignment_bytes: int) -> tuple[PageClass, ...]:
        """The physical page sizes, largest first."""
        found: dict[int, list[_Member]] = {}
        for index, group in enumerate(self.groups):
            for part in group.parts:
                sizes = self._pages(part)
                member = _Member(part, index, group.layers, len(sizes) * group.layers)
                found.setdefault(sizes[0], []).append(member)
        slot = self.slot_bytes(alignment_bytes) if found else 0
        return tuple(
            _page_class(size, found[size], padded_bytes(size, alignment_bytes), slot)
            for size in sorted(found, reverse=True)
        )

    def describe(self, alignment_bytes: int = 4096) -> Description:
        """A table for people: a row per page size, and one for the states if there are any."""
        rows = [_class_row(c) for c in self.page_classes(alignment_bytes)]
        if self.state_bytes:
            held = sum(group.layers for group in self.groups if group.states)
            rows.append(("state", str(held), "-", f"{self.state_bytes:,}", "-", "-", "-"))
        kinds = " + ".join(f"{group.layers} {group.kind}" for group in self.groups)
        title = f"{self.name}: {kinds} layers, {self.block_tokens} tokens per block"
        heads = ("part", "layers", "pages per block", "page bytes", "slot bytes", "padding")
        return Description(title, (*heads, "padding in runtime slots"), tuple(rows), self.notes)

    # --- identity ---

    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the meaning or the number of any byte differs.

        xxh3_128 over a canonical JSON list; independent of process, hash seed and Python version,
        and of how equal layers are grouped. A change of the encoding must change its first item.
        """
        coded = [_coded(group) for group in self.groups]
        runs = [[len(list(run)), c] for c, run in groupby(coded[g] for g in self.pattern)]
        canonical = ["prefetchd layout 1", self.content, self.block_tokens, runs]
        return xxhash.xxh3_128_digest(json.dumps(canonical, separators=(",", ":")).encode())


def _coded(group: LayerGroup) -> list[object]:
    """Every field in its order: a new field is one more thing that may change the bytes."""
    return [[list(astuple(p)) for p in group.parts], [list(astuple(s)) for s in group.states]]


class _Member(NamedTuple):
    """A part of a group of layers, as it goes into a page class."""

    part: Part
    group: int
    layers: int
    pages: int


def _page_class(
    size: int, members: Sequence[_Member], slot_bytes: int, runtime_slot_bytes: int
) -> PageClass:
    return PageClass(
        page_bytes=size,
        parts=tuple(dict.fromkeys(member.part.name for member in members)),
        layers=sum({member.group: member.layers for member in members}.values()),
        pages_per_block=sum(member.pages for member in members),
        windowed_pages=sum(m.pages for m in members if m.part.window is not None),
        slot_bytes=slot_bytes,
        padding_share=1 - size / slot_bytes,
        runtime_padding_share=1 - size / runtime_slot_bytes,
    )


def _class_row(page_class: PageClass) -> tuple[str, ...]:
    return (
        ", ".join(page_class.parts),
        str(page_class.layers),
        str(page_class.pages_per_block),
        f"{page_class.page_bytes:,}",
        f"{page_class.slot_bytes:,}",
        f"{page_class.padding_share:.1%}",
        f"{page_class.runtime_padding_share:.1%}",
    )


def padded_bytes(size_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of an alignment, a power of two as statx reports it. LayoutError."""
    check_count(alignment_bytes, "the alignment in bytes", 1, PAGE_BYTES_MAX)
    if alignment_bytes & (alignment_bytes - 1):
        raise LayoutError(
            f"an alignment of {alignment_bytes} bytes is not a power of two: take it from the "
            "device (statx with STATX_DIOALIGN)"
        )
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def uniform(
    layers: int,
    page_bytes: int,
    block_tokens: int = 16,
    *,
    name: str = "uniform",
    content: str = "",
) -> Layout:
    """A layout of opaque pages: `layers` pages of `page_bytes` per block, whatever is in them.

    `content` should say what is (engine, its version, backend, data type): two engines whose pages
    happen to have one size must not share a fingerprint. A block counts once it is complete.
    """
    page = Part("page", page_bytes, "raw", stride=block_tokens)
    return Layout(name, (LayerGroup("opaque", layers, (page,)),), block_tokens, content=content)
