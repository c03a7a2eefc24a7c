"""The NVMe tier's file: creating, opening, scanning and closing it.

Decides how a store lives on one path, and tells people what is wrong with it. Which block lies
where is the catalog's; what bytes mean is the format's; moving them is the device's.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import Catalog
from prefetchd.device import READ, SYNC, WRITE, Arena, File, StorageDevice
from prefetchd.format import (
    FORMAT_VERSION,
    Binding,
    FormatError,
    Superblock,
    decode_header,
    decode_superblock,
    encode_superblock,
    namespace_id,
)
from prefetchd.hostinfo import Medium, errno_name, medium_of
from prefetchd.layout import Layout
from prefetchd.model import Mask
from prefetchd.store_folder import StoreError, take_lock, told
from prefetchd.transfers import operations, refused, transfer

__all__ = ["Store", "StoreError", "create", "exists", "in_memory", "open_store", "plan_superblock"]

log = logging.getLogger("prefetchd")

_EXTENTS_NAME = "extents.dat"
_EXTENT_BYTES_MAX = 1 << 30  # one operation carries a whole extent
_FILL_BYTES = 1 << 22
_SILENT = "the device does not answer; see the kernel log, or use another path"

Ids64 = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(slots=True)
class Store:
    """An owned store. `files` go to a device; `load` then reads the catalog through it."""

    directory: Path | None
    superblock: Superblock
    files: list[File]
    medium: Medium
    lock_fd: int = -1

    @property
    def where(self) -> str:
        return str(self.directory) if self.directory else "memory"

    def load(self, device: StorageDevice, arena: Arena, namespace: str, visible: Mask) -> Catalog:
        """Prove that the device writes and reads, mark the store in use, scan its headers.

        `arena` is scratch inside the device's arena, at least one extent long; `visible` (all
        False) is the catalog's from here on. Raises StoreError.
        """
        self._mark(device, arena, clean=False)
        shape = self.superblock
        binding = Binding(namespace_id(namespace), shape.fingerprint, shape.page_bytes)
        catalog = Catalog(shape, binding, visible)
        batch = max(1, min(device.depth, len(arena) // shape.header_bytes))
        for start in range(0, shape.blocks, batch):
            blocks = np.arange(start, min(shape.blocks, start + batch))
            rows = arena[: len(blocks) * shape.header_bytes].reshape(len(blocks), -1)
            offsets = shape.superblock_bytes + blocks * shape.extent_bytes
            whole = self._read_headers(device, rows, offsets)
            for block, row in zip(blocks[whole].tolist(), rows[whole], strict=True):
                header = decode_header(row, shape)
                if header is not None:
                    catalog.load(block, header)
            for block in blocks[~whole].tolist():
                catalog.occupy(block)
        return catalog

    def _read_headers(
        self, device: StorageDevice, rows: NDArray[np.uint8], offsets: Ids64
    ) -> NDArray[np.bool_]:
        """Which rows were read as a whole; what fails is tried once more, and then said."""
        ops = operations(device, rows, READ, offsets)
        whole = np.zeros(len(rows), np.bool_)
        for _ in range(2):
            left = np.flatnonzero(~whole)
            again = ops[left]
            again["tag"] = np.arange(len(left))
            results = transfer(device, again)
            whole[left] = results == rows.shape[1]
            if (results == -errno.ETIMEDOUT).any():
                reason = errno_name(errno.ETIMEDOUT)
                raise StoreError(f"store {self.where}: reading the headers: {reason}; {_SILENT}")
        if not whole.all():
            reason = errno_name(int(results.min())) if results.min() < 0 else "short read"
            log.warning(
                "store %s: %d headers cannot be read: %s; what lies there is neither found nor "
                "written over",
                self.where,
                np.count_nonzero(~whole),
                reason,
            )
        return whole

    def _mark(self, device: StorageDevice, arena: Arena, *, clean: bool) -> None:
        """Write the superblock, flush it, read it back and compare."""
        self.superblock = msgspec.structs.replace(self.superblock, clean=clean)
        block = encode_superblock(self.superblock)
        row = arena[: len(block)].reshape(1, -1)
        row[0] = block
        offset = np.zeros(1, np.int64)
        for kind, what in ((WRITE, "writing"), (SYNC, "flushing"), (READ, "reading")):
            if kind == READ:
                row[:] = 0
            result = int(transfer(device, operations(device, row, kind, offset))[0])
            if result != (0 if kind == SYNC else len(block)):
                raise StoreError(refused(self.where, device.name, what, len(block), result))
        if (row[0] != block).any():
            raise StoreError(
                f"store {self.where}: a page written through {device.name} reads back different; "
                "the medium or its driver is broken, use another path"
            )

    def mark_clean(self, device: StorageDevice, arena: Arena) -> None:
        """The last thing before `release`: everything written is on the medium."""
        try:
            self._mark(device, arena, clean=True)
        except StoreError as error:
            raise StoreError(
                f"store {self.where}: closing it failed, so it is not marked clean; blocks stored "
                f"earlier are where they were, and the next opening reads them ({error})"
            ) from error

    def release(self) -> None:
        """Close the descriptors and the lock without touching the medium."""
        for file in self.files:
            if file.fd >= 0:
                os.close(file.fd)
        self.files = []
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def plan_superblock(layout: Layout, blocks: int, alignment_bytes: int) -> Superblock:
    """The shape of a store for `blocks` blocks of a layout. Raises StoreError if it cannot be."""
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
    )
    if blocks < 1:
        raise StoreError(f"a store holds at least one block, not {blocks}")
    if shape.extent_bytes > _EXTENT_BYTES_MAX:
        raise StoreError(
            f"a block of layout {layout.name} takes {shape.extent_bytes} bytes, more than the "
            f"{_EXTENT_BYTES_MAX} of one operation; use fewer tokens a block"
        )
    return shape


def in_memory(layout: Layout, blocks: int) -> Store:
    """A store without a path, for the `memory` device."""
    shape = plan_superblock(layout, blocks, 4096)
    file = File(-1, "memory", shape.file_bytes)
    return Store(None, shape, [file], Medium("none", "memory", 1, 1))


def create(
    directory: Path, layout: Layout, blocks: int, *, fill: bool, progress: Progress | None = None
) -> None:
    """Make a store: preallocated, and written once if `fill`, so that reads touch the medium.

    Raises StoreError: no such parent, no space, not writable, a store is there already.
    """
    path = directory / _EXTENTS_NAME
    with told(directory):
        directory.mkdir(exist_ok=True)
        if path.exists():
            raise StoreError(f"store {directory} exists already; open it, or erase the folder")
        lock_fd = take_lock(directory)
        try:
            _write_new(path, layout, blocks, fill=fill, progress=progress)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(lock_fd)


def _write_new(
    path: Path, layout: Layout, blocks: int, *, fill: bool, progress: Progress | None
) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        medium = medium_of(fd, str(path))
        shape = plan_superblock(layout, blocks, medium.alignment_bytes)
        os.posix_fallocate(fd, 0, shape.file_bytes)
        with mmap.mmap(-1, max(_FILL_BYTES, shape.superblock_bytes)) as memory:
            if fill:
                _fill(fd, memory, shape.file_bytes, progress)
            memory[: shape.superblock_bytes] = encode_superblock(shape).tobytes()
            os.pwrite(fd, memoryview(memory)[: shape.superblock_bytes], 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _fill(fd: int, memory: mmap.mmap, size: int, progress: Progress | None) -> None:
    done = 0
    while done < size:
        with memoryview(memory)[: min(_FILL_BYTES, size - done)] as chunk:
            done += os.pwrite(fd, chunk, done)
        if progress:
            progress(done, size)


def open_store(directory: Path, layout: Layout | None = None) -> Store:
    """Take ownership of a store and read its superblock.

    Raises StoreError: missing, foreign, damaged, newer, of another layout, cut short, owned by
    another process, not permitted, O_DIRECT not offered.
    """
    with told(directory):
        path = directory / _EXTENTS_NAME
        if not path.exists():
            raise StoreError(f"there is no store in {directory}; create one first")
        lock_fd = take_lock(directory)
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
            shape = _read_superblock(fd, directory, layout)
            medium = medium_of(fd, str(path))
            _check_alignment(directory, shape, medium)
            file = File(fd, str(path), shape.file_bytes, medium.alignment_bytes)
            return Store(directory, shape, [file], medium, lock_fd)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            os.close(lock_fd)
            raise


def exists(directory: Path) -> bool:
    return (directory / _EXTENTS_NAME).exists()


def _read_superblock(fd: int, directory: Path, layout: Layout | None) -> Superblock:
    with mmap.mmap(-1, 1 << 16) as memory:
        length = os.preadv(fd, [memory], 0)
        block = np.frombuffer(memory[:length], np.uint8)
    try:
        shape = decode_superblock(block)
    except (FormatError, msgspec.DecodeError) as error:
        raise StoreError(f"{directory} cannot be opened as a store: {error}") from error
    if layout is not None and shape.fingerprint != layout.fingerprint():
        raise StoreError(
            f"store {directory} was made for another layout: {shape.layers} pages of "
            f"{shape.page_bytes} bytes a block (fingerprint {shape.fingerprint.hex()[:8]}), asked "
            f"for {layout.name} with {layout.layers} pages of {layout.page_bytes} bytes "
            f"({layout.fingerprint().hex()[:8]}); name the right layout or use another folder"
        )
    size = os.fstat(fd).st_size
    if size < shape.file_bytes:
        raise StoreError(
            f"store {directory} is cut short: {size} of {shape.file_bytes} bytes are there; "
            "restore the file or erase the folder"
        )
    return shape


def _check_alignment(directory: Path, shape: Superblock, medium: Medium) -> None:
    if shape.alignment_bytes % medium.alignment_bytes:
        raise StoreError(
            f"store {directory} is aligned to {shape.alignment_bytes} bytes, but here the device "
            f"needs {medium.alignment_bytes}; create the store anew on this device"
        )
