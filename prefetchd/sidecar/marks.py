"""Marks: a client says in memory that it shares with the daemon which slots it reads.

Decides how a client and the daemon, without a word, never differ on whether a slot may be used for
something else. Refuses to know pages and sockets.

A client marks a slot, and only then looks whether the page is still said to be there; the daemon
says that the page is gone, and only then looks whether the slot is marked. Whichever comes first,
the other sees it, provided that no processor carries out a look before the store ahead of it: that
is what `fence` is for. It is how hazard pointers work (Michael, 2004: Hazard Pointers: Safe Memory
Reclamation for Lock-Free Objects).
"""

from __future__ import annotations

import os
import platform
import threading

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Mask, Slots

IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether stores of one process are seen by others in their order, as all this relies on."""

_COUNT_BYTES = 64
_READERS_MAX = 32
_LOCK = threading.Lock()


def _renew() -> None:
    """In a forked child: another thread of the parent's may just have held it."""
    global _LOCK  # noqa: PLW0603  (there is one a process)
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def fence() -> None:
    """No load after this is carried out before a store ahead of it: taking and giving back a lock
    each is an atomic instruction, which on the processors of `IN_ORDER` waits for all stores."""
    _LOCK.acquire()
    _LOCK.release()


def marks_bytes(slots: int) -> int:
    return _COUNT_BYTES + 2 * slots


class Marks:
    """One client's: `count` (int64, 1), how many tickets it holds; `on` (uint16, one a slot), how
    many of them hold that slot. Written by the client alone."""

    def __init__(self, memory: NDArray[np.uint8], slots: int) -> None:
        self.count = memory[:8].view(np.int64)
        self.on = memory[_COUNT_BYTES : marks_bytes(slots)].view(np.uint16)


class Readers:
    """The daemon's view of all its clients' marks. Any thread may call."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._all: tuple[Marks, ...] = ()
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether there are so many that looking at all takes too long."""
        return len(self._all) >= _READERS_MAX

    def add(self, marks: Marks) -> None:
        with self._lock:
            self._all = (*self._all, marks)

    def remove(self, marks: Marks) -> None:
        """What it reads, nobody reads any more. Harmless when repeated."""
        with self._lock:
            self._all = tuple(one for one in self._all if one is not marks)

    def reading(self, slots: Slots | None) -> Mask:
        """See `prefetchd.books.Readers`."""
        read = np.zeros(self._slots if slots is None else len(slots), np.bool_)
        clients = self._all
        if clients:
            fence()
        for marks in clients:
            if marks.count[0]:
                read |= (marks.on if slots is None else marks.on[slots]) > 0
        return read
