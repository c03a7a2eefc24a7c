"""Reads traces in CSV: the object accesses of MLPerf Storage's KV-cache benchmark, and arrivals.

Decides which columns are read, by their names whatever their case and punctuation, and what they
mean. BurstGPT's and Azure's traces tell arrivals and lengths but not which blocks requests share:
they become requests without any reuse, only if that is asked for, and say so.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from prefetchd.lab.request_lines import Line
from prefetchd.lab.spool import Row, Spool, SpooledRequests, by_arrival
from prefetchd.lab.text import not_usable
from prefetchd.lab.trace_format import TraceError, TraceHeader


class CsvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`block_bytes` of an object trace's blocks; `block_tokens` of a lengths trace's, which is
    refused unless `without_reuse`."""

    block_bytes: int = 2 << 20
    block_tokens: int = 512
    without_reuse: bool = False


NO_IDENTITY = (
    "no block identity: hits, reuse, prefetch and eviction cannot be simulated from it; arrivals, "
    "lengths, blocks written and the bandwidth they take can"
)
_CHAIN_BLOCKS_MAX = 1 << 24
_Record = tuple[int, dict[str, str]]
_Names = dict[str, tuple[str, ...]]

# The names of a column, in the order of preference, without case and punctuation.
_OBJECTS: _Names = {
    "time": ("timestamp", "time", "ts"),
    "operation": ("operation", "op"),
    "size": ("objectsizebytes", "sizebytes", "size", "bytes"),
    "key": ("key", "object", "objectname", "objectid"),
    "tier": ("tier",),
    "phase": ("phase",),
}
_BURSTGPT: _Names = {
    "time": ("timestamp",),
    "input": ("requesttokens",),
    "output": ("responsetokens",),
    "session": ("sessionid",),
}
_AZURE: _Names = {
    "time": ("timestamp",),
    "input": ("contexttokens",),
    "output": ("generatedtokens",),
}
_ZONE = re.compile(r":[\d.]+(?P<zone>Z|(?P<side>[+-])(?P<hours>\d\d):?(?P<minutes>\d\d)?)$")
_OPTIONAL = {"tier", "phase", "session"}


def csv_requests(
    path: Path, lines: Iterator[Line], spool: Spool, limit: int | None, settings: CsvSettings
) -> SpooledRequests:
    """The first `limit` requests of a CSV of a known header. Raises TraceError."""
    rows = _rows(path, lines)
    _, header = next(rows)
    kinds: tuple[tuple[_Names, str, Callable[[str], int]], ...] = (
        (_BURSTGPT, "BurstGPT", _seconds),
        (_AZURE, "Azure LLM inference", _date),
    )
    if places := _places(header, _OBJECTS):
        return _objects(path, _records(path, rows, places), spool, limit, settings, places, header)
    for names, what, clock in kinds:
        if places := _places(header, names):
            records = _records(path, rows, places)
            return _lengths(path, records, spool, limit, settings, what, clock)
    raise TraceError(
        f"trace {path} is no .npz archive and no JSON lines, and its columns, "
        f"{', '.join(header[:8])!s:.100}, are not those of MLPerf Storage's I/O trace (Timestamp, "
        "Operation, Object_Size_Bytes, Key), of BurstGPT (Timestamp, Request tokens, Response "
        "tokens) or of Azure (TIMESTAMP, ContextTokens, GeneratedTokens)"
    )


def _rows(path: Path, lines: Iterator[Line]) -> Iterator[tuple[int, list[str]]]:
    number = 0

    def text() -> Iterator[str]:
        nonlocal number
        for number, line in lines:  # noqa: B007 - the number is told with what is wrong
            yield line.decode()

    try:
        for row in csv.reader(text()):
            yield number, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path}, line {number} is no line of CSV: {error}") from error


def _places(header: list[str], names: _Names) -> dict[str, int]:
    """Where each column stands; nothing if one that is needed is not there."""
    plain = [re.sub(r"[^a-z]", "", name.lower()) for name in header]
    found = {
        column: plain.index(next(name for name in known if name in plain))
        for column, known in names.items()
        if set(known) & set(plain)
    }
    return found if not names.keys() - _OPTIONAL - found.keys() else {}


def _records(
    path: Path, rows: Iterator[tuple[int, list[str]]], places: dict[str, int]
) -> Iterator[_Record]:
    for number, row in rows:
        if len(row) <= max(places.values()):
            raise TraceError(f"trace {path}, line {number} has only {len(row)} fields; it is cut")
        yield number, {column: row[place].strip() for column, place in places.items()}


def _seconds(text: str) -> int:
    return int(float(text) * 1e9)


def _count(text: str) -> int:
    """Of tokens."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e15:
        raise ValueError(f"{text!r:.40} is no number of tokens")
    return int(number)


def _date(text: str) -> int:
    """`2023-11-16 18:17:03.9799600`, of UTC where no other zone follows, as in `+01:00`."""
    zone = _ZONE.search(text)
    plain = text[: zone.start("zone")] if zone else text
    return int(np.datetime64(plain, "ns").astype(np.int64)) - _east_ns(zone)


def _east_ns(zone: re.Match[str] | None) -> int:
    """By how much a zone's clocks are ahead of UTC's."""
    if zone is None or zone["hours"] is None:
        return 0
    minutes = 60 * int(zone["hours"]) + int(zone["minutes"] or 0)
    return (-minutes if zone["side"] == "-" else minutes) * 60_000_000_000


def _lengths(
    path: Path,
    records: Iterator[_Record],
    spool: Spool,
    limit: int | None,
    settings: CsvSettings,
    what: str,
    clock: Callable[[str], int],
) -> SpooledRequests:
    if not settings.without_reuse:
        raise TraceError(
            f"trace {path} ({what}) tells arrivals and lengths only, {NO_IDENTITY}; `prefetchd "
            "trace convert --no-reuse` makes requests of it that share nothing, and says so"
        )
    blocks, sessions = 0, dict[str, int]()
    for number, record in records:
        try:
            tokens, output = _count(record["input"]), _count(record["output"])
            count = -(-tokens // settings.block_tokens)
            if count > _CHAIN_BLOCKS_MAX:
                raise ValueError(f"a request of {tokens} tokens")
            session = record.get("session") or f"line {number}"
            row = Row(
                clock(record["time"]),
                np.array([blocks, count], np.int64).tobytes(),
                sessions.setdefault(session, len(sessions)) if "session" in record else len(spool),
                input_tokens=tokens,
                output_tokens=output,
            )
            spool.add(row)
        except (ValueError, OverflowError) as error:
            raise not_usable(path, number, error) from error
        blocks += count
        if spool.holds(limit):
            break
    header = TraceHeader(
        kind="restore",
        name=path.name.split(".")[0],
        origin=f"{path.name} ({what})",
        how=f"WITHOUT REUSE: blocks made up from lengths, none shared; {NO_IDENTITY}",
        block_tokens=settings.block_tokens,
        identity=False,
    )
    return by_arrival(spool, header, spread=True, limit=limit)


class _Objects:
    """Blocks of objects: runs of ids by key. An object that grows keeps the blocks it had."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._runs: dict[str, list[tuple[int, int]]] = {}
        self._number: dict[str, int] = {}
        self._blocks = 0

    def runs(self, key: str, size: int) -> bytes:
        count = -(-size // self._block_bytes)
        if size < 0 or count > _CHAIN_BLOCKS_MAX:
            raise ValueError(f"an object of {size} bytes in blocks of {self._block_bytes}")
        runs = self._runs.setdefault(key, [])
        taken = array("q")
        for start, length in runs:
            taken.extend((start, min(length, count)))
            count -= taken[-1]
            if not count:
                break
        if count:
            runs.append((self._blocks, count))
            taken.extend(runs[-1])
            self._blocks += count
        return taken.tobytes()

    def number(self, key: str) -> int:
        return self._number.setdefault(key, len(self._number))


def _objects(
    path: Path,
    records: Iterator[_Record],
    spool: Spool,
    limit: int | None,
    settings: CsvSettings,
    places: dict[str, int],
    names: list[str],
) -> SpooledRequests:
    """A request for each access; what the benchmark moved between its own tiers is left out."""
    objects, moved = _Objects(settings.block_bytes), 0
    for number, record in records:
        if record.get("phase", "").lower() == "evict":
            moved += 1
            continue
        try:
            if record["operation"].lower() not in ("read", "write"):
                raise ValueError(f"operation {record['operation']!r:.40} is neither Read nor Write")
            runs = objects.runs(record["key"], int(float(record["size"])))
            spool.add(Row(_seconds(record["time"]), runs, objects.number(record["key"])))
        except (ValueError, OverflowError) as error:
            raise not_usable(path, number, error) from error
        if spool.holds(limit):
            break
    read = ", ".join(names[place].strip() for place in places.values())
    header = TraceHeader(
        kind="restore",
        name=path.name.split(".")[0],
        origin=f"{path.name} (MLPerf Storage I/O trace)",
        how=(
            f"read columns {read}; a request for each read or write of an object, whatever its "
            f"tier, {moved} moves between tiers left out; an object is a run of blocks of "
            f"{settings.block_bytes} bytes, and a session"
        ),
        block_bytes=settings.block_bytes,
    )
    return by_arrival(spool, header, spread=False, limit=limit)
