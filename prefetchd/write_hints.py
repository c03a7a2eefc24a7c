"""Tells the kernel how long what is written will live, so that a drive can keep it apart.

Decides the class by the time to live. A hint is only that: where it is not taken, nothing changes.
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Sequence

from prefetchd.device import File

# F_SET_RW_HINT and RWH_WRITE_LIFE_* of linux/fcntl.h.
_SET_RW_HINT = 1036
_CLASSES = ((600.0, 2, "short"), (86_400.0, 3, "medium"), (float("inf"), 4, "long"))


def hint_lifetime(files: Sequence[File], ttl_s: float | None) -> str:
    """Give every file that is one the class of this time to live; in words, what was done."""
    limit_s = float("inf") if ttl_s is None else ttl_s
    _, value, name = next(one for one in _CLASSES if limit_s <= one[0])
    try:
        for file in files:
            if file.fd >= 0:
                fcntl.fcntl(file.fd, _SET_RW_HINT, struct.pack("<Q", value))
    except OSError as error:
        return f"none, refused with errno {error.errno}"
    return f"lifetime {name}" if any(file.fd >= 0 for file in files) else "none"
