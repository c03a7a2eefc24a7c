"""Reads the two public formats with a request or a session a line, as JSON.

Decides what their fields mean: ids made global, sub-agents placed in time. A conversation trace has
`timestamp` in ms, `hash_ids` of 512-token blocks, `input_length` and `output_length`; coding-agent
sessions have `requests`, each with `t` in s, `type`, `hash_runs` or `hash_ids` of 64-token blocks,
`in`, `out`, `stop`, `think_time` in s. A line's `block_size` in tokens counts instead. Refuses to
guess: a line that cannot be used is told by its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

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
_ID_MAX = (1 << 62) - 1  # so that no sum of two overflows
_Id = Annotated[int, msgspec.Meta(ge=0, le=_ID_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=_CHAIN_BLOCKS_MAX)]  # nor a sum of a whole line's

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
    tokens = odd = 0
    for number, line in lines:
        try:
            blocks = _ids(line["hash_ids"])
            row = Row(
                int(float(line["timestamp"]) * 1e6),
                runs_of(blocks),
                len(spool),
                input_tokens=_told(line.get("input_length")),
                output_tokens=_told(line.get("output_length")),
            )
            tokens = _block_tokens(line, _CONVERSATION_TOKENS, tokens)
            spool.add(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise not_usable(path, number, error) from error
        full, left = divmod(max(0, row.input_tokens), tokens)
        odd += row.input_tokens >= 0 and not full <= len(blocks) <= full + (left > 0)
        if spool.holds(limit):
            break
    words = "block ids are the trace's own"
    if 2 * odd > len(spool):
        words += f"; blocks are not of {tokens} tokens, by the requests' lengths, but of how many?"
        tokens = 0
    return by_arrival(spool, _header(path, words, tokens), spread=True, limit=limit)


def _block_tokens(line: dict[str, Any], usual: int, before: int) -> int:
    """Tokens of a block: what a line says, the same in all; else what is usual."""
    size = int(line.get("block_size") or usual)
    if size < 1 or before not in (0, size):
        raise ValueError(f"blocks of {size} tokens, and of {before or 'none'} before it")
    return size


def _sessions(
    path: Path, lines: Iterator[_Object], spool: Spool, limit: int | None
) -> SpooledRequests:
    base, tokens, scope = 0, 0, ""
    for place, (number, line) in enumerate(lines):
        start_ns = place * SESSION_GAP_NS
        if limit is not None and len(spool) >= limit and _latest(spool, limit) < start_ns:
            break  # what is still to come arrives later than all that is asked for
        try:
            tokens = _block_tokens(line, _SESSION_TOKENS, tokens)
            told = str(line.get("hash_id_scope") or "local")
            scope = scope or told
            if told != scope:
                raise ValueError(f"hash_id_scope is {told}, and {scope} before it")
            highest = 0
            for at_s, agent, request in _Flat().requests(line["requests"], 0.0, 0):
                pairs = _runs(request)
                highest = max(highest, int(pairs.sum(axis=1).max(initial=0)))
                pairs[:, 0] += base
                spool.add(_row(request, start_ns + int(at_s * 1e9), pairs, place, agent))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise not_usable(path, number, error) from error
        base += 0 if scope == "global" else highest
        if base > _ID_MAX:
            raise TraceError(f"trace {path}, line {number}: block ids too large to be made global")
    what = "the trace's own" if scope == "global" else "made global, session by session"
    words = (
        f"block ids {what}; sessions begin {SESSION_GAP_NS / 1e9:g} s after one another, since "
        "they tell only their own time"
    )
    return by_arrival(spool, _header(path, words, tokens), spread=False, limit=limit)


def _row(request: dict[str, Any], at_ns: int, pairs: Ids, session: int, agent: int) -> Row:
    think_s = float(request.get("think_time") or 0)
    if think_s < 0:
        raise ValueError(f"think_time is {think_s:g}")
    return Row(
        at_ns,
        pairs.tobytes(),
        session,
        str(request.get("stop") or ""),
        int(think_s * 1e9),
        _told(request.get("in")),
        _told(request.get("out")),
        agent,
    )


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


def _told(tokens: Any) -> int:
    """A count of tokens, -1 where there is none."""
    return int(tokens) if isinstance(tokens, int | float) and tokens >= 0 else -1


def _runs(request: dict[str, Any]) -> Ids:
    """[[first id, count], ...], of a request that tells runs or, as WEKA's release does, ids."""
    if "hash_runs" not in request and "hash_ids" in request:
        return np.frombuffer(bytearray(runs_of(_ids(request["hash_ids"]))), np.int64).reshape(-1, 2)
    runs = _converted("hash_runs", request["hash_runs"], list[tuple[_Id, _Count]])
    pairs = np.array(runs, np.int64).reshape(-1, 2)
    if pairs[:, 1].sum() > _CHAIN_BLOCKS_MAX:
        raise ValueError(f"hash_runs claim {pairs[:, 1].sum()} blocks in one request")
    return pairs


def _ids(ids: Any) -> Ids:
    return np.array(_converted("hash_ids", ids, list[_Id]), np.int64)


def _converted(name: str, value: Any, kind: Any) -> Any:
    """Raises ValueError for what is not of this kind; nothing is rounded or cut to fit."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from error
