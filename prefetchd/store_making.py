"""Making a store: one preallocated file in each of its folders, or a device of its own.

Decides what a new file holds and what is left behind when it cannot be made: nothing. A file gets
its name once it is whole, the first part's last; what a process that was killed left under another
name is cleared by the next that makes a store there. Refuses to know how a store is used.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from prefetchd import key_file as key_files
from prefetchd.format import FormatError, Superblock, encode_superblock, superblock_place
from prefetchd.hostinfo import medium_of
from prefetchd.journal import Journal
from prefetchd.layout import Layout
from prefetchd.new_part import NewPart
from prefetchd.raw import size_bytes
from prefetchd.store import plan_superblock
from prefetchd.store_opening import begun_store
from prefetchd.store_place import StoreError, close_all, data_path, sync_names, told

_FILL_BYTES = 1 << 22

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


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
    if len({os.path.realpath(path) for path in folders}) < len(folders):
        raise StoreError(f"store {directory}: a folder is named twice; name each drive once")
    key_files.check_place(key_file, folders)
    plan = partial(plan_superblock, layout, encrypted=key_file is not None)
    places: list[NewPart] = []
    keyed = False
    try:
        begun = _claim(places, folders, raw=raw, force=force)
        if key_file is not None and begun and key_files.is_begun(key_file, begun):
            key_files.destroy(key_file)
        alignment = max(map(_alignment_of, places))
        if blocks is None:
            blocks = _blocks_for(plan, size or 0, alignment, folders)
        shape = plan(blocks, alignment, folders)
        with told(directory):
            _mark(places[0], shape)
        if key_file is not None:
            check = key_files.make(key_file, shape.store_id)
            keyed, shape = True, msgspec.structs.replace(shape, key_check=check)
        for number, place in reversed([*enumerate(places)]):
            with told(place.path):
                _write_new(place, shape.of_stripe(number), fill=fill, progress=progress)
        for place in reversed(places):  # without the first one there is no store
            with told(place.path):
                place.name()
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
    place = NewPart(folder, data_path(folder, raw=raw))
    try:
        with told(folder):
            place.claim(force=force)
            if shape.alignment_bytes % (needed := _alignment_of(place)):
                raise StoreError(
                    f"{folder} needs an alignment of {needed} bytes, the store has "
                    f"{shape.alignment_bytes}; use another drive"
                )
            _write_new(place, shape, fill=fill, progress=progress)
            place.name()
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


def _claim(places: list[NewPart], folders: Sequence[Path], *, raw: bool, force: bool) -> bytes:
    """Take them all; those taken are appended to `places` also if this raises. The id of a store
    that somebody began there and did not end, or nothing."""
    begun = b""
    for folder in folders:
        with told(folder):
            places.append(NewPart(folder, data_path(folder, raw=raw)))
            places[-1].claim(force=force, begun=begun)
            begun = begun or begun_store(folders[0])
    return begun


def _mark(place: NewPart, shape: Superblock) -> None:
    """Say which store is begun, on the medium before a key or another part is: whoever comes after
    a kill knows by it what is left of this one."""
    if place.made:
        encoded = _encoded(place, shape)
        with mmap.mmap(-1, shape.superblock_bytes) as memory:
            _write(place.fd, memory, encoded, superblock_place(shape))
        os.fsync(place.fd)
        sync_names(place.path)


def _alignment_of(place: NewPart) -> int:
    """What direct access there keeps to."""
    with told(place.path):
        if place.fd < 0:
            place.create()
        return medium_of(place.fd, str(place.file)).alignment_bytes


def _encoded(place: NewPart, shape: Superblock) -> bytes:
    try:
        return encode_superblock(shape).tobytes()
    except FormatError as error:
        raise StoreError(f"store {place.path} cannot be made: {error}") from error


def _write_new(place: NewPart, shape: Superblock, *, fill: bool, progress: Progress | None) -> None:
    fd, encoded = place.fd, _encoded(place, shape)
    if place.made:
        os.posix_fallocate(fd, 0, shape.file_bytes)
    elif size_bytes(fd) < shape.file_bytes:
        raise StoreError(
            f"{place.path} has {size_bytes(fd)} bytes, the store needs {shape.file_bytes} "
            "there; ask for fewer blocks"
        )
    with mmap.mmap(-1, max(_FILL_BYTES, shape.superblock_bytes)) as memory:
        # The journal is filled in any case: a commit must not wait for the file system's own. In
        # front of it a new file has nothing but what says which store is begun.
        first = shape.superblock_bytes if place.made else 0
        filled = first if fill else shape.journal_offset
        _fill(fd, memory, filled, shape.file_bytes, progress if fill else None)
        if shape.stripe == 0:
            head = Journal(shape, *shape.journal).head()
            _write(fd, memory, head.data.tobytes(), head.offset)
        if not place.made:  # what an earlier store left must not be taken for the other copy
            _write(fd, memory, bytes(shape.superblock_bytes), 0)
        _write(fd, memory, encoded, superblock_place(shape))
    os.fsync(fd)


def _write(fd: int, memory: mmap.mmap, data: bytes, offset: int) -> None:
    memory[: len(data)] = data
    with memoryview(memory)[: len(data)] as chunk:
        if os.pwrite(fd, chunk, offset) != len(data):
            raise OSError(errno.EIO, "short write")


def _fill(fd: int, memory: mmap.mmap, start: int, size: int, progress: Progress | None) -> None:
    done = start
    while done < size:
        with memoryview(memory)[: min(_FILL_BYTES, size - done)] as chunk:
            done += os.pwrite(fd, chunk, done)
        if progress:
            progress(done, size)
