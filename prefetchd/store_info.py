"""What a store is and holds, as far as its superblocks, journal and headers tell.

Decides which figures are shown. Reads no page and writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from prefetchd.checking import Held, held
from prefetchd.records import NEVER_NS, PUBLISH
from prefetchd.store_opening import Opening
from prefetchd.survey import Progress

_LEFT = (
    ("expired", 0.0),
    ("under a minute", 60.0),
    ("under an hour", 3600.0),
    ("under a day", 86_400.0),
    ("under a week", 604_800.0),
    ("a week or more", float("inf")),
)
"""Classes of time left to live, by their upper ends in seconds."""


class PathInfo(msgspec.Struct, frozen=True):
    path: str
    file_bytes: int
    blocks: int
    blocks_stored: int
    missing: bool


class Info(msgspec.Struct, frozen=True):
    """`journal_records`: None if there is no journal, or if it is not believed.

    `blocks_by_time_left`: how many blocks have how long to live; `blocks_by_openings_ago`: by when
    they were written, counted in openings of the store (0: the last one).
    """

    store: str
    layers: int
    page_bytes: int
    slot_bytes: int
    extent_bytes: int
    alignment_bytes: int
    fingerprint: str
    encrypted: bool
    clean: bool
    journal_generation: int
    journal_records: int | None
    blocks: int
    blocks_stored: int
    blocks_free: int
    blocks_unknown: int
    namespaces: int
    file_bytes: int
    stored_bytes: int
    paths: list[PathInfo]
    blocks_by_time_left: dict[str, int]
    blocks_by_openings_ago: dict[str, int]
    file_system: str
    notes: list[str]
    schema: str = "prefetchd.store.info/1"


def look(
    place: Path, opening: Opening, *, device: str = "uring", progress: Progress | None = None
) -> Info:
    """Raises StoreError if it cannot be opened."""
    with held(place, opening, device=device, progress=progress) as found:
        return _described(str(place), found)


def _described(name: str, found: Held) -> Info:
    shape, table = found.closed, found.catalog.table
    live = table["kind"] == PUBLISH
    stored = int(np.count_nonzero(live))
    believed = shape.clean and found.journal.generation and found.journal.state == shape.journal
    paths = [
        PathInfo(
            found.store.files[number].path,
            part.file_bytes,
            part.extents,
            int(np.count_nonzero(live[number :: shape.stripes])),
            number in found.store.missing,
        )
        for number, part in enumerate(map(shape.of_stripe, range(shape.stripes)))
    ]
    return Info(
        store=name,
        layers=shape.layers,
        page_bytes=shape.page_bytes,
        slot_bytes=shape.slot_bytes,
        extent_bytes=shape.extent_bytes,
        alignment_bytes=shape.alignment_bytes,
        fingerprint=shape.fingerprint.hex(),
        encrypted=bool(shape.key_check),
        clean=shape.clean,
        journal_generation=shape.journal[0],
        journal_records=found.journal.records if believed else None,
        blocks=shape.blocks,
        blocks_stored=stored,
        blocks_free=shape.blocks - found.catalog.blocks_used,
        blocks_unknown=found.catalog.blocks_used - stored,
        namespaces=len(set(np.ascontiguousarray(table["namespace"][live]).tolist())),
        file_bytes=sum(path.file_bytes for path in paths),
        stored_bytes=stored * shape.layers * shape.page_bytes,
        paths=paths,
        blocks_by_time_left=_times_left(table["expires_ns"][live]),
        blocks_by_openings_ago=_openings_ago(table["sequence"][live], shape.epoch),
        file_system=found.store.medium.file_system,
        notes=list(found.notes),
    )


def _times_left(expires_ns: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, int]:
    ends = expires_ns[expires_ns < NEVER_NS]
    left_s = np.maximum((ends - time.time_ns()) / 1e9, -1.0)
    counts = {"never": len(expires_ns) - len(ends)}
    low = -np.inf
    for words, high in _LEFT:
        counts[words] = int(np.count_nonzero((left_s > low) & (left_s <= high)))
        low = high
    return {words: count for words, count in counts.items() if count}


def _openings_ago(
    sequences: np.ndarray[tuple[int], np.dtype[np.uint64]], epoch: int
) -> dict[str, int]:
    """An opening and its close take an epoch each, and begin the sequence numbers anew."""
    ago = (epoch - (sequences >> np.uint64(40)).astype(np.int64)) // 2
    classes = (("0", 0, 0), ("1 to 9", 1, 9), ("10 or more", 10, np.inf))
    counts = {name: int(np.count_nonzero((ago >= a) & (ago <= b))) for name, a, b in classes}
    return {name: count for name, count in counts.items() if count}


def rows(info: Info) -> Iterator[tuple[str, str]]:
    """For people: a name and words each."""
    yield "store", info.store
    padding = info.slot_bytes - info.page_bytes
    yield "layout", f"{info.layers} pages of {info.page_bytes:,} bytes a block (+{padding} padding)"
    yield "fingerprint", info.fingerprint[:16]
    if info.encrypted:
        yield "pages", "ENCRYPTED (AES-256-GCM); reading them takes the key file"
    yield "blocks", f"{info.blocks_stored:,} stored, {info.blocks_free:,} free of {info.blocks:,}"
    if info.blocks_unknown:
        yield "", f"{info.blocks_unknown:,} of which nothing can be told"
    yield "bytes", f"{info.stored_bytes:,} of pages in {info.file_bytes:,} of files"
    yield (
        "closed",
        "cleanly" if info.clean else "not cleanly, so its headers are read",
    )
    if info.journal_records is None:
        yield "journal", "none that is believed"
    else:
        yield "journal", f"generation {info.journal_generation}, {info.journal_records:,} records"
    for path in info.paths:
        state = "missing" if path.missing else f"{path.file_bytes:,} bytes"
        yield "path", f"{path.path}: {path.blocks_stored:,} of {path.blocks:,} blocks, {state}"
    yield "file system", info.file_system
    if info.namespaces > 1:
        yield "namespaces", str(info.namespaces)
    for name, counts in (
        ("time to live", info.blocks_by_time_left),
        ("openings ago", info.blocks_by_openings_ago),
    ):
        if counts:
            yield name, ", ".join(f"{words}: {count:,}" for words, count in counts.items())
