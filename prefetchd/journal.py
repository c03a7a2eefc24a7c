"""The journal: what has been said of blocks, in the order it was said, so that nobody need ask
every extent.

Decides which bytes go where in the journal's two areas, and what those bytes prove. Moves none.

An area is a head, which names its generation, and pages of whole records; a commit begins a new
page, so that no page is written twice. When an area is full, a snapshot of what holds goes to the
other one under the next generation, its head last. (Two areas of the file that is open anyway, and
not a new file that is renamed over the old one: the flush rules of the device are then the only
ones there are, and it works on a raw device.) Records are sealed with their generation, so that
what an earlier one left in an area is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.format import Superblock
from prefetchd.records import Records, genuine, record_dtype, seal

_HEAD = np.dtype([("magic", "S8"), ("generation", "<u8"), ("store_id", "V16"), ("check", "<u8")])
_HEAD_MAGIC = b"pfjournl"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes for the journal, and where in file 0 they go."""

    offset: int
    data: Bytes


class Journal:
    """Where the next record goes. `generation` 0: there is no journal, and none is written."""

    def __init__(self, superblock: Superblock, generation: int, pages: int, records: int) -> None:
        self._shape = superblock
        self.generation = generation
        self.pages = pages
        self.records = records

    @property
    def state(self) -> tuple[int, int, int]:
        """For the superblock of a clean close."""
        return (self.generation, self.pages, self.records) if self.generation else (0, 0, 0)

    def give_up(self) -> None:
        """It could not be written: from here on the headers are all there is."""
        self.generation = self.pages = self.records = 0

    def has_room(self, records: int) -> bool:
        return self.pages + self._pages_for(records) <= self._shape.journal_pages

    def _pages_for(self, records: int) -> int:
        return -(-records // self._shape.records_per_page)

    def append(self, records: Records) -> Piece:
        """The caller checks `has_room`."""
        offset = page_offset(self._shape, self.generation, self.pages)
        data = pack(seal(records, self._shape, self.generation), self._shape)
        self.pages += self._pages_for(len(records))
        self.records += len(records)
        return Piece(offset, data)

    def snapshot(self, records: Records, chunk_bytes: int) -> list[Piece]:
        """Begin the next generation in the other area: its pages, in pieces; `head` comes last,
        after a flush."""
        generation = self.generation + 1
        data = pack(seal(records, self._shape, generation), self._shape)
        start = page_offset(self._shape, generation, 0)
        page_bytes = self._shape.header_bytes
        step = max(page_bytes, chunk_bytes // page_bytes * page_bytes)
        self.generation, self.records = generation, len(records)
        self.pages = self._pages_for(len(records))
        return [Piece(start + at, data[at : at + step]) for at in range(0, len(data), step)]

    def head(self) -> Piece:
        head = np.zeros(self._shape.alignment_bytes, np.uint8)
        fields = head[: _HEAD.itemsize].view(_HEAD)
        fields["magic"] = _HEAD_MAGIC
        fields["generation"] = self.generation
        fields["store_id"] = np.void(self._shape.store_id)
        fields["check"] = _head_check(self._shape, self.generation)
        return Piece(area_offset(self._shape, self.generation), head)


def area_offset(superblock: Superblock, generation: int) -> int:
    return superblock.journal_offset + generation % 2 * superblock.area_bytes


def page_offset(superblock: Superblock, generation: int, page: int) -> int:
    start = area_offset(superblock, generation) + superblock.alignment_bytes
    return start + page * superblock.header_bytes


def _head_check(superblock: Superblock, generation: int) -> int:
    record = np.zeros(1, record_dtype(superblock.proof_words))
    record["sequence"] = generation
    return int(seal(record, superblock, generation)["check"][0])


def generation_of(head: Bytes, superblock: Superblock, area: int) -> int:
    """The generation that the head of area 0 or 1 names; 0 if it is none of this store."""
    fields = head[: _HEAD.itemsize].view(_HEAD)[0]
    generation = int(fields["generation"])
    if bytes(fields["magic"]) != _HEAD_MAGIC or generation % 2 != area:
        return 0
    if fields["store_id"].tobytes() != superblock.store_id:
        return 0
    return generation if int(fields["check"]) == _head_check(superblock, generation) else 0


def pack(records: Records, superblock: Superblock) -> Bytes:
    """Whole pages of sealed records; what is left over of the last page is zero."""
    per_page, size = superblock.records_per_page, superblock.record_bytes
    pages = -(-len(records) // per_page)
    padded = np.zeros((pages * per_page, size), np.uint8)
    padded[: len(records)] = records.view(np.uint8).reshape(len(records), size)
    rows = np.zeros((pages, superblock.header_bytes), np.uint8)
    rows[:, : per_page * size] = padded.reshape(pages, per_page * size)
    return rows.reshape(-1)


def unpack(data: Bytes, superblock: Superblock, generation: int) -> tuple[Records, int]:
    """The intact records of this generation in whole pages, in their order, and how many pages
    there are up to the last that has one."""
    per_page, size = superblock.records_per_page, superblock.record_bytes
    rows = data.reshape(-1, superblock.header_bytes)[:, : per_page * size]
    dtype = record_dtype(superblock.proof_words)
    records: Records = np.ascontiguousarray(rows).reshape(-1).view(dtype)
    places = np.flatnonzero(genuine(records, superblock, generation))
    return records[places], int(places[-1]) // per_page + 1 if len(places) else 0


def newest(table: Records, seen: NDArray[np.bool_], records: Records) -> None:
    """Let each record that is newer than what `table` (one row a block) says of its block take
    its place; `seen`: the rows that say anything."""
    latest, blocks = records, records["block"]
    if len(blocks) > 1 and (blocks[1:] <= blocks[:-1]).any():  # not one a block, in their order
        order = np.argsort(records["sequence"], kind="stable")
        # Of several for one block the last is the newest: unique gives the first of the reversed.
        blocks, last = np.unique(blocks[order[::-1]], return_index=True)
        latest = records[order[::-1][last]]
    newer = ~seen[blocks] | (latest["sequence"] > table["sequence"][blocks])
    table[blocks[newer]] = latest[newer]
    seen[blocks[newer]] = True
