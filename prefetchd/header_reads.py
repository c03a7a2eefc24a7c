"""The header pages of a whole store, read in the largest operations that pay, one batch ahead.

Decides what is read together, what is read again and when a device is given up. Refuses to know
what headers say.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import READ, Arena, Ops, StorageDevice
from prefetchd.format import Superblock
from prefetchd.hostinfo import errno_name, why_not
from prefetchd.model import Ids, Mask
from prefetchd.restating import CHUNK_BYTES
from prefetchd.store import Store, StoreError
from prefetchd.transfers import Transfer, operations

RUN_BYTES = 1 << 18
SMALL_BYTES = 1 << 14
"""An extent of so many bytes is read whole, in a run of its neighbours: a drive that gives 100,000
headers of 4 KiB a second gives 1.5 GB/s in large operations."""

_SILENT = "the device does not answer; see the kernel log, or use another path"

Rows = NDArray[np.uint8]
Piece = tuple[Ids, int]
"""Blocks, (operations, extents each), which lie one behind another in their file; and the bytes of
one operation, from the first one's header on."""


class Reader:
    """Reads of a store on a device that nobody else uses. `arena`: scratch in the device's."""

    def __init__(self, store: Store, device: StorageDevice, arena: Arena) -> None:
        self.shape = store.superblock
        self.where = store.where
        self.device = device
        self.arena = arena
        self.away = np.isin(np.arange(self.shape.stripes), sorted(store.missing))
        self.reason = ""
        """Why something could not be read, in words."""

    def read(self, rows: Rows, offsets: NDArray[np.int64], files: NDArray[np.int64]) -> Mask:
        """Which rows were read as a whole; what fails is tried once more. Raises StoreError if the
        device is silent."""
        return _Reads(self, operations(self.device, rows, READ, offsets, files)).whole()

    def in_turn(self, pieces: Iterator[Piece]) -> Iterator[tuple[Ids, Rows, Mask]]:
        """The blocks of each piece, what was read (good until the next) and which of it was. The
        next piece is being read meanwhile."""
        under: tuple[Ids, Rows, _Reads] | None = None
        number = 0
        while True:
            piece = next(pieces, None)
            whole = under[2].whole() if under else None
            begun = self._begin(piece, number) if piece else None
            if under and whole is not None:
                yield under[0], under[1], whole
            if begun is None:
                return
            under, number = begun, number + 1

    def _begin(self, piece: Piece, number: int) -> tuple[Ids, Rows, _Reads]:
        blocks, size = piece
        half = self.arena[number % 2 * half_bytes(self) :]
        rows = half[: len(blocks) * size].reshape(len(blocks), size)
        first = blocks[:, 0]
        offsets, files = self.shape.extent_offsets(first), self.shape.files(first)
        return blocks, rows, _Reads(self, operations(self.device, rows, READ, offsets, files))


class _Reads:
    """Operations that are begun at once, on paths that are there."""

    def __init__(self, reader: Reader, ops: Ops) -> None:
        self._reader = reader
        self._ops = ops
        self._done = reader.away[ops["file"]]
        self._begin()

    def _begin(self) -> None:
        self._left = np.flatnonzero(~self._done)
        again = self._ops[self._left]
        again["tag"] = np.arange(len(again))
        self._transfer = Transfer(self._reader.device, again)

    def whole(self) -> Mask:
        whole = np.zeros(len(self._ops), np.bool_)
        self._take(whole)
        if not self._done.all():
            self._begin()
            self._take(whole)
        return whole

    def _take(self, whole: Mask) -> None:
        if len(self._left):
            whole[self._left] = self._results() == self._ops["length"][self._left]
        self._done |= whole

    def _results(self) -> NDArray[np.int64]:
        results = self._transfer.results()
        if (results == -errno.ETIMEDOUT).any():
            reason = errno_name(errno.ETIMEDOUT)
            raise StoreError(
                f"store {self._reader.where}: reading what it holds: {reason}; {_SILENT}"
            )
        self._reader.reason = why_not(int(results.min()), "short read")
        return results


def half_bytes(reader: Reader) -> int:
    """Of the arena, as much as one piece may take: the other half is as aligned as the first."""
    alignment = reader.shape.alignment_bytes
    return min(len(reader.arena), CHUNK_BYTES) // (2 * alignment) * alignment


def read_headers(reader: Reader) -> Iterator[tuple[Ids, Rows, Mask]]:
    """Of all blocks: which, their header pages (good until the next) and which could be read."""
    shape, space = reader.shape, half_bytes(reader)
    failed = [np.zeros(0, np.int64)]
    covered = 0
    for blocks, rows, whole in reader.in_turn(_runs(shape, space)):
        covered += blocks.size
        failed.append(blocks[~whole].reshape(-1))
        read = blocks[whole].reshape(-1)
        extents = rows if whole.all() else rows[whole]
        extents = extents.reshape(len(read), shape.extent_bytes)
        yield read, extents[:, : shape.header_bytes], np.ones(len(read), np.bool_)
    left = np.concatenate([*failed, np.arange(covered, shape.blocks)])
    for blocks, rows, whole in reader.in_turn(_alone(left, shape, space)):
        yield blocks.reshape(-1), rows, whole


def _runs(shape: Superblock, space_bytes: int) -> Iterator[Piece]:
    """Small extents, many in one operation; the last few of each file are left out."""
    each = min(min(RUN_BYTES, space_bytes) // shape.extent_bytes, shape.blocks // shape.stripes)
    if shape.extent_bytes > SMALL_BYTES or each < 2:
        return
    size = each * shape.extent_bytes
    row = np.arange(shape.blocks // (each * shape.stripes) * shape.stripes)
    first = row // shape.stripes * each * shape.stripes + row % shape.stripes
    blocks = first[:, None] + np.arange(each) * shape.stripes
    step = space_bytes // size
    for start in range(0, len(blocks), step):
        yield blocks[start : start + step], size


def _alone(blocks: Ids, shape: Superblock, space_bytes: int) -> Iterator[Piece]:
    step = max(1, space_bytes // shape.header_bytes)
    for start in range(0, len(blocks), step):
        yield blocks[start : start + step, None], shape.header_bytes
