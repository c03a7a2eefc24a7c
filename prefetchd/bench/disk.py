"""What the drive itself says it moved, to tell a drive from a cache in front of it.

Decides from the kernel's disk counters whether reads reached the medium: they did unless the drive
moved less than 0.95 of the bytes asked for. Other processes on the same drive only add to them.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from prefetchd.hostinfo import Medium, medium_of

_BLOCK_DEVICES = Path("/sys/class/block")
_CACHED_BELOW = 0.95
_BYTES_MIN = 1 << 24  # fewer bytes than that prove nothing


def read_counter(medium: Medium) -> int | None:
    """Bytes that the drives behind `medium` have read since boot; None if one is not counted."""
    counters = psutil.disk_io_counters(perdisk=True) or {}
    names = {_counted(device) for device in medium.devices}
    if not all(name in counters for name in names):
        return None
    return sum(int(counters[name].read_bytes) for name in names)


def _counted(device: str) -> str:
    """The name under which the kernel counts what reaches a medium."""
    # A volume's name under /dev/mapper is a link to it.
    name = os.path.basename(os.path.realpath(device))
    try:
        # A loop device counts what was asked of it, and the page cache may have had the file.
        lines = (_BLOCK_DEVICES / name / "loop" / "backing_file").read_text()
        fd = os.open(lines.removesuffix("\n"), os.O_RDONLY)
    except OSError:
        return name
    try:
        return _counted(medium_of(fd, lines.removesuffix("\n")).device)
    finally:
        os.close(fd)


def cached_share(asked_bytes: int, medium_bytes: int | None) -> float | None:
    """The share of `asked_bytes` that did not come from the drive, if it was too large."""
    if medium_bytes is None or asked_bytes < _BYTES_MIN:
        return None
    share = 1 - medium_bytes / asked_bytes
    return share if medium_bytes < _CACHED_BELOW * asked_bytes else None
