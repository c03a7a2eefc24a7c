"""Memory that a daemon and its clients share: memfds, sealed.

Decides who may write what: staging is the daemon's to write and its clients' to read, a write
arena the other way round. Refuses to know what lies in either.

The seals hold whatever a client does: F_SEAL_FUTURE_WRITE refuses every later writable mapping,
mprotect and write through the descriptor, while the mapping that the daemon already has stays
writable; F_SEAL_SHRINK keeps anybody from pulling memory out from under a reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from prefetchd.arena import arena_in, spare_bytes
from prefetchd.device import Arena
from prefetchd.sidecar.memory import Memory

_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python's fcntl does not name it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class StagingArena:
    """Made by the runtime (`Options.arena`), once; then `fd` is for clients."""

    def __init__(self, name: str, memory: Memory | None = None) -> None:
        self._name = name
        self._memory = memory
        self.fd = -1
        self.offset_bytes = 0
        """Of the arena in the file."""

    def __call__(self, size_bytes: int, alignment_bytes: int) -> Arena:
        length = size_bytes + spare_bytes(alignment_bytes)
        if self._memory is not None:
            self._memory.take(self, self._name, length)
        self.fd = os.memfd_create(f"prefetchd:{self._name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, length)
        memory = mmap.mmap(self.fd, length)
        arena = arena_in(memory, size_bytes, alignment_bytes)
        self.offset_bytes = arena.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
        return arena

    def close(self) -> None:
        """Give the descriptor back; mappings live as long as they are used. Harmless when
        repeated, or if there never was one."""
        if self.fd >= 0:
            self._close()
        if self._memory is not None:
            self._memory.give_back(self)


def map_staging(fd: int, offset_bytes: int, slots: int, slot_bytes: int) -> NDArray[np.uint8]:
    """A client's view of staging: (slots, slot_bytes), read-only."""
    size = slots * slot_bytes
    memory = mmap.mmap(fd, offset_bytes + size, mmap.MAP_SHARED, mmap.PROT_READ)
    whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return whole[offset_bytes:].reshape(slots, slot_bytes)


def make_write_arena(size_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """A client's write arena: the descriptor to send, and the daemon's view of it (read-only).

    Made by the daemon: one that a client made could be of huge pages that are not there, and end
    whoever reads it.
    """
    fd = os.memfd_create("prefetchd:writes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except BaseException:
        os.close(fd)
        raise
    return fd, np.frombuffer(memory, np.uint8)


def map_write_arena(fd: int, size_bytes: int) -> NDArray[np.uint8]:
    """A client's own view of its write arena."""
    memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
    return np.frombuffer(memory, np.uint8)
