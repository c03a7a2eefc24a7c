"""What a trace of either kind holds, and what cannot be simulated from it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefetchd.lab.decode_info import DecodeCounter, DecodeInfo
from prefetchd.lab.request_csv import NO_IDENTITY
from prefetchd.lab.restore_info import RestoreCounter, RestoreInfo
from prefetchd.lab.sources import Source
from prefetchd.lab.text import Told
from prefetchd.lab.trace_format import is_trace
from prefetchd.lab.trace_schema import Kind, TraceHeader, rows_of


class TraceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`format` is the schema, or "raw"; `cannot` says in words what a trace is no use for."""

    file: str
    file_bytes: int
    format: str
    kind: Kind
    name: str
    synthetic: bool
    origin: str
    licence: str
    how: str
    block_tokens: int
    block_bytes: int
    chunks: int
    decode: DecodeInfo | None = None
    restore: RestoreInfo | None = None
    cannot: list[str] = []


def look(path: Path, source: Source, *, top_k: int, told: Told | None = None) -> TraceInfo:
    """Read a trace once and count. `told` hears rows. Raises TraceError."""
    header = source.header
    counter = DecodeCounter(header, top_k) if header.kind == "decode" else RestoreCounter(header)
    rows = chunks = 0
    for chunk in source.chunks():
        counter.add(chunk)
        rows, chunks = rows + rows_of(header.kind, chunk), chunks + 1
        if told:
            told(rows, header.length)
    done = counter.done()
    return TraceInfo(
        file=str(path),
        file_bytes=path.stat().st_size,
        format=header.schema if is_trace(path) else "raw",
        kind=header.kind,
        name=header.name,
        synthetic=header.synthetic,
        origin=header.origin,
        licence=header.licence,
        how=header.how,
        block_tokens=header.block_tokens,
        block_bytes=header.block_bytes,
        chunks=chunks,
        decode=done if isinstance(done, DecodeInfo) else None,
        restore=done if isinstance(done, RestoreInfo) else None,
        cannot=_cannot(header, done),
    )


def _cannot(header: TraceHeader, done: DecodeInfo | RestoreInfo) -> list[str]:
    words: list[str] = []
    if isinstance(done, DecodeInfo):
        if not done.hint_ranks:
            words.append("no hints: predictors that follow hints see none")
        if not header.prompt_tokens:
            words.append("no length of the prompt: which pages are far is not known")
        return words
    if not done.blocks:
        words.append("no blocks: there is nothing to restore")
    if not header.identity:
        words.append(NO_IDENTITY)
    if set(done.stops) <= {""} and not done.think_s.max:
        words.append("no stop reasons and think times: retention by either cannot be judged")
    return words
