"""Cuts traces and merges them, chunk by chunk.

Decides what becomes of times, block ids and sessions. Knows no file: it takes sources and gives a
header and chunks, which whoever asks writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.requests import head
from prefetchd.lab.sources import Source
from prefetchd.lab.trace_schema import COLUMNS, Columns, TraceError, TraceHeader, rows_of


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept: the first `rows` of those that arrive in [from_s, to_s)."""

    rows: int | None = None
    from_s: float = 0.0
    to_s: float | None = None

    @property
    def words(self) -> str:
        rows = "all" if self.rows is None else f"the first {self.rows}"
        if not self.from_s and self.to_s is None:
            return f"cut: {rows}"
        until = "the end" if self.to_s is None else f"{self.to_s:g} s"
        return f"cut: {rows} from {self.from_s:g} s to {until}"


def cut(source: Source, kept: Cut) -> tuple[TraceHeader, Iterator[Columns]]:
    """A header and chunks. Arrivals are counted from the first one kept. Raises TraceError."""
    header = source.header
    if header.kind == "decode" and (kept.from_s or kept.to_s is not None):
        raise TraceError(f"trace {header.name} is a decode, which has steps and no times")
    how = f"{header.how}; {kept.words}".removeprefix("; ")
    return msgspec.structs.replace(header, how=how), _cut(source, kept)


def _cut(source: Source, kept: Cut) -> Iterator[Columns]:
    left, begin_ns = kept.rows, None
    for whole in source.chunks():
        chunk = whole
        if source.header.kind == "restore":
            end_ns = None if kept.to_s is None else int(kept.to_s * 1e9)
            chunk = _between(whole, int(kept.from_s * 1e9), end_ns)
        chunk = _first(source.header, chunk, left)
        count = rows_of(source.header.kind, chunk)
        if count and source.header.kind == "restore":
            arrivals = _whole(chunk["arrival_ns"])
            begin_ns = int(arrivals[0]) if begin_ns is None else begin_ns
            chunk["arrival_ns"] = arrivals - begin_ns
        if count:
            yield chunk
        if left is not None:
            left -= count
            if left <= 0:
                return


def _first(header: TraceHeader, chunk: Columns, rows: int | None) -> Columns:
    if header.kind == "restore":
        return head(chunk, rows)
    return {name: one[:rows] for name, one in chunk.items()}


def _whole(values: NDArray[np.generic]) -> NDArray[np.int64]:
    return values.astype(np.int64, copy=False)


def _between(chunk: Columns, from_ns: int, to_ns: int | None) -> Columns:
    arrivals = chunk["arrival_ns"]
    first = int(np.searchsorted(arrivals, from_ns))
    last = len(arrivals) if to_ns is None else int(np.searchsorted(arrivals, to_ns))
    return _rows(chunk, first, max(first, last))


def _rows(chunk: Columns, first: int, last: int) -> Columns:
    """Requests `first` to `last` of a chunk."""
    start, stop = int(chunk["sizes"][:first].sum()), int(chunk["sizes"][:last].sum())
    return {
        name: one[start:stop] if name == "blocks" else one[first:last]
        for name, one in chunk.items()
    }


_FILL = {"input_tokens": -1, "output_tokens": -1, "agent": 0}  # what stands for "not told"


def merge(
    sources: Sequence[Source], *, shared: bool = False
) -> tuple[TraceHeader, Iterator[Columns]]:
    """One restore trace of several, by arrival, each beginning at 0. Raises TraceError.

    Blocks are kept distinct unless `shared`, in which case equal ids are the same block; sessions
    are distinct in any case.
    """
    headers = [source.header for source in sources]
    _check_mergeable(headers)
    stops = dict.fromkeys(stop for header in headers for stop in header.stops)
    codes = {stop: number for number, stop in enumerate(stops)}
    blocks, sessions = _offsets(sources)
    lanes = [
        _Lane(
            source.chunks(),
            blocks=0 if shared else first_block,
            sessions=first_session,
            codes=np.array([codes[stop] for stop in source.header.stops], np.uint16),
        )
        for source, first_block, first_session in zip(sources, blocks, sessions, strict=True)
    ]
    names = [header.name for header in headers]
    header = msgspec.structs.replace(
        headers[0],
        name="+".join(names)[:80],
        origin="; ".join(dict.fromkeys(one.origin for one in headers if one.origin)),
        licence="; ".join(dict.fromkeys(one.licence for one in headers if one.licence)),
        synthetic=any(one.synthetic for one in headers),
        identity=all(one.identity for one in headers),
        stops=tuple(stops),
        quantum_ns=max(one.quantum_ns for one in headers),
        rows=(sum(one.length for one in headers),),
        how=(
            f"merged from {', '.join(names)}, blocks {'shared' if shared else 'kept distinct'}; "
            + "; ".join(f"{one.name}: {one.how}" for one in headers if one.how)
        ),
    )
    return header, _merged(lanes)


def _check_mergeable(headers: Sequence[TraceHeader]) -> None:
    for header in headers:
        if header.kind != "restore":
            raise TraceError(
                f"trace {header.name} is a decode; only restore traces are merged (to decode "
                "several requests at once use `--requests` of `prefetchd replay decode` or "
                "`prefetchd simulate decode`)"
            )
    for what in ("block_tokens", "block_bytes"):
        sizes = {getattr(header, what) for header in headers}
        if len(sizes) > 1:
            raise TraceError(
                f"traces of {what} {', '.join(map(str, sorted(sizes)))} cannot be merged: a "
                "request's blocks would be of several sizes"
            )


def _offsets(sources: Sequence[Source]) -> tuple[list[int], list[int]]:
    """The first block id and session of each trace, so that none meets another's."""
    blocks, sessions = [0], [0]
    for source in sources[:-1]:
        most = np.zeros(2, np.int64)
        for chunk in source.chunks(("blocks", "session")):
            here = [_whole(chunk[name]).max(initial=-1) + 1 for name in ("blocks", "session")]
            most = np.maximum(most, here)
        blocks.append(blocks[-1] + int(most[0]))
        sessions.append(sessions[-1] + int(most[1]))
    return blocks, sessions


@dataclass
class _Lane:
    """One trace on its way into the merged one: the rows that were read and not yet taken."""

    chunks: Iterator[Columns]
    blocks: int
    sessions: int
    codes: NDArray[np.uint16]
    held: Columns = field(default_factory=dict)
    is_done: bool = False

    def fill(self) -> None:
        """Hold a row, if there is one."""
        while not self.is_done and not (self.held and len(self.held["arrival_ns"])):
            chunk = next(self.chunks, None)
            if chunk is None:
                self.is_done = True
            else:
                self.held = self._renamed(chunk)

    def _renamed(self, chunk: Columns) -> Columns:
        count = len(chunk["arrival_ns"])
        known = COLUMNS["restore"]
        filled = {
            name: np.full(count, value, known[name].dtypes[0]) for name, value in _FILL.items()
        }
        return {
            **filled,
            **chunk,
            "blocks": _whole(chunk["blocks"]) + self.blocks,
            "session": _whole(chunk["session"]) + self.sessions,
            "stop": self.codes[_whole(chunk["stop"])],
        }

    @property
    def last_ns(self) -> int:
        return int(_whole(self.held["arrival_ns"])[-1])

    def take(self, until_ns: int) -> Columns:
        count = int(np.searchsorted(self.held["arrival_ns"], until_ns, side="right"))
        taken = _rows(self.held, 0, count)
        self.held = _rows(self.held, count, len(self.held["arrival_ns"]))
        return taken


def _merged(lanes: list[_Lane]) -> Iterator[Columns]:
    """Up to the earliest end of what is held, all that will arrive is known."""
    while True:
        for lane in lanes:
            lane.fill()
        live = [lane for lane in lanes if not lane.is_done]
        if not live:
            return
        until_ns = min(lane.last_ns for lane in live)
        taken = [lane.take(until_ns) for lane in live]
        joined = {name: np.concatenate([one[name] for one in taken]) for name in taken[0]}
        yield _ordered(joined)


def _ordered(columns: Columns) -> Columns:
    """Requests by arrival."""
    order = np.argsort(columns["arrival_ns"], kind="stable")
    sizes = _whole(columns["sizes"])
    starts = np.cumsum(sizes) - sizes
    taken = sizes[order]
    before = np.cumsum(taken) - taken
    where = np.repeat(starts[order] - before, taken) + np.arange(int(taken.sum()))
    return {name: one[where] if name == "blocks" else one[order] for name, one in columns.items()}
