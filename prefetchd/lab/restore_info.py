"""What a restore trace holds, counted chunk by chunk: sizes, reuse, lengths, sessions.

Decides what each figure means. Memory grows with distinct blocks and requests (some bytes each),
not with how often blocks are needed.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.trace_schema import Columns, TraceHeader
from prefetchd.model import NO_IDS, Ids, Mask


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles over requests."""

    p50: float
    p99: float
    max: float


class RestoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`reuse_share`: of all blocks needed, those in a request's longest prefix that earlier
    requests had. `once_share`: of distinct blocks, those that only one request needed.
    `agent_requests` are those of sub-agents. Tokens are None where not told for every request."""

    requests: int
    sessions: int
    agent_requests: int
    span_s: float
    requests_per_s: float | None
    blocks: int
    distinct_blocks: int
    reuse_share: float
    once_share: float
    chain_blocks: Spread
    think_s: Spread
    input_tokens: int | None
    output_tokens: int | None
    stops: dict[str, int]


class RestoreCounter:
    """Counts chunks in order."""

    def __init__(self, header: TraceHeader) -> None:
        self._header = header
        self._seen, self._seen_count = NO_IDS, NO_IDS
        self._sizes: list[NDArray[np.int64]] = []
        self._thinks: list[NDArray[np.int64]] = []
        self._sessions = NO_IDS
        self._stops = np.zeros(len(header.stops), np.int64)
        self._tokens: dict[str, int | None] = {"input_tokens": 0, "output_tokens": 0}
        self._reused = self._agents = self._last_ns = 0

    def add(self, chunk: Columns) -> None:
        columns = {name: one.astype(np.int64, copy=False) for name, one in chunk.items()}
        self._reused += int(reusable(columns["sizes"], columns["blocks"], self._seen).sum())
        blocks, counts = np.unique(columns["blocks"], return_counts=True)
        self._seen, self._seen_count = _added(self._seen, self._seen_count, blocks, counts)
        self._sizes.append(columns["sizes"])
        self._thinks.append(columns["think_ns"])
        self._sessions = np.union1d(self._sessions, columns["session"])
        self._stops += np.bincount(columns["stop"], minlength=len(self._stops))
        self._agents += int(np.count_nonzero(columns.get("agent", NO_IDS)))
        self._last_ns = int(columns["arrival_ns"][-1])
        for name, total in self._tokens.items():
            told = columns.get(name)
            is_told = total is not None and told is not None and bool((told >= 0).all())
            self._tokens[name] = (
                (total or 0) + int(told.sum()) if is_told and told is not None else None
            )

    def done(self) -> RestoreInfo:
        sizes = np.concatenate(self._sizes or [NO_IDS])
        blocks, distinct = int(sizes.sum()), len(self._seen)
        span_s = self._last_ns / 1e9
        stops = zip(self._header.stops, self._stops.tolist(), strict=True)
        return RestoreInfo(
            requests=len(sizes),
            sessions=len(self._sessions),
            agent_requests=self._agents,
            span_s=span_s,
            requests_per_s=len(sizes) / span_s if span_s else None,
            blocks=blocks,
            distinct_blocks=distinct,
            reuse_share=self._reused / max(1, blocks),
            once_share=int((self._seen_count == 1).sum()) / max(1, distinct),
            chain_blocks=_spread(sizes),
            think_s=_spread(np.concatenate(self._thinks or [NO_IDS]) / 1e9),
            input_tokens=self._tokens["input_tokens"],
            output_tokens=self._tokens["output_tokens"],
            stops={stop: count for stop, count in stops if count},
        )


def reusable(sizes: Ids, blocks: Ids, seen: Ids) -> Ids:
    """For each request how many blocks of its prefix an earlier one had, or stand in `seen`
    (rising)."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    starts = np.cumsum(sizes) - sizes
    _, first, where = np.unique(blocks, return_index=True, return_inverse=True)
    is_old = (first[where] < starts[rows]) | _among(blocks, seen)
    prefix = sizes.copy()
    place = np.arange(len(blocks)) - starts[rows]
    np.minimum.at(prefix, rows[~is_old], place[~is_old])
    return prefix


def _among(blocks: Ids, seen: Ids) -> Mask:
    if not len(seen):
        return np.zeros(len(blocks), np.bool_)
    place = np.minimum(np.searchsorted(seen, blocks), len(seen) - 1)
    return np.equal(seen[place], blocks)


def _added(seen: Ids, seen_count: Ids, blocks: Ids, counts: Ids) -> tuple[Ids, Ids]:
    """Distinct blocks, rising, and how often each was needed."""
    is_old = _among(blocks, seen)
    seen_count[np.searchsorted(seen, blocks[is_old])] += counts[is_old]
    where = np.searchsorted(seen, blocks[~is_old])
    return np.insert(seen, where, blocks[~is_old]), np.insert(seen_count, where, counts[~is_old])


def _spread(values: NDArray[np.int64] | NDArray[np.float64]) -> Spread:
    if not len(values):
        return Spread(p50=0.0, p99=0.0, max=0.0)
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return Spread(p50=p50, p99=p99, max=float(values.max()))
