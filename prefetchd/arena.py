"""Memory for devices: aligned, and there from the start.

Decides how a mapping becomes an arena. Refuses to know what lies in it.
"""

from __future__ import annotations

import mmap

import numpy as np

from prefetchd.device import Arena


def aligned_arena(size_bytes: int, alignment_bytes: int) -> Arena:
    """Anonymous memory for devices, aligned and touched, so that no read waits for a page fault."""
    return arena_in(
        mmap.mmap(-1, size_bytes + spare_bytes(alignment_bytes)), size_bytes, alignment_bytes
    )


def spare_bytes(alignment_bytes: int) -> int:
    """What a mapping needs beside an arena, to have it aligned."""
    return max(0, alignment_bytes - mmap.PAGESIZE)


def arena_in(memory: mmap.mmap, size_bytes: int, alignment_bytes: int) -> Arena:
    """The aligned part of a mapping, touched."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -whole.ctypes.data % alignment_bytes
    arena = whole[skip : skip + size_bytes]
    arena[:: mmap.PAGESIZE] = 0
    return arena
