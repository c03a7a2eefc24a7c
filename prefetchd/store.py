"""The NVMe tier's files: marking and closing them.

Decides what a store is while it is open, and how it is marked. How it is opened is
`store_opening`'s; which block lies where is the catalog's; what bytes mean is the format's; what is
found again after a close or a crash is the recovery's; moving bytes is the device's.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefetchd.device import READ, SYNC, WRITE, Arena, File, StorageDevice
from prefetchd.format import (
    FORMAT_VERSION,
    FormatError,
    Superblock,
    encode_superblock,
    newest_superblock,
    superblock_place,
)
from prefetchd.hostinfo import Medium
from prefetchd.journal import Journal
from prefetchd.layout import Layout
from prefetchd.store_place import StoreError, close_all, told
from prefetchd.transfers import operations, refused, transfer

__all__ = ["Store", "StoreError", "in_memory", "plan_superblock"]

_EXTENT_BYTES_MAX = 1 << 30  # one operation carries a whole extent
_FILE_BYTES_MAX = (1 << 63) - 1
_LONGEST = (1 << 63) - 1  # as a superblock's counts are encoded


@dataclass(slots=True)
class Store:
    """An owned store: its folders, and of each its file (they go to a device), its superblock and
    its lock. The first superblock speaks for the whole."""

    directories: tuple[Path, ...]
    superblocks: list[Superblock]
    files: list[File]
    medium: Medium
    locks: list[int]
    """One a file, in order."""
    missing: frozenset[int] = frozenset()
    """Files that are not there; their descriptors are -1."""
    read_only: bool = False
    notes: tuple[str, ...] = ()
    proofs: dict[str, str] = field(default_factory=dict)
    """Of each file, what the device was seen to do with it when the store was opened, in words."""
    guard: threading.RLock = field(default_factory=threading.RLock)
    """Held while any of this is changed or written."""

    @property
    def superblock(self) -> Superblock:
        return self.superblocks[0]

    @property
    def where(self) -> str:
        return str(self.directories[0]) if self.directories else "memory"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those of its places that are folders, and so have a file system."""
        return tuple(place for place in self.directories if place.is_dir())

    def mark(
        self,
        device: StorageDevice,
        arena: Arena,
        *,
        clean: bool,
        journal: tuple[int, int, int] = (0, 0, 0),
        without: Collection[int] = (),
    ) -> None:
        """Write every superblock anew, flush it, read it back and compare. Raises StoreError.

        The copy of the last time stays as it is, so that a torn write costs nothing. `without`:
        files to be left out.
        """
        with self.guard:
            for number, old in enumerate(self.superblocks):
                if number in self.missing or number in without:
                    continue
                ends = journal if number == 0 else (0, 0, 0)
                shape = msgspec.structs.replace(old, clean=clean, epoch=old.epoch + 1, journal=ends)
                self._write_through(device, arena, number, shape)
                self.superblocks[number] = shape
                words = f"written, flushed and read back through {device.name}"
                self.proofs[self.files[number].path] = words

    def named(self, number: int, place: Path) -> dict[str, Any]:
        """What the first superblock is to say with this place as the path `number`, in use; for
        `restate`. Raises StoreError: it is another path of the store, or the names are too long."""
        names = [str(one.absolute()) for one in self.directories]
        names[number] = str(place.absolute())
        if names.count(names[number]) > 1:
            raise StoreError(f"store {self.where} has the path {place} already")
        detached = tuple(other for other in self.superblock.detached if other != number)
        said = {"paths": tuple(names), "detached": detached}
        try:
            # Whatever it has counted to by then: it must not be found too long at the closing.
            counts = {"epoch": _LONGEST, "journal": (_LONGEST,) * 3, "clean": False}
            encode_superblock(msgspec.structs.replace(self.superblock, **said, **counts))
        except FormatError as error:
            raise StoreError(f"store {self.where}: {error}") from error
        return said

    def restate(self, **changes: Any) -> None:
        """Write the first superblock anew, with these fields changed, while others use the device,
        and so without it. The copy of the last time stays. Raises StoreError: closed,
        names too long, or nobody knows whether it has been written. The guard is held."""
        if not self.files:
            raise StoreError(f"store {self.where} is closed")
        shape = msgspec.structs.replace(self.superblock, epoch=self.superblock.epoch + 1, **changes)
        try:
            block = encode_superblock(shape)
        except FormatError as error:
            raise StoreError(f"store {self.where}: {error}") from error
        fd, place = self.files[0].fd, superblock_place(shape)
        with told(Path(self.where)), mmap.mmap(-1, len(block)) as memory:
            memory[:] = block.tobytes()
            os.pwrite(fd, memory, place)
            os.fdatasync(fd)
            memory[:] = bytes(len(block))
            os.preadv(fd, [memory], place)
            if memory[:] != block.tobytes():
                raise StoreError(f"store {self.where}: its superblock reads back different")
        self.superblocks[0] = shape

    def read_through(self, device: StorageDevice, arena: Arena) -> None:
        """Of a store that is only read: read every superblock as its pages will be read. Raises
        StoreError."""
        for number, shape in enumerate(self.superblocks):
            if number in self.missing:
                continue
            where = str(self.directories[number]) if self.directories else self.where
            row = arena[: shape.superblock_bytes].reshape(1, -1)
            ops = operations(device, row, READ, np.zeros(1, np.int64), number)
            result = int(transfer(device, ops)[0])
            if result != row.shape[1]:
                raise StoreError(refused(where, device.name, "reading", row.shape[1], result))
            try:
                found = newest_superblock(row[0]).store_id
            except (FormatError, msgspec.DecodeError):
                found = b""
            if found != shape.store_id:
                raise StoreError(f"store {where}: {device.name} does not read what is there")
            self.proofs[self.files[number].path] = f"read through {device.name}"

    def _write_through(
        self, device: StorageDevice, arena: Arena, number: int, shape: Superblock
    ) -> None:
        block = encode_superblock(shape)
        where = str(self.directories[number]) if self.directories else self.where
        row = arena[: len(block)].reshape(1, -1)
        row[0] = block
        offset = np.array([superblock_place(shape)])
        for kind, what in ((WRITE, "writing"), (SYNC, "flushing"), (READ, "reading")):
            if kind == READ:
                row[:] = 0
            result = int(transfer(device, operations(device, row, kind, offset, number))[0])
            if result != (0 if kind == SYNC else len(block)):
                raise StoreError(refused(where, device.name, what, len(block), result))
        if (row[0] != block).any():
            raise StoreError(
                f"store {where}: a page written through {device.name} reads back different; "
                "the medium or its driver is broken, use another path"
            )

    def mark_clean(
        self,
        device: StorageDevice,
        arena: Arena,
        journal: Journal,
        without: Collection[int] = (),
    ) -> None:
        """The last thing before `release`: everything written is on the medium. `without`: files
        that cannot be written; what was to be said of their blocks is in the journal."""
        try:
            self.mark(device, arena, clean=True, journal=journal.state, without=without)
        except StoreError as error:
            raise StoreError(
                f"store {self.where}: closing it failed, so it is not marked clean; blocks stored "
                f"earlier are where they were, and the next opening reads them ({error})"
            ) from error

    def release(self) -> None:
        """Close the descriptors and the locks without touching the medium."""
        with self.guard:
            close_all([*(file.fd for file in self.files), *self.locks])
            self.files, self.locks = [], []


def plan_superblock(
    layout: Layout,
    blocks: int,
    alignment_bytes: int,
    paths: Sequence[Path] = (),
    *,
    encrypted: bool = False,
) -> Superblock:
    """The first file's superblock of a store for `blocks` blocks of a layout, striped over
    `paths`. `encrypted`: it has room for tags, and lacks its key's check. Raises StoreError if it
    cannot be."""
    shape = Superblock(
        FORMAT_VERSION,
        layout.layers,
        layout.page_bytes,
        layout.slot_bytes(alignment_bytes),
        blocks,
        alignment_bytes,
        layout.fingerprint(),
        secrets.token_bytes(16),
        clean=True,
        stripes=max(1, len(paths)),
        paths=tuple(str(path.absolute()) for path in paths) if len(paths) > 1 else (),
        journal=(1, 0, 0),
        key_check=bytes(16) if encrypted else b"",
    )
    if blocks < shape.stripes:
        least = "one block" if shape.stripes == 1 else f"one block a path ({shape.stripes})"
        raise StoreError(f"a store holds at least {least}, not {blocks}")
    if shape.file_bytes > _FILE_BYTES_MAX:
        raise StoreError(
            f"a store of {blocks} blocks would have files of {shape.file_bytes} bytes, more than a "
            "file can have; ask for fewer blocks"
        )
    if shape.extent_bytes > _EXTENT_BYTES_MAX:
        raise StoreError(
            f"a block of layout {layout.name} takes {shape.extent_bytes} bytes, more than the "
            f"{_EXTENT_BYTES_MAX} of one operation; use fewer tokens a block"
        )
    return shape


def in_memory(layout: Layout, blocks: int) -> Store:
    """A store without a path, for the `memory` device."""
    return of_memory([plan_superblock(layout, blocks, 4096)])


def of_memory(superblocks: list[Superblock]) -> Store:
    """A store whose files a device in memory holds (for tests: `superblocks` as found there)."""
    files = [File(-1, "memory", shape.file_bytes) for shape in superblocks]
    return Store((), superblocks, files, Medium("none", "memory", 1, 1), [])
