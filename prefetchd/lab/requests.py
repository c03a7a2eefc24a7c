"""Recorded request traffic: which blocks each request of a conversation or session needs, and when.

Decides how the two public formats become one workload: ids made global, sub-agents placed in time,
bursts of coarse timestamps spread. Reads line by line and refuses to guess: a line that cannot be
used is told by its number. Knows no runtime, device or clock.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.trace_format import TraceError
from prefetchd.model import Ids

SESSION_GAP_NS = 30_000_000_000
"""Sessions tell only their own time: one starts so long after another."""
_BURST_MEAN = 1.5  # requests per distinct timestamp, above which timestamps are coarse
_Raw = tuple[int, Ids, int, str, int]  # arrival ns, blocks, session, stop reason, think ns


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by arrival. Blocks are numbered 0 up in the order of their first need.

    Request i needs `blocks[starts[i] : starts[i + 1]]`, in prefix order. `arrival_ns` rises from 0;
    `think_ns`: idle time of its session before it; `stops`: why it ended, "" where not told;
    `quantum_ns`: what timestamps were rounded to, 0 if they were not; `how`: what was done to the
    times and ids, in words.
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


def read_requests(path: Path, limit: int | None = None) -> Requests:
    """The first `limit` requests of a conversation trace or of coding-agent sessions.

    JSON lines, gzipped if the name ends in .gz. Raises TraceError.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"trace {path} is empty; name a file with a request or session a line")
    kinds: tuple[tuple[str, Callable[..., Requests]], ...] = (
        ("hash_ids", _conversation),
        ("requests", _sessions),
    )
    for column, reader in kinds:
        if column in first[1]:
            return reader(path, _with(first, lines), limit)
    raise TraceError(
        f"trace {path}, line 1 has neither hash_ids (a conversation trace) nor requests (coding-"
        f"agent sessions), but {', '.join(list(first[1])[:6]) or 'nothing'}; name another file"
    )


_Line = tuple[int, dict[str, Any]]


def _with(first: _Line, rest: Iterator[_Line]) -> Iterator[_Line]:
    yield first
    yield from rest


def _lines(path: Path) -> Iterator[_Line]:
    """Line number and object. Whatever is wrong with the file is told with its place."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"trace {path}, line {number} is no JSON object of a request trace: {error}"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"trace {path} is cut short or no gzip file (after line {number}): {error}"
        ) from error
    except IsADirectoryError as error:
        raise TraceError(f"trace {path} is a folder; name a file in it") from error
    except OSError as error:
        raise TraceError(f"trace {path} cannot be read: {error.strerror}") from error


def _conversation(path: Path, lines: Iterator[_Line], limit: int | None) -> Requests:
    raw: list[_Raw] = []
    for number, line in lines:
        try:
            at_ns = int(float(line["timestamp"]) * 1e6)
            raw.append((at_ns, _ids(line["hash_ids"]), len(raw), "", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(path, number, error) from error
        if limit is not None and len(raw) == limit:
            break
    times = np.array([one[0] for one in raw], np.int64)
    order = np.argsort(times, kind="stable")
    spread, quantum_ns = spread_bursts(times[order])
    words = "block ids are the trace's own, numbered anew"
    if quantum_ns:
        words += f"; bursts spread evenly over the timestamps' quantum of {quantum_ns / 1e9:g} s"
    raw = [raw[place] for place in order.tolist()]
    return _requests(path, spread, raw, quantum_ns, words)


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


def _sessions(path: Path, lines: Iterator[_Line], limit: int | None) -> Requests:
    raw: list[_Raw] = []
    base = 0
    for place, (number, line) in enumerate(lines):
        start_ns = place * SESSION_GAP_NS
        if limit is not None and len(raw) >= limit and _latest(raw, limit) < start_ns:
            break  # what is still to come arrives later than all that is asked for
        try:
            highest = 0
            for at_s, request in _flat(line["requests"], 0.0):
                blocks = _runs(request["hash_runs"])
                highest = max(highest, int(blocks.max(initial=-1)) + 1)
                stop = str(request.get("stop") or "")
                think_ns = int(float(request.get("think_time") or 0) * 1e9)
                raw.append((start_ns + int(at_s * 1e9), blocks + base, place, stop, think_ns))
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(path, number, error) from error
        base += highest
    raw.sort(key=lambda one: one[0])
    raw = raw[:limit]
    times = np.array([one[0] for one in raw], np.int64)
    words = (
        f"block ids made global, session by session; sessions begin {SESSION_GAP_NS / 1e9:g} s "
        "after one another, since they tell only their own time"
    )
    return _requests(path, times, raw, 0, words)


def _latest(raw: list[_Raw], limit: int) -> int:
    return sorted(one[0] for one in raw)[limit - 1]


def _flat(requests: Any, start_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """The requests of a session and of its sub-agents, whose times are relative to their marker."""
    for request in requests:
        at_s = start_s + float(request["t"])
        if request["type"] == "subagent":
            yield from _flat(request["requests"], at_s)
        else:
            yield at_s, request


def _runs(runs: Any) -> Ids:
    """[[first id, count], ...] as ids, each once."""
    pairs = np.array(runs, np.int64).reshape(-1, 2)
    if (pairs < 0).any():
        raise ValueError(f"hash_runs {runs!r:.60} hold a negative number")
    return _once(np.concatenate([np.empty(0, np.int64), *(a + np.arange(n) for a, n in pairs)]))


def _ids(ids: Any) -> Ids:
    blocks = np.array(ids, np.int64).reshape(-1)
    if len(blocks) and blocks.min() < 0:
        raise ValueError(f"hash_ids hold {blocks.min()}")
    return _once(blocks)


def _once(blocks: Ids) -> Ids:
    """A block stands in a chain once; a second time would be a chain that eats its tail."""
    _, first = np.unique(blocks, return_index=True)
    return blocks if len(first) == len(blocks) else blocks[np.sort(first)]


def _bad(path: Path, number: int, error: Exception) -> TraceError:
    what = f"has no {error.args[0]}" if isinstance(error, KeyError) else f"cannot be used: {error}"
    return TraceError(f"trace {path}, line {number} {what}")


def _requests(
    path: Path, times_ns: NDArray[np.int64], raw: list[_Raw], quantum_ns: int, how: str
) -> Requests:
    every = np.concatenate([np.empty(0, np.int64), *(one[1] for one in raw)])
    if not len(every):
        raise TraceError(f"trace {path} names no block at all")
    _, first, where = np.unique(every, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    sizes = np.array([len(one[1]) for one in raw], np.int64)
    return Requests(
        name=path.name.split(".")[0],
        arrival_ns=times_ns - times_ns[0],
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        blocks=rank[where],
        session=np.array([one[2] for one in raw], np.int64),
        stops=tuple(one[3] for one in raw),
        think_ns=np.array([one[4] for one in raw], np.int64),
        quantum_ns=quantum_ns,
        how=how,
    )
