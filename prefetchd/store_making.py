"""Making a store: one preallocated file in each of its folders, or a device of its own.

Decides what a new file holds and what is left behind when it cannot be made: nothing. Refuses to
know how a store is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from prefetchd import key_file as key_files
from prefetchd.format import FormatError, Superblock, encode_superblock, superblock_place
from prefetchd.hostinfo import medium_of
from prefetchd.journal import Journal
from prefetchd.layout import Layout
from prefetchd.raw import check_free, size_bytes
from prefetchd.store import plan_superblock
from prefetchd.store_opening import exists, is_foreign
from prefetchd.store_place import (
    LOCK_NAME,
    StoreError,
    close_all,
    data_path,
    is_raw,
    open_data,
    take_lock,
    told,
)

_FILL_BYTES = 1 << 22

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(slots=True)
class _Place:
    """Where a part goes: `fd` is -1 until there is a file. `made`, `folder_made`, `lock_made`: the
    file, folder and lock are ours to remove."""

    path: Path
    data: Path
    fd: int = -1
    lock: int = -1
    made: bool = False
    folder_made: bool = False
    lock_made: bool = False

    def create(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        self.fd = os.open(self.data, flags, 0o600)
        self.made = True

    def make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()
            self.folder_made = True

    def refuse_foreign(self) -> None:
        locks: list[int] = []
        try:
            if is_foreign(self.path, self.data, locks):
                raise StoreError(
                    f"{self.data} is in the way and is not a prefetchd store; use another folder"
                )
        finally:
            close_all(locks)

    def take(self) -> None:
        """Own the place, and know whether its lock was there before."""
        there = is_raw(self.path) or (self.path / LOCK_NAME).exists()
        self.lock = take_lock(self.path)
        self.lock_made = not there

    def undo(self) -> None:
        """Remove what was made here, and nothing else; its lock is still held."""
        if self.made:
            self.data.unlink(missing_ok=True)
        if self.lock_made:
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self.folder_made:
            with contextlib.suppress(OSError):  # somebody put something there meanwhile
                self.path.rmdir()


def create(
    directory: Path,
    layout: Layout,
    blocks: int | None,
    *,
    fill: bool,
    paths: Sequence[Path] = (),
    size: int | None = None,
    raw: bool = False,
    force: bool = False,
    key_file: Path | None = None,
    progress: Progress | None = None,
) -> Superblock:
    """Make a store: preallocated, and written once if `fill`, so that reads touch the medium.

    `blocks`, or as many as `size` bytes of all files together hold. `paths`: further folders, best
    on other drives; block b lies in folder b % (1 + len(paths)). `raw`: each of them may be a block
    device (or a file in its stead) that holds its part directly; `force`: even if something else
    lies there. `key_file`: encrypt it; the file is made, and must not be there. Raises StoreError:
    no such parent, no space, not writable, a store is there already.
    """
    folders = [directory, *paths]
    if len({path.absolute() for path in folders}) < len(folders):
        raise StoreError(f"store {directory}: a folder is named twice; name each drive once")
    key_files.check_place(key_file, folders)
    plan = partial(plan_superblock, layout, encrypted=key_file is not None)
    places: list[_Place] = []
    keyed = False
    try:
        for folder in folders:
            with told(folder):
                places.append(_Place(folder, data_path(folder, raw=raw)))
                _claim(places[-1], force=force)
        alignment = max(map(_alignment_of, places))
        if blocks is None:
            blocks = _blocks_for(plan, size or 0, alignment, folders)
        shape = plan(blocks, alignment, folders)
        if key_file is not None:
            check = key_files.make(key_file, shape.store_id)
            keyed, shape = True, msgspec.structs.replace(shape, key_check=check)
        for number, place in enumerate(places):
            with told(place.path):
                _write_new(place, shape.of_stripe(number), fill=fill, progress=progress)
    except BaseException:
        for place in reversed(places):  # one may lie in another's folder
            place.undo()
        if keyed and key_file is not None:
            key_files.destroy(key_file)
        raise
    finally:
        close_all([fd for place in places for fd in (place.fd, place.lock)])
    return shape


def create_part(
    folder: Path,
    shape: Superblock,
    *,
    fill: bool,
    raw: bool,
    force: bool,
    progress: Progress | None = None,
) -> None:
    """Make one part of a store that is there, `shape` being its superblock. Raises StoreError."""
    place = _Place(folder, data_path(folder, raw=raw))
    try:
        with told(folder):
            _claim(place, force=force)
            if shape.alignment_bytes % (needed := _alignment_of(place)):
                raise StoreError(
                    f"{folder} needs an alignment of {needed} bytes, the store has "
                    f"{shape.alignment_bytes}; use another drive"
                )
            _write_new(place, shape, fill=fill, progress=progress)
    except BaseException:
        place.undo()
        raise
    finally:
        close_all([place.fd, place.lock])


def _blocks_for(
    plan: Callable[..., Superblock], size: int, alignment: int, folders: Sequence[Path]
) -> int:
    """How many blocks a store of `size` bytes has. Raises StoreError if it has none."""
    count = len(folders)
    low, high = count, max(count, size // plan(count, alignment).extent_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if plan(middle, alignment, folders).total_bytes <= size:
            low = middle
        else:
            high = middle - 1
    least = plan(low, alignment, folders).total_bytes
    if least > size:
        raise StoreError(f"{size} bytes hold no store of this layout; it takes at least {least}")
    return low


def _claim(place: _Place, *, force: bool) -> None:
    """Make sure that nobody else has anything there."""
    if is_raw(place.path):
        check_free(place.path, force=force)
    else:
        place.make_folder()
        if exists(place.path):
            place.refuse_foreign()
            raise StoreError(f"store {place.path} exists already; open it, or erase the folder")
    place.take()
    if is_raw(place.path):
        place.fd = open_data(place.path, raw=True, read_only=False)


def _alignment_of(place: _Place) -> int:
    """What direct access there keeps to."""
    with told(place.path):
        if place.fd < 0:
            place.create()
        return medium_of(place.fd, str(place.data)).alignment_bytes


def _write_new(place: _Place, shape: Superblock, *, fill: bool, progress: Progress | None) -> None:
    fd = place.fd
    try:
        if place.made:
            os.posix_fallocate(fd, 0, shape.file_bytes)
        elif size_bytes(fd) < shape.file_bytes:
            raise StoreError(
                f"{place.path} has {size_bytes(fd)} bytes, the store needs {shape.file_bytes} "
                "there; ask for fewer blocks"
            )
        with mmap.mmap(-1, max(_FILL_BYTES, shape.superblock_bytes)) as memory:
            # The journal is filled in any case: a commit must not wait for the file system's own.
            filled = 0 if fill else shape.journal_offset
            _fill(fd, memory, filled, shape.file_bytes, progress if fill else None)
            if shape.stripe == 0:
                head = Journal(shape, *shape.journal).head()
                _write(fd, memory, head.data.tobytes(), head.offset)
            # What an earlier store left must not be taken for the other copy.
            _write(fd, memory, bytes(shape.superblock_bytes), 0)
            _write(fd, memory, encode_superblock(shape).tobytes(), superblock_place(shape))
        os.fsync(fd)
        if place.made:
            _sync_names(place.path)
    except FormatError as error:
        raise StoreError(f"store {place.path} cannot be made: {error}") from error


def _sync_names(folder: Path) -> None:
    """A power failure leaves the new file where it was made."""
    for named in (folder, folder.absolute().parent):
        with contextlib.suppress(OSError):  # some file systems refuse it
            fd = os.open(named, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
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
