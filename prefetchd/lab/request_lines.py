"""Reads the two public formats with a request or a session a line, as JSON.

Decides what their fields mean: ids made global, sub-agents placed in time. A conversation trace has
`timestamp` in ms, `hash_ids` of 512-token blocks, `input_length` and `output_length`; coding-agent
sessions have `requests`, each with `t` in s, `type`, `hash_runs` of 64-token blocks, `in`, `out`,
`stop`, `think_time` in s. Refuses to guess: a line that cannot be used is told by its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefetchd.lab.spool import Row, Spool, SpooledRequests, by_arrival, runs_of
from prefetchd.lab.text import not_usable
from prefetchd.lab.trace_format import TraceError, TraceHeader
from prefetchd.model import Ids

SESSION_GAP_NS = 30_000_000_000
"""Sessions tell only their own time: one starts so long after another."""
_CONVERSATION_TOKENS = 512
_SESSION_TOKENS = 64
_CHAIN_BLOCKS_MAX = 1 << 24

Line = tuple[int, bytes]
_Object = tuple[int, dict[str, Any]]


def json_requests(
    path: Path, lines: Iterator[Line], spool: Spool, limit: int | None
) -> SpooledRequests:
    """The first `limit` requests of either format. Raises TraceError."""
    objects = _objects(path, lines)
    first = next(objects)
    for column, reader in (("hash_ids", _conversation), ("requests", _sessions)):
        if column in first[1]:
            return reader(path, _with(first, objects), spool, limit)
    raise TraceError(
        f"trace {path}, line 1 has neither hash_ids (a conversation trace) nor requests (coding-"
        f"agent sessions), but {', '.join(list(first[1])[:6]) or 'nothing'}; name another file"
    )


def _with(first: _Object, rest: Iterator[_Object]) -> Iterator[_Object]:
    yield first
    yield from rest


def _objects(path: Path, lines: Iterator[Line]) -> Iterator[_Object]:
    for number, line in lines:
        try:
            yield number, msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"trace {path}, line {number} is no JSON object of a request trace: {error}"
            ) from error


def _header(path: Path, how: str, block_tokens: int) -> TraceHeader:
    name = path.name.split(".")[0]
    return TraceHeader(
        kind="restore", name=name, origin=path.name, how=how, block_tokens=block_tokens
    )


def _conversation(
    path: Path, lines: Iterator[_Object], spool: Spool, limit: int | None
) -> SpooledRequests:
    for number, line in lines:
        try:
            row = Row(
                int(float(line["timestamp"]) * 1e6),
                runs_of(_ids(line["hash_ids"])),
                len(spool),
                input_tokens=int(line.get("input_length", -1)),
                output_tokens=int(line.get("output_length", -1)),
            )
            spool.add(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise not_usable(path, number, error) from error
        if limit is not None and len(spool) == limit:
            break
    header = _header(path, "block ids are the trace's own", _CONVERSATION_TOKENS)
    return by_arrival(spool, header, spread=True)


def _sessions(
    path: Path, lines: Iterator[_Object], spool: Spool, limit: int | None
) -> SpooledRequests:
    base, tokens = 0, _SESSION_TOKENS
    for place, (number, line) in enumerate(lines):
        start_ns = place * SESSION_GAP_NS
        if limit is not None and len(spool) >= limit and _latest(spool, limit) < start_ns:
            break  # what is still to come arrives later than all that is asked for
        try:
            tokens = int(line.get("block_size", tokens))
            highest = 0
            for at_s, agent, request in _Flat().requests(line["requests"], 0.0, 0):
                pairs = _pairs(request["hash_runs"])
                highest = max(highest, int(pairs.sum(axis=1).max(initial=0)))
                pairs[:, 0] += base
                row = Row(
                    start_ns + int(at_s * 1e9),
                    pairs.tobytes(),
                    place,
                    str(request.get("stop") or ""),
                    int(float(request.get("think_time") or 0) * 1e9),
                    int(request.get("in", -1)),
                    int(request.get("out", -1)),
                    agent,
                )
                spool.add(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise not_usable(path, number, error) from error
        base += highest
    words = (
        f"block ids made global, session by session; sessions begin {SESSION_GAP_NS / 1e9:g} s "
        "after one another, since they tell only their own time"
    )
    return by_arrival(spool, _header(path, words, tokens), spread=False, limit=limit)


def _latest(spool: Spool, limit: int) -> int:
    return int(np.partition(spool.times_ns(), limit - 1)[limit - 1])


class _Flat:
    """The requests of a session and of its sub-agents, numbered from 1 as they are met.

    The times of a sub-agent are relative to its marker.
    """

    def __init__(self) -> None:
        self._agents = 0

    def requests(
        self, requests: Any, start_s: float, agent: int
    ) -> Iterator[tuple[float, int, dict[str, Any]]]:
        for request in requests:
            at_s = start_s + float(request["t"])
            if request["type"] == "subagent":
                self._agents += 1
                yield from self.requests(request["requests"], at_s, self._agents)
            else:
                yield at_s, agent, request


def _pairs(runs: Any) -> Ids:
    """[[first id, count], ...]."""
    pairs = np.array(runs, np.int64).reshape(-1, 2)
    if (pairs < 0).any():
        raise ValueError(f"hash_runs {runs!r:.60} hold a negative number")
    if pairs[:, 1].sum() > _CHAIN_BLOCKS_MAX:
        raise ValueError(f"hash_runs claim {pairs[:, 1].sum()} blocks in one request")
    return pairs


def _ids(ids: Any) -> Ids:
    blocks = np.array(ids, np.int64).reshape(-1)
    if len(blocks) and blocks.min() < 0:
        raise ValueError(f"hash_ids hold {blocks.min()}")
    return blocks
