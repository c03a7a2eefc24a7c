"""Block devices that a store may be made on: how large they are, and what else lies there.

Decides whether a device is free to be written over. Refuses to write anything.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from prefetchd.format import COPY_PLACES, MAGIC
from prefetchd.store_place import StoreError, is_device

_FRONT_BYTES = 1 << 17
_SIGNATURES = (
    *((place, MAGIC, "a prefetchd store") for place in COPY_PLACES),
    (0, b"XFSB", "an XFS file system"),
    (0x438, b"\x53\xef", "an ext file system"),
    (0x10040, b"_BHRfS_M", "a Btrfs file system"),
    (0x400, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT32", "a FAT32 file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (0, b"hsqs", "a SquashFS file system"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0, b"\xfc\x4e\x2b\xa9", "a part of a RAID array"),
    (4096, b"\xfc\x4e\x2b\xa9", "a part of a RAID array"),
    (4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "a bcache device"),
    (512, b"EFI PART", "a GPT partition table"),
    (510, b"\x55\xaa", "a partition table"),
)
"""Offset, bytes, and what they say lies there; from each format's own documentation."""


def size_bytes(fd: int) -> int:
    """Of a file or a block device."""
    return os.lseek(fd, 0, os.SEEK_END)


def signature(front: bytes) -> str:
    """What the first bytes of a device say lies on it, in words; empty if nothing known."""
    found = (words for at, magic, words in _SIGNATURES if front[at : at + len(magic)] == magic)
    return next(found, "")


def check_free(place: Path, *, force: bool) -> None:
    """Raises StoreError if the device is mounted, or (unless `force`) holds something known."""
    mounts = [part.mountpoint for part in psutil.disk_partitions(all=True) if _same(part, place)]
    if mounts:
        raise StoreError(f"{place} is mounted on {mounts[0]}; a store needs the device for itself")
    with open(place, "rb") as device:
        there = signature(device.read(_FRONT_BYTES))
    if there and not force:
        raise StoreError(
            f"{place} holds {there}; it would be overwritten. If that is meant, say --force"
        )


def _same(part: object, place: Path) -> bool:
    device = Path(getattr(part, "device", ""))
    if not device.is_absolute() or not is_device(place) or not is_device(device):
        return False
    # A mounted partition is in the way of a store on the whole disk as well.
    inside = Path(f"/sys/class/block/{place.resolve().name}/{device.resolve().name}")
    return device.stat().st_rdev == place.stat().st_rdev or inside.exists()
