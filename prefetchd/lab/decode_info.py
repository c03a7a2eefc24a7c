"""What a decode trace holds, counted step by step: sizes, overlap by lag, mass, hint recall.

Decides what each figure means. A page is needed by a layer at a step if it is among the first
`top_k` blocks of any KV head. Memory holds the pages of the last 32 steps, whatever the length.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from prefetchd.lab.attention import is_far
from prefetchd.lab.trace_out import needed_pages
from prefetchd.lab.trace_schema import Columns, TraceHeader
from prefetchd.model import Ids, Mask

LAGS = (1, 2, 4, 8, 16, 32)


class DecodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`pages_per_layer`: needed by a layer of a step, on average. `overlap[lag]`: share of them
    that the same layer needed `lag` steps before; `far_overlap`: the same of pages that are neither
    block 0 nor in the last 64 blocks, which are `far_share` of all. `new_share`: those that no
    earlier step needed, from the second step on. Masses are means over heads of what block 0 and
    the `top_k` have. `hint_recall`: share of needed pages, from layer 1 on, that are among the
    first 2 x `top_k` hints of any head.
    """

    steps: int
    layers: int
    kv_heads: int
    ranks: int
    top_k: int
    blocks: int
    prompt_tokens: int
    pages_per_layer: float
    far_share: float
    overlap: dict[int, float]
    far_overlap: dict[int, float]
    new_share: float | None
    sink_mass: float
    top_k_mass: float
    hint_ranks: int
    hint_recall: float | None


class DecodeCounter:
    """Counts chunks in order."""

    def __init__(self, header: TraceHeader, top_k: int) -> None:
        self._header, self._top_k = header, top_k
        self._recent: deque[Ids] = deque(maxlen=max(LAGS))
        self._ever = np.zeros(0, np.bool_)
        self._shared = {lag: np.zeros((2, 2), np.int64) for lag in LAGS}  # [all, far][kept, of]
        self._steps = self._pages = self._far = self._new = self._later = 0
        self._mass = np.zeros(2)
        self._hinted = np.zeros(2, np.int64)
        self._ranks = self._hint_ranks = self._blocks = 0

    def add(self, chunk: Columns) -> None:
        ids, mass = chunk["block_ids"], chunk["mass"].astype(np.float32)
        top_k = min(self._top_k, ids.shape[3])
        self._ranks = ids.shape[3]
        self._blocks = max(self._blocks, int(ids.astype(np.int64).max()) + 1)
        sink = np.where(ids == np.zeros(1, ids.dtype), mass, 0).sum(axis=3).mean(axis=(1, 2))
        kept = mass[..., :top_k].sum(axis=3).mean(axis=(1, 2))
        self._mass += (float(sink.sum()), float(kept.sum()))
        for step in range(len(ids)):
            pages = np.sort(needed_pages(self._header, chunk, step, top_k))
            self._count(pages, self._far_ones(pages))
            if "hint_ids" in chunk:
                self._hint(pages, chunk, step, top_k)

    def _far_ones(self, pages: Ids) -> Mask:
        header = self._header
        newest = (header.prompt_tokens + self._steps) // max(1, header.block_tokens)
        return is_far(pages // header.layers, newest)

    def _count(self, pages: Ids, far: Mask) -> None:
        for lag, shared in self._shared.items():
            if lag <= len(self._recent):
                is_kept = _among(pages, self._recent[-lag])
                shared += [[is_kept.sum(), len(pages)], [is_kept[far].sum(), far.sum()]]
        if len(self._ever) <= pages[-1]:
            self._ever = np.append(self._ever, np.zeros(int(pages[-1]) + 1, np.bool_))
        if self._steps:
            self._new += int((~self._ever[pages]).sum())
            self._later += len(pages)
        self._ever[pages] = True
        self._recent.append(pages)
        self._steps += 1
        self._pages += len(pages)
        self._far += int(far.sum())

    def _hint(self, pages: Ids, chunk: Columns, step: int, top_k: int) -> None:
        hinted: Columns = {"block_ids": chunk["hint_ids"]}
        self._hint_ranks = chunk["hint_ids"].shape[3]
        foreseen = np.sort(needed_pages(self._header, hinted, step, 2 * top_k))
        later = pages[pages % self._header.layers > 0]
        self._hinted += (int(_among(later, foreseen).sum()), len(later))

    def done(self) -> DecodeInfo:
        header, steps = self._header, max(1, self._steps)
        overlaps = [
            {
                lag: float(one[row, 0] / one[row, 1])
                for lag, one in self._shared.items()
                if one[row, 1]
            }
            for row in (0, 1)
        ]
        hits, hinted = self._hinted.tolist()
        return DecodeInfo(
            steps=self._steps,
            layers=header.layers,
            kv_heads=header.kv_heads,
            ranks=self._ranks,
            top_k=min(self._top_k, self._ranks),
            blocks=self._blocks,
            prompt_tokens=header.prompt_tokens,
            pages_per_layer=self._pages / steps / header.layers,
            far_share=self._far / max(1, self._pages),
            overlap=overlaps[0],
            far_overlap=overlaps[1],
            new_share=self._new / self._later if self._later else None,
            sink_mass=float(self._mass[0] / steps),
            top_k_mass=float(self._mass[1] / steps),
            hint_ranks=self._hint_ranks,
            hint_recall=hits / hinted if hinted else None,
        )


def _among(pages: Ids, others: Ids) -> Mask:
    """Which of `pages` stand in `others`, which rise and are not empty."""
    place = np.minimum(np.searchsorted(others, pages), len(others) - 1)
    return np.equal(others[place], pages)
