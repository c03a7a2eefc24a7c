"""Removing a store: which files are its own, and that nobody uses them.

Decides what may be removed. Whatever does not say that it is a part of this store stays.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prefetchd.format import Superblock
from prefetchd.store_opening import Opening, exists, superblock_of
from prefetchd.store_place import (
    LOCK_NAME,
    StoreError,
    close_all,
    data_path,
    is_raw,
    take_lock,
    told,
)


def parts_of(place: Path, *, raw: bool) -> list[Path]:
    """The places of all parts of a store that are there. Raises StoreError if it is none."""
    if not exists(place, raw=raw):
        raise StoreError(f"there is no store in {place}; nothing was erased")
    first = superblock_of(place, Opening(read_only=True, raw=raw))
    if first.stripe:
        raise StoreError(
            f"{place} holds part {first.stripe + 1} of {first.stripes} of a store; name the folder "
            "of its first part"
        )
    further = [Path(path) for path in first.paths[1:]]
    return [place, *(path for path in further if _is_part(path, first, raw=raw))]


def _is_part(place: Path, first: Superblock, *, raw: bool) -> bool:
    try:
        return superblock_of(place, Opening(True, raw=raw)).store_id == first.store_id
    except StoreError:
        return False


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
                    path.unlink()
                    (place / LOCK_NAME).unlink()
                    with contextlib.suppress(OSError):  # something else lies there
                        place.rmdir()
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
