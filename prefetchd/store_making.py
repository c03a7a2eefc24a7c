"""Making a store: one preallocated file in each of its folders.

Decides what a new file holds and what is left behind when it cannot be made: nothing. Refuses to
know how a store is used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from prefetchd.format import FormatError, Superblock, encode_superblock, superblock_place
from prefetchd.hostinfo import medium_of
from prefetchd.journal import Journal
from prefetchd.layout import Layout
from prefetchd.store import EXTENTS_NAME, exists, plan_superblock
from prefetchd.store_folder import StoreError, close_all, take_lock, told

_FILL_BYTES = 1 << 22

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def create(
    directory: Path,
    layout: Layout,
    blocks: int,
    *,
    fill: bool,
    paths: Sequence[Path] = (),
    progress: Progress | None = None,
) -> None:
    """Make a store: preallocated, and written once if `fill`, so that reads touch the medium.

    `paths`: further folders, best on other drives; block b lies in folder b % (1 + len(paths)).
    Raises StoreError: no such parent, no space, not writable, a store is there already.
    """
    folders = [directory, *paths]
    if len({path.absolute() for path in folders}) < len(folders):
        raise StoreError(f"store {directory}: a folder is named twice; name each drive once")
    locks: list[int] = []
    made: list[Path] = []
    try:
        for folder in folders:
            with told(folder):
                folder.mkdir(exist_ok=True)
                if exists(folder):
                    raise StoreError(f"store {folder} exists already; open it, or erase the folder")
                locks.append(take_lock(folder))
        shape = plan_superblock(layout, blocks, _alignment_of(folders), folders)
        for number, folder in enumerate(folders):
            with told(folder):
                made.append(folder / EXTENTS_NAME)
                _write_new(made[-1], shape.of_stripe(number), fill=fill, progress=progress)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    finally:
        close_all(locks)


def _alignment_of(folders: Sequence[Path]) -> int:
    """What direct access to a file in each of these folders keeps to."""
    largest = 0
    for folder in folders:
        path = folder / EXTENTS_NAME
        with told(folder):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            try:
                largest = max(largest, medium_of(fd, str(path)).alignment_bytes)
            finally:
                os.close(fd)
                path.unlink()
    return largest


def _write_new(path: Path, shape: Superblock, *, fill: bool, progress: Progress | None) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, shape.file_bytes)
        with mmap.mmap(-1, max(_FILL_BYTES, shape.superblock_bytes)) as memory:
            # The journal is filled in any case: a commit must not wait for the file system's own.
            filled = 0 if fill else shape.journal_offset
            _fill(fd, memory, filled, shape.file_bytes, progress if fill else None)
            if shape.stripe == 0:
                head = Journal(shape, *shape.journal).head()
                _write(fd, memory, head.data.tobytes(), head.offset)
            _write(fd, memory, encode_superblock(shape).tobytes(), superblock_place(shape))
        os.fsync(fd)
    except FormatError as error:
        raise StoreError(f"store {path.parent} cannot be made: {error}") from error
    finally:
        os.close(fd)


def _write(fd: int, memory: mmap.mmap, data: bytes, offset: int) -> None:
    memory[: len(data)] = data
    with memoryview(memory)[: len(data)] as chunk:
        os.pwrite(fd, chunk, offset)


def _fill(fd: int, memory: mmap.mmap, start: int, size: int, progress: Progress | None) -> None:
    done = start
    while done < size:
        with memoryview(memory)[: min(_FILL_BYTES, size - done)] as chunk:
            done += os.pwrite(fd, chunk, done)
        if progress:
            progress(done, size)
