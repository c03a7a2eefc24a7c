"""Memory that a daemon and its clients share: memfds, sealed.

Decides who may write what: staging and books are the daemon's to write and its clients' to read, a
write arena and marks the other way round. Refuses to know what lies in them.

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
from prefetchd.books import Books, books_bytes, books_in
from prefetchd.device import Arena
from prefetchd.model import Geometry
from prefetchd.sidecar.memory import Memory

_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python's fcntl does not name it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class StagingArena:
    """Made by the runtime (`Options.arena`), once; then `fd` is for clients."""

    def __init__(self, name: str, memory: Memory | None = None) -> None:
        self._name = name
        self._memory = memory
        self.fd = self.books_fd = -1
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

    def books(self, geometry: Geometry, slots: int) -> Books:
        """For `Options.books`, once; then `books_fd` is for clients."""
        length = books_bytes(geometry, slots)
        self.books_fd = os.memfd_create(
            f"prefetchd:books:{self._name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        self._close_books = weakref.finalize(self, os.close, self.books_fd)
        os.ftruncate(self.books_fd, length)
        memory = mmap.mmap(self.books_fd, length)
        fcntl.fcntl(self.books_fd, fcntl.F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
        return books_in(np.frombuffer(memory, np.uint8), geometry, slots)

    def close(self) -> None:
        """Give the descriptors back; mappings live as long as they are used. Harmless when
        repeated, or if there never were any."""
        if self.fd >= 0:
            self._close()
        if self.books_fd >= 0:
            self._close_books()
        if self._memory is not None:
            self._memory.give_back(self)


def map_staging(fd: int, offset_bytes: int, slots: int, slot_bytes: int) -> NDArray[np.uint8]:
    """A client's view of staging: (slots, slot_bytes), read-only."""
    size = slots * slot_bytes
    memory = mmap.mmap(fd, offset_bytes + size, mmap.MAP_SHARED, mmap.PROT_READ)
    whole: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return whole[offset_bytes:].reshape(slots, slot_bytes)


def map_books(fd: int, geometry: Geometry, slots: int) -> Books:
    """A client's view of a namespace's books, read-only."""
    length = books_bytes(geometry, slots)
    memory = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
    return books_in(np.frombuffer(memory, np.uint8), geometry, slots)


def make_for_client(size_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """What a client writes: the descriptor to send, and the daemon's view of it (read-only).

    Made by the daemon: one that a client made could be of huge pages that are not there, and end
    whoever reads it.
    """
    fd = os.memfd_create("prefetchd:client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except BaseException:
        os.close(fd)
        raise
    return fd, np.frombuffer(memory, np.uint8)


def map_own(fd: int, size_bytes: int) -> NDArray[np.uint8]:
    """A client's own view of what it writes."""
    memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
    return np.frombuffer(memory, np.uint8)
