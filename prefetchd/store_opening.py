"""Opening a store: its parts found, checked, locked, and what is wrong with them told to people.

Decides what is good enough to be opened, and how: to be written, only to be read, or without some
of its paths. Refuses to know what lies in it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from prefetchd.device import File
from prefetchd.format import COPY_PLACES, MAGIC, FormatError, Superblock, newest_superblock
from prefetchd.hostinfo import Medium, medium_of
from prefetchd.layout import Layout
from prefetchd.raw import size_bytes
from prefetchd.store import Store
from prefetchd.store_place import (
    LOCK_NAME,
    MisfitError,
    StoreError,
    close_all,
    data_path,
    is_raw,
    making_path,
    open_data,
    take_lock,
    there,
    told,
)

_FRONT_BYTES = 1 << 18  # both superblocks, at any alignment


@dataclass(frozen=True, slots=True)
class Opening:
    """How a store is to be opened. `read_only`: nothing is written, not even that it is in use;
    other readers may have it open too. `allow_missing_paths`: without those of its paths that
    cannot be had, the first excepted. `raw`: a path may be a device that holds it directly.
    `key_file`: of an encrypted one, whose pages are to be read."""

    read_only: bool = False
    allow_missing_paths: bool = False
    raw: bool = False
    key_file: Path | None = None


class _DetachedError(StoreError):
    """A path is away on purpose."""


def open_store(
    directory: Path, layout: Layout | None = None, opening: Opening | None = None
) -> Store:
    """Take ownership of a store and read its superblocks.

    Raises StoreError: missing, foreign, damaged, newer, of another layout, cut short, owned by
    another process, not permitted, O_DIRECT not offered; or one of its files swapped or missing.
    """
    opening = opening or Opening()
    files: list[File] = []
    locks: list[int] = []
    try:
        first, medium = _open_file(directory, opening, files, locks)
        if first.stripe:
            raise StoreError(
                f"{directory} holds part {first.stripe + 1} of {first.stripes} of a store; open "
                "the folder of its first part"
            )
        _check_layout(directory, first, layout)
        superblocks, media = [first], [medium]
        folders = [directory, *map(Path, first.paths[1:])]
        notes: list[str] = []
        missing: set[int] = set()
        for number, folder in enumerate(folders[1:], 1):
            part = first.of_stripe(number)
            try:
                if number in first.detached:
                    raise _DetachedError(f"{folder} is detached: attach a drive in its place")
                part, medium = _open_file(folder, opening, files, locks, remedy="")
                media.append(medium)
            except StoreError as error:
                notes.append(_without(directory, number, error, opening))
                missing.add(number)
                _make_absent(files, locks, number, folder, part)
            if (part.store_id, part.stripe) != (first.store_id, number):
                raise StoreError(
                    f"store {directory}: {folder} should hold its part {number + 1}, but holds "
                    f"{_described(part, first)}; put the right folder in its place"
                )
            superblocks.append(part)
        gone = frozenset(missing)
        return Store(
            tuple(folders),
            superblocks,
            files,
            Medium.together(media),
            locks,
            gone,
            opening.read_only,
            tuple(notes),
        )
    except BaseException:
        close_all([*(file.fd for file in files), *locks])
        raise


def _without(directory: Path, number: int, error: StoreError, opening: Opening) -> str:
    """What is said of a path that is left out. Raises StoreError if that is not allowed."""
    if isinstance(error, _DetachedError):
        return f"opened without part {number + 1}, which is empty: {error}"
    if not opening.allow_missing_paths:
        raise StoreError(
            f"store {directory}: its part {number + 1} cannot be had: {error}; put it back, or "
            "open the store without it: allow_missing_paths=True"
        ) from error
    return f"opened without part {number + 1}, whose blocks are misses: {error}"


def _make_absent(
    files: list[File], locks: list[int], number: int, folder: Path, part: Superblock
) -> None:
    """A file in its place that no device can use."""
    close_all([*(file.fd for file in files[number:]), *locks[number:]])
    files[number:] = [File(-1, str(folder), part.file_bytes)]
    locks[number:] = [-1]


def open_part(place: Path, *, raw: bool) -> tuple[File, Superblock, int]:
    """One part of a store, to be written: its file, its superblock and its lock. Raises
    StoreError."""
    files: list[File] = []
    locks: list[int] = []
    try:
        shape, _ = _open_file(place, Opening(raw=raw), files, locks, remedy="")
    except BaseException:
        close_all([*(file.fd for file in files), *locks])
        raise
    return files[0], shape, locks[0]


def _described(part: Superblock, first: Superblock) -> str:
    if part.store_id != first.store_id:
        return "a part of another store"
    return f"its part {part.stripe + 1}"


def _open_file(
    place: Path,
    opening: Opening,
    files: list[File],
    locks: list[int],
    remedy: str = "; create one first",
) -> tuple[Superblock, Medium]:
    """What is opened is appended to `files` and `locks`, also if this raises. `remedy`: said where
    nothing is."""
    with told(place, opening=not opening.read_only):
        if place.is_file() and not opening.raw and is_foreign(place, place, locks):
            raise StoreError(f"{place} is a file and is not a prefetchd store; name its folder")
        path = data_path(place, raw=opening.raw)
        if not there(path):
            raise StoreError(_absent(place, remedy, locks))
        if is_foreign(place, path, locks):
            raise StoreError(
                f"{place} is not a prefetchd store: {path} does not begin as one; use another path"
            )
        locks.append(take_lock(place, shared=opening.read_only))
        fd = open_data(place, raw=opening.raw, read_only=opening.read_only)
        files.append(File(fd, str(path), 0))
        shape = _read_superblock(fd, place)
        medium = medium_of(fd, str(path))
        _check_alignment(place, shape, medium)
        files[-1] = File(fd, str(path), shape.file_bytes, medium.alignment_bytes)
        return shape, medium


def _absent(place: Path, remedy: str, locks: list[int]) -> str:
    if not is_unfinished(place):
        return f"there is no store in {place}{remedy}"
    locks.append(take_lock(place, shared=True))  # raises StoreError while it is made
    return (
        f"there is no store in {place}: making one was begun and did not end; make it again, or "
        "erase what is left"
    )


def superblock_of(
    place: Path, opening: Opening, *, remedy: str = "; create one first"
) -> Superblock:
    """Of a store that nobody has open for writing. Raises StoreError."""
    files: list[File] = []
    locks: list[int] = []
    try:
        return _open_file(place, opening, files, locks, remedy)[0]
    finally:
        close_all([*(file.fd for file in files), *locks])


def peek(place: Path, *, raw: bool) -> Superblock:
    """The superblock of a store, even while somebody else has it open. Raises StoreError."""
    with told(place):
        fd = open_data(place, raw=raw, read_only=True)
        try:
            return _read_superblock(fd, place)
        finally:
            os.close(fd)


def exists(place: Path, *, raw: bool = False) -> bool:
    """Whether a store seems to be there."""
    with told(place):
        path = data_path(place, raw=raw)
        if path != place:
            return there(path)
        return _begins_as_store(path)


def is_unfinished(place: Path) -> bool:
    """Whether a store is being made there, or was until its process was killed."""
    with told(place):
        return not is_raw(place) and there(making_path(place)) and not exists(place)


def begun_store(place: Path) -> bytes:
    """The id of the store that is unfinished there; empty if none is, or nothing says which."""
    if not is_unfinished(place):
        return b""
    with open(making_path(place), "rb") as data:
        front = np.frombuffer(data.read(_FRONT_BYTES), np.uint8)
    try:
        return newest_superblock(front).store_id
    except (FormatError, msgspec.DecodeError):
        return b""


def _begins_as_store(path: Path) -> bool:
    """Whether any copy of a superblock is there: the first one may be damaged."""
    with open(path, "rb", buffering=0) as data:
        return any(os.pread(data.fileno(), len(MAGIC), at) == MAGIC for at in COPY_PLACES)


def is_foreign(place: Path, path: Path, locks: list[int]) -> bool:
    """Whether no copy of a superblock begins at `path`, the file of `place`. Raises StoreError if
    that is because somebody is making a store; the lock that tells is appended to `locks`."""
    if _begins_as_store(path):
        return False
    if is_raw(place) or (place / LOCK_NAME).exists():
        locks.append(take_lock(place, shared=True))
    return True


def _read_superblock(fd: int, directory: Path) -> Superblock:
    with mmap.mmap(-1, _FRONT_BYTES) as memory:
        length = os.preadv(fd, [memory], 0)
        front = np.frombuffer(memory[:length], np.uint8)
    try:
        shape = newest_superblock(front)
    except (FormatError, msgspec.DecodeError) as error:
        raise StoreError(f"{directory} cannot be opened as a store: {error}") from error
    size = size_bytes(fd)
    if size < shape.file_bytes:
        raise StoreError(
            f"store {directory} is cut short: {size} of {shape.file_bytes} bytes are there; "
            "restore the file or erase the folder"
        )
    return shape


def _check_layout(directory: Path, shape: Superblock, layout: Layout | None) -> None:
    if layout is not None and shape.fingerprint != layout.fingerprint():
        raise MisfitError(
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
