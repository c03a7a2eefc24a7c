"""Removing a store: which files are its own, and that nobody uses them.

Decides what may be removed. Whatever does not say that it is a part of this store stays.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from prefetchd.format import Superblock
from prefetchd.key_file import belongs, is_begun
from prefetchd.store_opening import Opening, begun_store, exists, is_unfinished, peek, superblock_of
from prefetchd.store_place import (
    LOCK_NAME,
    InUseError,
    StoreError,
    close_all,
    data_path,
    is_raw,
    making_path,
    sync_names,
    take_lock,
    told,
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a store that is to be erased: the places that can be, and why others are passed over."""

    places: list[Path]
    away: dict[Path, str] = field(default_factory=dict)
    in_use: dict[Path, str] = field(default_factory=dict)


def parts_with_key(place: Path, key_file: Path, *, raw: bool, lone: bool = False) -> Parts:
    """The same of an encrypted store whose key is to be destroyed, which can be done while it is in
    use. Raises StoreError as `parts_of` otherwise, and if this is not its key file."""
    try:
        parts = parts_of(place, raw=raw, lone=lone)
    except InUseError as why:
        parts = Parts([], in_use={place: str(why)})
    if not is_unfinished(place):
        belongs(key_file, peek(place, raw=raw), str(place))
    elif not is_begun(key_file, begun_store(place)):
        raise StoreError(
            f"{key_file} is not the key of the store that was begun in {place}; leave it out"
        )
    return parts


def parts_of(place: Path, *, raw: bool, lone: bool = False) -> Parts:
    """All parts of a store. Raises StoreError if it is none, or (unless `lone`) if one of its parts
    is away or in use; with `lone` those that can be had, or a part without its first."""
    if is_unfinished(place):
        with told(place):
            close_all([take_lock(place)])
        return Parts([place])
    if not exists(place, raw=raw):
        raise StoreError(f"there is no store in {place}; nothing was erased")
    first = superblock_of(place, Opening(read_only=True, raw=raw))
    if first.stripe:
        if lone:
            return Parts([place])
        raise StoreError(
            f"{place} holds part {first.stripe + 1} of {first.stripes} of a store; name the folder "
            "of its first part, or, if that is gone, say --lone"
        )
    parts = Parts([place])
    for number, path in enumerate(map(Path, first.paths[1:]), 1):
        try:
            _look(path, number, first, raw=raw)
        except StoreError as why:
            if number in first.detached and not isinstance(why, InUseError):
                continue  # it was empty, and may be elsewhere
            if not lone:
                raise StoreError(
                    f"store {place}: its part {number + 1} on {path} cannot be erased: {why}; put "
                    "it back, or say --lone to erase what is there; nothing was erased"
                ) from why
            (parts.in_use if isinstance(why, InUseError) else parts.away)[path] = str(why)
        else:
            parts.places.append(path)
    return parts


def _look(place: Path, number: int, first: Superblock, *, raw: bool) -> None:
    """Raises StoreError if this part of the store is not there, or InUseError."""
    part = superblock_of(place, Opening(True, raw=raw), remedy="")
    if (part.store_id, part.stripe) != (first.store_id, number):
        raise StoreError(f"{place} holds something else")
    with told(place):  # readers would let us read
        close_all([take_lock(place)])


def erase(parts: list[Path], *, raw: bool) -> list[Path]:
    """What was removed, or on a raw device overwritten. Raises StoreError if a part is in use."""
    locks: list[int] = []
    gone: list[Path] = []
    try:
        for place in parts:
            with told(place):
                locks.append(take_lock(place))
        for place in parts:
            with told(place):
                path = data_path(place, raw=raw)
                if is_raw(place):
                    _wipe(path)
                else:
                    path.unlink(missing_ok=True)
                    making_path(place).unlink(missing_ok=True)
                    (place / LOCK_NAME).unlink()
                    with contextlib.suppress(OSError):  # something else lies there
                        place.rmdir()
                    sync_names(place)
                gone.append(path)
    finally:
        close_all(locks)
    return gone


def _wipe(path: Path) -> None:
    """Both superblocks, at any alignment: what follows says nothing without them."""
    with open(path, "r+b") as device:
        device.write(bytes(1 << 18))
        device.flush()
        os.fsync(device.fileno())
