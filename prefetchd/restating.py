"""Saying again what a store holds: headers and a new journal, on a device that nobody else uses.

Decides how that is cut into operations and when it is on the medium. What is said, and why, is up
to whoever opens or repairs a store.
"""

from __future__ import annotations

import numpy as np

from prefetchd.device import SYNC, WRITE, Arena, StorageDevice
from prefetchd.format import Superblock
from prefetchd.journal import Journal, Piece
from prefetchd.model import Mask
from prefetchd.records import Records, encode_headers
from prefetchd.transfers import operations, transfer

CHUNK_BYTES = 1 << 24
"""Most of the arena that is used at a time."""


def write_headers(device: StorageDevice, arena: Arena, shape: Superblock, records: Records) -> Mask:
    """Write the headers that these records make; which of them could not be written."""
    size = shape.header_bytes
    batch = max(1, min(len(arena), CHUNK_BYTES) // size)
    failed = np.zeros(len(records), np.bool_)
    for first in range(0, len(records), batch):
        some = records[first : first + batch]
        rows = arena[: len(some) * size].reshape(len(some), -1)
        rows[:] = encode_headers(some, shape)
        offsets, files = shape.extent_offsets(some["block"]), shape.files(some["block"])
        results = transfer(device, operations(device, rows, WRITE, offsets, files))
        failed[first : first + len(some)] = results != size
    return failed


def write_journal(device: StorageDevice, arena: Arena, journal: Journal, records: Records) -> bool:
    """Begin a new generation of the journal with these records; whether it is on the medium."""
    pieces = journal.snapshot(records, min(len(arena), CHUNK_BYTES))
    return _write(device, arena, pieces) and _write(device, arena, [journal.head()])


def extend_journal(
    device: StorageDevice, arena: Arena, shape: Superblock, journal: Journal, records: Records
) -> bool:
    """Add these records to it, which has room for them; whether all of it is on the medium."""
    pages = max(1, min(len(arena), CHUNK_BYTES) // shape.header_bytes)
    step = pages * shape.records_per_page
    pieces = [journal.append(records[at : at + step]) for at in range(0, len(records), step)]
    return _write(device, arena, pieces)


def _write(device: StorageDevice, arena: Arena, pieces: list[Piece]) -> bool:
    for piece in pieces:
        row = arena[: len(piece.data)].reshape(1, -1)
        row[0] = piece.data
        ops = operations(device, row, WRITE, np.array([piece.offset]))
        if int(transfer(device, ops)[0]) != len(piece.data):
            return False
    return flush(device, arena, 0)


def flush(device: StorageDevice, arena: Arena, file: int) -> bool:
    """Whether all that was written to this file is on the medium now."""
    ops = operations(device, arena[:0].reshape(1, 0), SYNC, np.zeros(1, int), file)
    return int(transfer(device, ops)[0]) == 0
