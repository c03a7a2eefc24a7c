"""Recorded decode attention: which pages each step and layer needs, and what is foreseen of them.

Decides how a trace's columns become batches of page ids; what they are is said in
`prefetchd.lab.trace_schema`. Knows nothing of staging.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.sources import Source, check_kind, label, trace_source
from prefetchd.lab.trace_schema import Columns
from prefetchd.model import Geometry, Ids, Mask, PageHint, Scores

BlockIds = NDArray[np.uint16] | NDArray[np.uint32]
_WINDOW_BLOCKS = 64
_NEEDED = {"block_ids", "mass", "hint_ids", "hint_mass"}


@dataclass(frozen=True)
class AttentionTrace:
    """One decode. Columns as in `trace_schema`; hints may be absent. `synthetic` says what it was
    generated from; it is empty for a recording."""

    name: str
    block_ids: BlockIds
    mass: NDArray[np.float16]
    hint_ids: BlockIds | None
    hint_mass: NDArray[np.float16] | None
    prompt_tokens: int
    block_tokens: int
    synthetic: str = ""

    @property
    def steps(self) -> int:
        return len(self.block_ids)

    @property
    def ranks(self) -> int:
        """Blocks recorded for each KV head: the largest top-k that can be replayed."""
        return int(self.block_ids.shape[3])

    @cached_property
    def geometry(self) -> Geometry:
        """Room for every block that is needed or foreseen."""
        last = int(self.block_ids.max())
        if self.hint_ids is not None:
            last = max(last, int(self.hint_ids.max()))
        return Geometry(self.block_ids.shape[1], last + 1)

    def need(self, step: int, layer: int, top_k: int) -> tuple[Ids, Scores]:
        """Blocks that one layer of one step needs: the union over KV heads of each head's top
        `top_k`, in rising order, with the largest mass that any head gives each."""
        return _union(self.block_ids[step, layer, :, :top_k], self.mass[step, layer, :, :top_k])

    def hint(self, step: int, layer: int, top_k: int) -> PageHint | None:
        """What is foreseen of a layer's need one layer early; None for layer 0 or without hints.

        The pages are page ids of that layer: each head's first 2 x `top_k`. A page's score is the
        largest, over heads, of its mass by that of the head's `top_k`-th page, so that 1 is the
        edge of being needed whatever the head.
        """
        if self.hint_ids is None or self.hint_mass is None or layer == 0:
            return None
        ids = self.hint_ids[step, layer, :, : 2 * top_k]
        mass = self.hint_mass[step, layer, :, : 2 * top_k].astype(np.float32)
        edge = mass[:, min(top_k, mass.shape[1]) - 1, None]
        blocks, scores = _union(ids, mass / np.maximum(edge, np.finfo(np.float16).tiny))
        order = np.argsort(-scores, kind="stable")
        return PageHint(self.geometry.page_ids(blocks[order], layer), scores[order])

    def frontier(self, step: int) -> int:
        """The newest block of a step."""
        return (self.prompt_tokens + step) // self.block_tokens


def is_far(blocks: Ids, newest: int) -> Mask:
    """Which blocks are neither the sink, block 0, nor among the last 64 up to the newest."""
    return np.logical_and(blocks > 0, blocks <= newest - _WINDOW_BLOCKS)


def _union(ids: BlockIds, mass: NDArray[np.floating]) -> tuple[Ids, Scores]:
    blocks, where = np.unique(ids.reshape(-1), return_inverse=True)
    scores = np.zeros(len(blocks), np.float32)
    np.maximum.at(scores, where, mass.reshape(-1).astype(np.float32))
    return blocks.astype(np.int64), scores


def read_attention(path: Path) -> AttentionTrace:
    """Read a trace of our own format or a raw recording.

    Raises TraceError: missing, cut short, foreign, or lacking columns.
    """
    with trace_source(path) as source:
        header = source.header
        check_kind(path, header, "decode")
        columns = _gathered(source)
    return AttentionTrace(
        name=label(header),
        block_ids=cast("BlockIds", columns["block_ids"]),
        mass=columns["mass"].astype(np.float16, copy=False),
        hint_ids=cast("BlockIds | None", columns.get("hint_ids")),
        hint_mass=columns["hint_mass"].astype(np.float16) if "hint_mass" in columns else None,
        prompt_tokens=header.prompt_tokens,
        block_tokens=header.block_tokens,
        synthetic=(header.how or f"from {header.origin}") if header.synthetic else "",
    )


def _gathered(source: Source) -> Columns:
    """All rows of what a replay needs, put into place as they are read."""
    whole: Columns = {}
    row = 0
    for chunk in source.chunks():
        count = len(chunk["block_ids"])
        for name in _NEEDED & chunk.keys():
            values = chunk[name]
            if name not in whole:
                whole[name] = np.empty((source.header.length, *values.shape[1:]), values.dtype)
            whole[name][row : row + count] = values
        row += count
    return whole
