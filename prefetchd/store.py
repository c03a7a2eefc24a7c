"""The NVMe tier's files: opening, marking and closing them.

Decides how a store lives on one or several paths, and tells people what is wrong with it. Which
block lies where is the catalog's; what bytes mean is the format's; what is found again after a
close or a crash is the recovery's; moving bytes is the device's.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from prefetchd.hostinfo import Medium, medium_of
from prefetchd.journal import Journal
from prefetchd.layout import Layout
from prefetchd.store_folder import StoreError, close_all, take_lock, told
from prefetchd.transfers import operations, refused, transfer

__all__ = ["Store", "StoreError", "exists", "in_memory", "open_store", "plan_superblock"]

EXTENTS_NAME = "extents.dat"
_EXTENT_BYTES_MAX = 1 << 30  # one operation carries a whole extent
_FRONT_BYTES = 1 << 18  # both superblocks, at any alignment


@dataclass(slots=True)
class Store:
    """An owned store: its folders, and of each its file (they go to a device), its superblock and
    its lock. The first superblock speaks for the whole."""

    directories: tuple[Path, ...]
    superblocks: list[Superblock]
    files: list[File]
    medium: Medium
    locks: list[int]
    missing: frozenset[int] = frozenset()
    """Files that are not there; their descriptors are -1."""

    @property
    def superblock(self) -> Superblock:
        return self.superblocks[0]

    @property
    def where(self) -> str:
        return str(self.directories[0]) if self.directories else "memory"

    def mark(
        self,
        device: StorageDevice,
        arena: Arena,
        *,
        clean: bool,
        journal: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Write every superblock anew, flush it, read it back and compare. Raises StoreError.

        The copy of the last time stays as it is, so that a torn write costs nothing.
        """
        for number, old in enumerate(self.superblocks):
            shape = msgspec.structs.replace(
                old, clean=clean, epoch=old.epoch + 1, journal=journal if number == 0 else (0, 0, 0)
            )
            self._write_through(device, arena, number, shape)
            self.superblocks[number] = shape

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

    def mark_clean(self, device: StorageDevice, arena: Arena, journal: Journal) -> None:
        """The last thing before `release`: everything written is on the medium."""
        try:
            self.mark(device, arena, clean=True, journal=journal.state)
        except StoreError as error:
            raise StoreError(
                f"store {self.where}: closing it failed, so it is not marked clean; blocks stored "
                f"earlier are where they were, and the next opening reads them ({error})"
            ) from error

    def release(self) -> None:
        """Close the descriptors and the locks without touching the medium."""
        close_all([*(file.fd for file in self.files), *self.locks])
        self.files, self.locks = [], []


def plan_superblock(
    layout: Layout, blocks: int, alignment_bytes: int, paths: Sequence[Path] = ()
) -> Superblock:
    """The first file's superblock of a store for `blocks` blocks of a layout, striped over
    `paths`. Raises StoreError if it cannot be."""
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
    )
    if blocks < shape.stripes:
        least = "one block" if shape.stripes == 1 else f"one block a path ({shape.stripes})"
        raise StoreError(f"a store holds at least {least}, not {blocks}")
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


def open_store(directory: Path, layout: Layout | None = None) -> Store:
    """Take ownership of a store and read its superblocks.

    Raises StoreError: missing, foreign, damaged, newer, of another layout, cut short, owned by
    another process, not permitted, O_DIRECT not offered; or one of its files swapped.
    """
    files: list[File] = []
    locks: list[int] = []
    try:
        first, medium = _open_file(directory, files, locks)
        if first.stripe:
            raise StoreError(
                f"{directory} holds part {first.stripe + 1} of {first.stripes} of a store; open "
                "the folder of its first part"
            )
        _check_layout(directory, first, layout)
        superblocks = [first]
        folders = [directory, *map(Path, first.paths[1:])]
        for number, folder in enumerate(folders[1:], 1):
            part, _ = _open_file(folder, files, locks)
            if (part.store_id, part.stripe) != (first.store_id, number):
                raise StoreError(
                    f"store {directory}: {folder} should hold its part {number + 1}, but holds "
                    f"{_described(part, first)}; put the right folder in its place"
                )
            superblocks.append(part)
        return Store(tuple(folders), superblocks, files, medium, locks)
    except BaseException:
        close_all([*(file.fd for file in files), *locks])
        raise


def _described(part: Superblock, first: Superblock) -> str:
    if part.store_id != first.store_id:
        return "a part of another store"
    return f"its part {part.stripe + 1}"


def _open_file(directory: Path, files: list[File], locks: list[int]) -> tuple[Superblock, Medium]:
    """What is opened is appended to `files` and `locks`, also if this raises."""
    with told(directory):
        path = directory / EXTENTS_NAME
        if not path.exists():
            raise StoreError(f"there is no store in {directory}; create one first")
        locks.append(take_lock(directory))
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        files.append(File(fd, str(path), 0))
        shape = _read_superblock(fd, directory)
        medium = medium_of(fd, str(path))
        _check_alignment(directory, shape, medium)
        files[-1] = File(fd, str(path), shape.file_bytes, medium.alignment_bytes)
        return shape, medium


def exists(directory: Path) -> bool:
    return (directory / EXTENTS_NAME).exists()


def _read_superblock(fd: int, directory: Path) -> Superblock:
    with mmap.mmap(-1, _FRONT_BYTES) as memory:
        length = os.preadv(fd, [memory], 0)
        front = np.frombuffer(memory[:length], np.uint8)
    try:
        shape = newest_superblock(front)
    except (FormatError, msgspec.DecodeError) as error:
        raise StoreError(f"{directory} cannot be opened as a store: {error}") from error
    size = os.fstat(fd).st_size
    if size < shape.file_bytes:
        raise StoreError(
            f"store {directory} is cut short: {size} of {shape.file_bytes} bytes are there; "
            "restore the file or erase the folder"
        )
    return shape


def _check_layout(directory: Path, shape: Superblock, layout: Layout | None) -> None:
    if layout is not None and shape.fingerprint != layout.fingerprint():
        raise StoreError(
            f"store {directory} was made for another layout: {shape.layers} pages of "
            f"{shape.page_bytes} bytes a block (fingerprint {shape.fingerprint.hex()[:8]}), asked "
            f"for {layout.name} with {layout.layers} pages of {layout.page_bytes} bytes "
            f"({layout.fingerprint().hex()[:8]}); name the right layout or use another folder"
        )


def _check_alignment(directory: Path, shape: Superblock, medium: Medium) -> None:
    if shape.alignment_bytes % medium.alignment_bytes:
        raise StoreError(
            f"store {directory} is aligned to {shape.alignment_bytes} bytes, but here the device "
            f"needs {medium.alignment_bytes}; create the store anew on this device"
        )
