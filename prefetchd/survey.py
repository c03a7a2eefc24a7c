"""Reads a whole store and holds every byte against what is said of it.

Decides how the bytes are read: all paths at once, in large operations and several of them, so that
the drive is the limit and not the hashing. What fails is read again alone, page by page, before
anything is said of it. Writes nothing, and knows no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import OP, READ, Arena, StorageDevice
from prefetchd.format import Binding, Superblock, page_checksum
from prefetchd.hostinfo import why_not
from prefetchd.model import Ids, Mask
from prefetchd.records import PUBLISH, Records, decode_headers
from prefetchd.store import Store
from prefetchd.transfers import operations, transfer

if TYPE_CHECKING:
    from prefetchd.cipher import PageCipher

CHUNK_BYTES = 1 << 22
DEPTH = 8
_WAIT_NS = 1_000_000_000

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(slots=True)
class Survey:
    """What is wrong, by block. `headers`: says nothing, or another thing than the table; `pages`:
    (layers that fail their checksum); `unread`: why something of it cannot be read."""

    headers: dict[int, str] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    unread: dict[int, str] = field(default_factory=dict)
    blocks: int = 0
    pages_right: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of one extent, or several whole ones that follow each other. `layers`: from, to."""

    file: int
    offset: int
    length: int
    blocks: Ids
    layers: tuple[int, int]
    header: bool


def arena_bytes(shape: Superblock) -> int:
    return DEPTH * _slot_bytes(shape)


def _slot_bytes(shape: Superblock) -> int:
    """One operation's memory: a chunk, or if a page or header is larger than that, as much."""
    return max(CHUNK_BYTES, shape.header_bytes + shape.slot_bytes)


def survey(
    store: Store,
    device: StorageDevice,
    arena: Arena,
    table: Records,
    progress: Progress | None = None,
    cipher: PageCipher | None = None,
) -> Survey:
    """Hold headers and pages against `table` (one record a block; kind PUBLISH if it is there).

    `arena`: at least `arena_bytes`. The device is idle and nobody else's. `cipher`: of an encrypted
    store.
    """
    surveyor = _Surveyor(store, device, arena, table, cipher)
    return surveyor.run(progress or (lambda done, whole: None))


class _Surveyor:
    def __init__(
        self,
        store: Store,
        device: StorageDevice,
        arena: Arena,
        table: Records,
        cipher: PageCipher | None,
    ) -> None:
        self._cipher = cipher
        self._shape = store.superblock
        self._device = device
        self._arena = arena
        self._table = table
        self._live: Mask = table["kind"] == PUBLISH
        for path in sorted(store.missing):
            self._live[path :: self._shape.stripes] = False
        self._seeds = seeds_of(table, self._shape)
        self._away = store.missing
        blocks = int(np.count_nonzero(self._live))
        self._found = Survey(blocks=blocks, pages_right=blocks * self._shape.layers)
        self._suspects: set[int] = set()
        self._start = arena.ctypes.data - device.arena.ctypes.data

    def run(self, progress: Progress) -> Survey:
        pieces = self._pieces()
        whole = sum(piece.length for piece in pieces)
        slot = _slot_bytes(self._shape)
        count = max(1, min(DEPTH, len(self._arena) // slot, self._device.depth))
        free, under, done = list(range(count)), {}, 0
        waiting: Iterator[_Piece] = iter(pieces)
        while True:
            while free and (piece := next(waiting, None)) is not None:
                place = free.pop()
                under[place] = piece
                self._submit(piece, place, slot)
            if not under:
                break
            self._device.wait(_WAIT_NS)
            for tag, result in self._device.reap().tolist():
                piece = under.pop(tag)
                self._look(piece, self._arena[tag * slot :][: piece.length], result)
                free.append(tag)
                done += piece.length
                progress(done, whole)
        self._found.bytes_read = done
        self._look_at_the_free()
        for block in sorted(self._suspects):
            self._look_again(block)
        return self._found

    def _submit(self, piece: _Piece, place: int, slot: int) -> None:
        op = np.zeros(1, OP)
        op["tag"], op["file"], op["kind"] = place, piece.file, READ
        op["offset"], op["length"] = piece.offset, piece.length
        op["memory"] = self._start + place * slot
        accepted = self._device.submit(op)
        assert accepted == 1

    # --- what is read ---

    def _pieces(self) -> list[_Piece]:
        """In the order of the medium, from all paths in turn."""
        paths = [
            self._pieces_of(file) for file in range(self._shape.stripes) if file not in self._away
        ]
        merged = chain.from_iterable(zip_longest(*paths))
        return [piece for piece in merged if piece is not None]

    def _pieces_of(self, file: int) -> Iterator[_Piece]:
        shape = self._shape
        blocks = np.arange(file, shape.blocks, shape.stripes)
        live = self._live[blocks]
        for run in np.split(blocks, np.flatnonzero(np.diff(live)) + 1):
            if not self._live[run[0]]:
                continue
            each = CHUNK_BYTES // shape.extent_bytes
            if each == 0:
                for block in run.tolist():
                    yield from self._parts(file, block)
                continue
            for first in range(0, len(run), each):
                some = run[first : first + each]
                offset, length = shape.extent_offsets(some[:1]), len(some) * shape.extent_bytes
                yield _Piece(file, int(offset[0]), length, some, (0, shape.layers), header=True)

    def _parts(self, file: int, block: int) -> Iterator[_Piece]:
        """Of an extent that is larger than a chunk."""
        shape = self._shape
        blocks = np.array([block])
        offset = int(shape.extent_offsets(blocks)[0])
        yield _Piece(file, offset, shape.header_bytes, blocks, (0, 0), header=True)
        offset += shape.header_bytes
        step = max(1, CHUNK_BYTES // shape.slot_bytes)
        for first in range(0, shape.layers, step):
            last = min(first + step, shape.layers)
            at, length = offset + first * shape.slot_bytes, (last - first) * shape.slot_bytes
            yield _Piece(file, at, length, blocks, (first, last), header=False)

    # --- what it must be ---

    def _look(self, piece: _Piece, data: NDArray[np.uint8], result: int) -> None:
        if result != piece.length:
            self._suspects.update(piece.blocks.tolist())
            return
        count, skip = len(piece.blocks), self._shape.header_bytes if piece.header else 0
        rows = data.reshape(count, -1)
        if piece.header:
            self._look_at_headers(rows[:, :skip], piece.blocks)
        first, last = piece.layers
        for block, row in zip(piece.blocks.tolist(), rows, strict=True):
            if not all(self._right(block, range(first, last), row[skip:])):
                self._suspects.add(block)

    def _look_at_the_free(self) -> None:
        """Only their headers: nothing must lie there."""
        shape = self._shape
        free = np.flatnonzero(~self._live)
        free = free[~np.isin(shape.files(free), sorted(self._away))]
        batch = max(1, len(self._arena) // shape.header_bytes)
        for start in range(0, len(free), batch):
            blocks = free[start : start + batch]
            rows = self._arena[: len(blocks) * shape.header_bytes].reshape(len(blocks), -1)
            offsets, files = shape.extent_offsets(blocks), shape.files(blocks)
            results = transfer(self._device, operations(self._device, rows, READ, offsets, files))
            whole = results == shape.header_bytes
            self._suspects.update(blocks[~whole].tolist())
            self._look_at_headers(rows[whole], blocks[whole])

    def _look_at_headers(self, rows: NDArray[np.uint8], blocks: Ids) -> None:
        records, good = decode_headers(rows, blocks, self._shape)
        for block, header, intact in zip(blocks.tolist(), records, good.tolist(), strict=True):
            said = self._said_of(block, header, intact=intact)
            if said:
                self._found.headers[block] = said

    def _said_of(self, block: int, header: np.void, *, intact: bool) -> str:
        """What is wrong with a header; empty if nothing is."""
        if not self._live[block]:
            stale = intact and header["kind"] == PUBLISH
            return "says that a block lies there, but the journal knows of none" if stale else ""
        if not intact:
            return "is damaged"
        expected = self._table[block]
        same = all(
            (header[name] == expected[name]).all()
            for name in ("kind", "sequence", "key", "namespace", "checksums")
        )
        return "" if same else "says something else than the journal"

    def _right(self, block: int, layers: range, payload: NDArray[np.uint8]) -> list[bool]:
        if self._cipher is not None:
            records = np.repeat(self._table[block : block + 1], len(layers))
            rows = payload.reshape(len(layers), self._shape.slot_bytes)
            numbers = np.arange(layers.start, layers.stop)
            good: list[bool] = self._cipher.open(records, numbers, rows, range(len(rows))).tolist()
            return good
        seed, page_bytes = int(self._seeds[block]), self._shape.page_bytes
        expected = self._table["checksums"][block].tolist()
        flat, slot = payload.reshape(-1).data, self._shape.slot_bytes
        return [
            page_checksum(flat[at : at + page_bytes], seed, layer) == expected[layer]
            for layer, at in zip(layers, range(0, len(flat), slot), strict=True)
        ]

    def _look_again(self, block: int) -> None:
        """Each page in a read of its own."""
        shape, file = self._shape, block % self._shape.stripes
        offset = shape.extent_offsets(np.array([block]))
        header = self._arena[: shape.header_bytes].reshape(1, -1)
        if self._again(block, header, offset, file, "its header"):
            self._look_at_headers(header, np.array([block]))
        bad: list[int] = []
        for layer in range(shape.layers if self._live[block] else 0):
            page = self._arena[: shape.slot_bytes].reshape(1, -1)
            at = offset + shape.header_bytes + layer * shape.slot_bytes
            if not self._again(block, page, at, file, f"page {layer}"):
                self._found.pages_right -= 1
            elif not self._right(block, range(layer, layer + 1), page)[0]:
                bad.append(layer)
                self._found.pages_right -= 1
        if bad:
            self._found.pages[block] = bad

    def _again(self, block: int, row: NDArray[np.uint8], offset: Ids, file: int, what: str) -> bool:
        ops = operations(self._device, row, READ, offset, file)
        result = int(transfer(self._device, ops)[0])
        if result == row.shape[1]:
            return True
        reason = why_not(result, "short read")
        self._found.unread.setdefault(block, f"{what}: {reason}")
        return False


def seeds_of(table: Records, shape: Superblock) -> NDArray[np.uint64]:
    """The checksum seeds of all blocks, whatever their namespaces."""
    seeds = np.zeros(len(table), np.uint64)
    live = np.flatnonzero(table["kind"] == PUBLISH)
    spaces = np.ascontiguousarray(table["namespace"][live])
    for space in set(spaces.tolist()):
        mine = live[spaces == np.void(space)]
        binding = Binding(space, shape.fingerprint, shape.page_bytes)
        seeds[mine] = binding.seeds(table["key"][mine])
    return seeds
