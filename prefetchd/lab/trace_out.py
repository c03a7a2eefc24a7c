"""Writes a trace's block accesses as CSV for libCacheSim: time, object id, object size.

Decides what an access is: of a restore trace each block of each chain, at its request's second; of
a decode trace each page (block index x layers + layer) that a layer needs, at its step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.hostinfo import blaming
from prefetchd.lab.sources import Source
from prefetchd.lab.text import Told
from prefetchd.lab.trace_schema import Columns, TraceHeader, rows_of

HEADER = "time,obj_id,obj_size\n"
PARAMETERS = "time-col=1,obj-id-col=2,obj-size-col=3,delimiter=,,has-header=true"
"""What libCacheSim's CSV reader has to be told (`-t`)."""


def write_libcachesim(
    path: Path,
    source: Source,
    *,
    object_bytes: int,
    top_k: int | None = None,
    told: Told | None = None,
) -> int:
    """Write all rows; the number of accesses. The file appears when it is whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    accesses = rows = 0
    try:
        with blaming(path), part.open("x", encoding="ascii", newline="") as file:
            file.write(HEADER)
            for times, ids, count in _accesses(source, top_k):
                lines = zip(times.tolist(), ids.tolist(), strict=True)
                file.writelines(f"{time},{one},{object_bytes}\n" for time, one in lines)
                accesses, rows = accesses + len(ids), rows + count
                if told:
                    told(rows, source.header.length)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return accesses


_Accesses = tuple[NDArray[np.int64], NDArray[np.int64], int]


def _accesses(source: Source, top_k: int | None) -> Iterator[_Accesses]:
    header = source.header
    row = 0
    for chunk in source.chunks():
        count = rows_of(header.kind, chunk)
        if header.kind == "restore":
            seconds = chunk["arrival_ns"].astype(np.int64) // 1_000_000_000
            times = np.repeat(seconds, chunk["sizes"].astype(np.int64))
            yield times, chunk["blocks"].astype(np.int64), count
        else:
            for step in range(count):
                pages = needed_pages(header, chunk, step, top_k)
                yield np.full(len(pages), row + step), pages, 1
        row += count


def needed_pages(
    header: TraceHeader, chunk: Columns, step: int, top_k: int | None
) -> NDArray[np.int64]:
    """Pages that a step of a chunk needs, each once, layer by layer and rising in each."""
    blocks = chunk["block_ids"][step, :, :, :top_k].astype(np.int64)
    layers = np.arange(header.layers)[:, None, None]
    by_layer = np.unique((layers << 40) | blocks)
    return (by_layer & ((1 << 40) - 1)) * header.layers + (by_layer >> 40)
