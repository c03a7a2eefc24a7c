"""Recorded request traffic: which blocks each request of a conversation or session needs, and when.

Decides how a trace's columns become one workload in memory; what formats there are is known to
`prefetchd.lab.sources`. Knows no runtime, device or clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.sources import Source, check_kind, label, trace_source
from prefetchd.lab.trace_format import TraceError
from prefetchd.lab.trace_schema import Columns
from prefetchd.model import NO_IDS, Ids

_DENSE = 4  # ids up to so many times their count need no sorting to be numbered anew


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by arrival. Blocks are numbered 0 up in the order of their first need.

    Request i needs `blocks[starts[i] : starts[i + 1]]`, in prefix order. `arrival_ns` rises from 0;
    `think_ns`: idle time of its session before it; `stops`: why it ended, "" where not told;
    `quantum_ns`: what timestamps were rounded to, 0 if they were not; `how`: what was done to the
    times and ids, in words; `block_tokens` and `block_bytes` are 0 where not told. Optional columns
    are those of `trace_schema`.
    """

    name: str
    arrival_ns: NDArray[np.int64]
    starts: NDArray[np.int64]
    blocks: Ids
    session: NDArray[np.int64]
    stops: tuple[str, ...]
    think_ns: NDArray[np.int64]
    quantum_ns: int
    how: str
    block_tokens: int = 0
    block_bytes: int = 0
    input_tokens: NDArray[np.int64] | None = None
    output_tokens: NDArray[np.int64] | None = None
    agent: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def distinct(self) -> int:
        """Blocks there are."""
        return int(self.blocks.max(initial=-1)) + 1

    def chain(self, number: int) -> Ids:
        return self.blocks[self.starts[number] : self.starts[number + 1]]

    def reusable(self) -> NDArray[np.int64]:
        """For each request how many blocks of its prefix an earlier one had."""
        first = np.full(self.distinct, len(self.blocks), np.int64)
        np.minimum.at(first, self.blocks, np.arange(len(self.blocks)))
        counts = np.zeros(len(self), np.int64)
        for number in range(len(self)):
            new = first[self.chain(number)] >= self.starts[number]
            counts[number] = int(np.argmax(new)) if new.any() else len(new)
        return counts

    def faster(self, speed: float) -> Requests:
        """The same with all times divided by `speed`."""
        return replace(
            self,
            arrival_ns=(self.arrival_ns / speed).astype(np.int64),
            think_ns=(self.think_ns / speed).astype(np.int64),
            quantum_ns=int(self.quantum_ns / speed),
        )


def read_requests(path: Path, limit: int | None = None, group: int = 1) -> Requests:
    """The first `limit` requests of a restore trace: our own format, or a raw one with blocks.

    `group` blocks of the trace that follow each other become one, as in a store of larger blocks;
    what is left at the end of a request is dropped, since only full blocks are shared. Raises
    TraceError.
    """
    with trace_source(path, limit=limit) as source:
        header = source.header
        check_kind(path, header, "restore")
        columns = _gathered(source, limit)
    if not len(columns.get("blocks", NO_IDS)):
        raise TraceError(f"trace {path} names no block at all")
    sizes = columns["sizes"]
    load = Requests(
        name=label(header),
        arrival_ns=columns["arrival_ns"] - columns["arrival_ns"][0],
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        blocks=_by_first_need(columns["blocks"]),
        session=columns["session"],
        stops=tuple(header.stops[code] for code in columns["stop"].tolist()),
        think_ns=columns["think_ns"],
        quantum_ns=header.quantum_ns,
        how=f"{header.how}; blocks numbered anew",
        block_tokens=header.block_tokens,
        block_bytes=header.block_bytes,
        input_tokens=columns.get("input_tokens"),
        output_tokens=columns.get("output_tokens"),
        agent=columns.get("agent"),
    )
    return load if group == 1 else _grouped(load, group, path)


def _grouped(load: Requests, group: int, path: Path) -> Requests:
    """An id names its whole prefix, so the last one of a group names the group."""
    chains = [load.chain(number)[group - 1 :: group] for number in range(len(load))]
    blocks = np.concatenate(chains)
    if not len(blocks):
        raise TraceError(f"trace {path}: no request has {group} blocks that could be one")
    sizes = np.array([len(chain) for chain in chains], np.int64)
    return replace(
        load,
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        blocks=_by_first_need(blocks),
        block_tokens=load.block_tokens * group,
        block_bytes=load.block_bytes * group,
        how=f"{load.how}; every {group} blocks of a request are one",
    )


def _gathered(source: Source, limit: int | None) -> dict[str, NDArray[np.int64]]:
    """The columns of the first `limit` rows."""
    chunks: list[Columns] = []
    rows = 0
    for chunk in source.chunks():
        chunks.append(head(chunk, None if limit is None else limit - rows))
        rows += len(chunk["arrival_ns"])
        if limit is not None and rows >= limit:
            break
    names = chunks[0] if chunks else ()
    return {
        name: np.concatenate([chunk[name] for chunk in chunks]).astype(np.int64, copy=False)
        for name in names
    }


def head(columns: Columns, rows: int | None) -> Columns:
    """The first rows of a chunk of requests."""
    blocks = int(columns["sizes"][:rows].sum())
    return {name: one[: blocks if name == "blocks" else rows] for name, one in columns.items()}


def _by_first_need(blocks: NDArray[np.int64]) -> Ids:
    """The same blocks numbered 0 up in the order of their first need."""
    if int(blocks.max()) >= _DENSE * len(blocks):
        blocks = np.unique(blocks, return_inverse=True)[1]
    first = np.full(int(blocks.max()) + 1, len(blocks), np.int64)
    first[blocks[::-1]] = np.arange(len(blocks) - 1, -1, -1)  # of equal places the last one stays
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[blocks]
