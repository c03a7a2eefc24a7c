"""A decode as batches of page ids, ready to be replayed: demands, hints and arrivals, in order.

Decides how several requests with a common prefix share one page space and one decode batch. Knows
no runtime, device or clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.attention import AttentionTrace, is_far
from prefetchd.lab.trace_format import TraceError
from prefetchd.model import ChainHint, Geometry, Ids, Mask, PageHint, Scores


@dataclass(frozen=True, slots=True)
class Demand:
    """What one layer of one step needs: page ids, the model's weights of them, which are far."""

    pages: Ids
    scores: Scores
    far: Mask


@dataclass(frozen=True, slots=True)
class Workload:
    """`demands[step][layer]`, `hints[step][layer]` (for that layer), `arrivals[step]`.

    `prompt_blocks`: the first so many are a prompt's. `synthetic` as in `AttentionTrace`: whoever
    shows figures of this says so.
    """

    name: str
    geometry: Geometry
    demands: list[list[Demand]]
    hints: list[list[PageHint | None]]
    arrivals: dict[int, list[ChainHint]]
    synthetic: str = ""
    prompt_blocks: int = 0

    @property
    def steps(self) -> int:
        return len(self.demands)

    @property
    def widest(self) -> int:
        """Most pages that one layer needs at once."""
        return max(len(demand.pages) for step in self.demands for demand in step)

    def future(self) -> list[Ids]:
        return [demand.pages for step in self.demands for demand in step]

    def moved(self, to: Ids, geometry: Geometry) -> Workload:
        """The same with its block b at `to[b]` of a larger `geometry` with as many layers."""
        layers = geometry.layers

        def pages(old: Ids) -> Ids:
            return to[old // layers] * layers + old % layers

        return replace(
            self,
            geometry=geometry,
            demands=[[replace(d, pages=pages(d.pages)) for d in step] for step in self.demands],
            hints=[
                [hint and replace(hint, pages=pages(hint.pages)) for hint in step]
                for step in self.hints
            ],
            arrivals={
                step: [replace(hint, blocks=to[hint.blocks]) for hint in arrived]
                for step, arrived in self.arrivals.items()
            },
        )


def single(trace: AttentionTrace, *, top_k: int, steps: int | None = None) -> Workload:
    """One request's decode, as recorded."""
    return batched(trace, top_k=top_k, steps=steps, requests=1, shared_share=0.0)


def batched(
    trace: AttentionTrace,
    *,
    top_k: int,
    steps: int | None,
    requests: int,
    shared_share: float,
) -> Workload:
    """`requests` copies of a decode in one batch, over one common prefix.

    The first `shared_share` of the prompt's blocks are the same pages for all; what follows is
    each request's own. Request r joins r strides of steps after the first and plays the trace
    from its beginning, announced one step ahead by its chain of prompt blocks.
    """
    count = trace.steps if steps is None else min(steps, trace.steps)
    if count < 1 or top_k < 1:
        raise TraceError(f"a replay needs steps and a top-k, got {count} steps and k = {top_k}")
    if top_k > trace.ranks:
        raise TraceError(
            f"trace {trace.name} holds the {trace.ranks} heaviest blocks of each KV head, so "
            f"top-k = {top_k} cannot be replayed; ask for at most {trace.ranks}"
        )
    layers, blocks = trace.geometry.layers, trace.geometry.blocks
    prompt_blocks = min(blocks, trace.prompt_tokens // trace.block_tokens)
    shared = int(shared_share * prompt_blocks)
    geometry = Geometry(layers, shared + requests * (blocks - shared))
    stride = max(1, count // (2 * requests))
    maps = [block_map(blocks, shared, request) for request in range(requests)]
    demands: list[list[Demand]] = []
    hints: list[list[PageHint | None]] = []
    for step in range(count):
        live = [(step - r * stride, maps[r]) for r in range(requests) if step >= r * stride]
        demands.append([_demand(trace, geometry, live, layer, top_k) for layer in range(layers)])
        hints.append([_hint(trace, geometry, live, layer, top_k) for layer in range(layers)])
    prompt = np.arange(prompt_blocks)
    arrivals = {max(0, r * stride - 1): [ChainHint(r, maps[r][prompt])] for r in range(1, requests)}
    return Workload(trace.name, geometry, demands, hints, arrivals, trace.synthetic, prompt_blocks)


def block_map(blocks: int, shared: int, request: int) -> Ids:
    """Where a request's blocks lie in the common block space."""
    own = np.arange(blocks, dtype=np.int64)
    own[shared:] += request * (blocks - shared)
    return own


_Live = list[tuple[int, NDArray[np.int64]]]


def _demand(
    trace: AttentionTrace, geometry: Geometry, live: _Live, layer: int, top_k: int
) -> Demand:
    blocks, scores, far = [], [], []
    for step, mapped in live:
        own, mass = trace.need(step, layer, top_k)
        blocks.append(mapped[own])
        scores.append(mass)
        far.append(is_far(own, trace.frontier(step)))
    merged, first, where = np.unique(np.concatenate(blocks), return_index=True, return_inverse=True)
    best = np.zeros(len(merged), np.float32)
    np.maximum.at(best, where, np.concatenate(scores))
    return Demand(geometry.page_ids(merged, layer), best, np.concatenate(far)[first])


def _hint(
    trace: AttentionTrace, geometry: Geometry, live: _Live, layer: int, top_k: int
) -> PageHint | None:
    blocks, scores = [], []
    for step, mapped in live:
        hint = trace.hint(step, layer, top_k)
        if hint is not None:
            blocks.append(mapped[trace.geometry.block_of(hint.pages)])
            scores.append(hint.scores)
    if not blocks:
        return None
    merged, where = np.unique(np.concatenate(blocks), return_inverse=True)
    best = np.zeros(len(merged), np.float32)
    np.maximum.at(best, where, np.concatenate(scores))
    order = np.argsort(-best, kind="stable")
    return PageHint(geometry.page_ids(merged[order], layer), best[order])
