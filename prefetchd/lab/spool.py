"""Requests on their way from a text file to chunks by arrival, kept on disk in between.

Decides the order of requests and how coarse timestamps are spread. Text formats tell requests
session by session, while a trace is read by arrival: each request is put down in a temporary file,
and memory holds 16 bytes for it, whatever its blocks.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.trace_schema import CHUNK_BYTES, Columns, TraceHeader
from prefetchd.model import Ids

_IN_MEMORY_BYTES = 8 << 20  # a smaller spool needs no file
_BURST_MEAN = 1.5  # requests per distinct timestamp, above which timestamps are coarse
_ROW_BYTES = 64
_RUN_BYTES = 16
_STOPS_MAX = 1 << 16


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A request. `runs` are int64 pairs, (first block, count); -1: tokens that are not told."""

    at_ns: int
    runs: bytes
    session: int
    stop: str = ""
    think_ns: int = 0
    input_tokens: int = -1
    output_tokens: int = -1
    agent: int = 0


def chains(runs: list[bytes]) -> tuple[Ids, Ids]:
    """Sizes and blocks of requests, each block once in its chain, in prefix order."""
    pairs = np.frombuffer(b"".join(runs), np.int64).reshape(-1, 2)
    owner = np.repeat(np.arange(len(runs)), [len(one) // _RUN_BYTES for one in runs])
    counts = pairs[:, 1]
    before = np.cumsum(counts) - counts
    blocks = np.repeat(pairs[:, 0] - before, counts) + np.arange(int(counts.sum()))
    sizes = np.bincount(owner, counts, len(runs)).astype(np.int64)
    order = np.lexsort((pairs[:, 0], owner))
    ends, starts = pairs[order[:-1]].sum(axis=1), pairs[order[1:], 0]
    if not ((owner[order[:-1]] == owner[order[1:]]) & (starts < ends)).any():
        return sizes, blocks
    each = [_once(chain) for chain in np.split(blocks, np.cumsum(sizes)[:-1])]
    return np.array([len(chain) for chain in each], np.int64), np.concatenate(each)


def runs_of(blocks: Ids) -> bytes:
    """Ids as runs, for a Row."""
    ends = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(blocks)]
    counts = np.diff(np.append(starts, len(blocks)))
    return np.stack([blocks[starts], counts], axis=1).astype(np.int64).tobytes()


def _once(blocks: Ids) -> Ids:
    """A block stands in a chain once; a second time would be a chain that eats its tail."""
    _, first = np.unique(blocks, return_index=True)
    return blocks if len(first) == len(blocks) else blocks[np.sort(first)]


class Spool:
    """Rows in the order they were added, on disk when they are many."""

    def __init__(self) -> None:
        # Closed by `__exit__`: it lives as long as what reads it.
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
        self._times, self._ends = array("q"), array("q", [0])
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Row)
        self._falls = False
        self.stops: dict[str, int] = {"": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._times)

    def add(self, row: Row) -> None:
        self.stops.setdefault(row.stop, len(self.stops))
        if len(self.stops) > _STOPS_MAX:
            raise ValueError(f"over {_STOPS_MAX} different stop reasons")
        self._falls = self._falls or bool(self._times and row.at_ns < self._times[-1])
        data = self._encoder.encode(row)
        self._file.write(data)
        self._times.append(row.at_ns)
        self._ends.append(self._ends[-1] + len(data))

    def holds(self, limit: int | None) -> bool:
        """Whether these are the first `limit` by arrival, if rows come as they came so far: once
        their times have fallen, the earliest may still be to come."""
        return limit is not None and len(self) >= limit and not self._falls

    def times_ns(self) -> NDArray[np.int64]:
        """Arrivals, in the order of adding."""
        return np.array(self._times, np.int64)

    def row(self, number: int) -> Row:
        start, end = self._ends[number : number + 2]
        self._file.seek(start)
        return self._decoder.decode(self._file.read(end - start))


@dataclass(frozen=True, slots=True)
class SpooledRequests:
    """A restore trace whose rows lie in a spool: `order` of rows, and the arrival of each."""

    header: TraceHeader
    spool: Spool
    order: NDArray[np.int64]
    arrival_ns: NDArray[np.int64]

    def chunks(self, only: Collection[str] | None = None) -> Iterator[Columns]:
        """As `OpenTrace.chunks`."""
        rows: list[Row] = []
        held, first = 0, 0
        for number in self.order:
            row = self.spool.row(int(number))
            rows.append(row)
            held += _ROW_BYTES + 8 * int(np.frombuffer(row.runs, np.int64)[1::2].sum())
            if held >= CHUNK_BYTES:
                yield _picked(self._columns(rows, first), only)
                first += len(rows)
                rows, held = [], 0
        if rows:
            yield _picked(self._columns(rows, first), only)

    def _columns(self, rows: list[Row], first: int) -> Columns:
        sizes, blocks = chains([row.runs for row in rows])
        stops = self.spool.stops
        return {
            "arrival_ns": self.arrival_ns[first : first + len(rows)],
            "sizes": sizes,
            "blocks": blocks,
            "session": np.array([row.session for row in rows], np.int64),
            "stop": np.array([stops[row.stop] for row in rows], np.uint16),
            "think_ns": np.array([row.think_ns for row in rows], np.int64),
            "input_tokens": np.array([row.input_tokens for row in rows], np.int64),
            "output_tokens": np.array([row.output_tokens for row in rows], np.int64),
            "agent": np.array([row.agent for row in rows], np.int32),
        }


def _picked(columns: Columns, only: Collection[str] | None) -> Columns:
    return {name: one for name, one in columns.items() if only is None or name in only}


def by_arrival(
    spool: Spool, header: TraceHeader, *, spread: bool, limit: int | None = None
) -> SpooledRequests:
    """The spool's first `limit` requests by arrival, which then begins at 0.

    `spread`: requests that share a coarse timestamp are set apart (`spread_bursts`), which the
    header then says.
    """
    times = spool.times_ns()
    order = np.argsort(times, kind="stable")[:limit]
    arrivals, quantum_ns = spread_bursts(times[order]) if spread else (times[order], 0)
    how = header.how
    if quantum_ns:
        how += f"; bursts spread evenly over the timestamps' quantum of {quantum_ns / 1e9:g} s"
    whole = msgspec.structs.replace(
        header, how=how, quantum_ns=quantum_ns, stops=tuple(spool.stops), rows=(len(order),)
    )
    return SpooledRequests(whole, spool, order, arrivals - arrivals[:1])


def spread_bursts(times_ns: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Requests that share a coarse timestamp, set evenly apart over its quantum.

    `times_ns` rises. Timestamps are coarse where more than 1.5 requests share one on average; the
    quantum is the median step between them. Returns the times and the quantum (0: left alone).
    """
    distinct, first, counts = np.unique(times_ns, return_index=True, return_counts=True)
    if len(distinct) < 2 or len(times_ns) / len(distinct) <= _BURST_MEAN:
        return times_ns, 0
    quantum_ns = int(np.median(np.diff(distinct)))
    place = np.arange(len(times_ns)) - np.repeat(first, counts)
    room = np.minimum(np.append(np.diff(distinct), quantum_ns), quantum_ns)
    shift = place * np.repeat(room, counts) // np.repeat(counts, counts)
    return times_ns + shift, quantum_ns
