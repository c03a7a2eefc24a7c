"""The contract of a storage device: submit a batch, reap a batch, close. Buffers are ours.

A device moves bytes between files and one *arena* (a page-aligned uint8 array given at open) and
decides nothing: order, priority, retry and verification belong to its callers. `submit` and `reap`
never block and are called by one thread at a time; `fileno` may be polled by any thread.
"""

from __future__ import annotations

import errno
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

OP = np.dtype(
    [
        ("tag", "<u8"),  # the caller's, unique in flight, below 2**64 - 1; comes back in DONE
        ("offset", "<i8"),  # in the file, bytes
        ("memory", "<i8"),  # in the arena, bytes
        ("length", "<i8"),  # bytes, at most 1 GiB
        ("file", "<i4"),  # index into the files given at open
        ("kind", "<i4"),  # READ, WRITE or SYNC
    ]
)
DONE = np.dtype([("tag", "<u8"), ("result", "<i8")])  # result: bytes moved, or -errno

READ, WRITE, SYNC = 0, 1, 2

Ops = NDArray[Any]  # dtype OP
Completions = NDArray[Any]  # dtype DONE
Arena = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class File:
    """An open file as a device needs it: descriptor, path for messages, size and alignment."""

    fd: int
    path: str
    size_bytes: int
    alignment_bytes: int = 4096


class DeviceError(Exception):
    """A device cannot be had as asked: what, why and what to do, in one message."""


Op = tuple[int, int, int, int, int, int]
"""One row of an OP array as `tolist` gives it: tag, offset, memory, length, file, kind."""


def refusal(op: Op, files: int, arena_bytes: int) -> int:
    """Zero, or the -errno with which an operation ends because it cannot be started.

    Checked here and not left to the kernel: a slice past the end of the arena would silently be
    shorter, and io_uring takes offset -1 for "where the file stands".
    """
    _, offset, memory, length, file, kind = op
    if not 0 <= file < files:
        return -errno.EBADF
    if kind == SYNC:
        return 0
    if kind not in (READ, WRITE) or offset < 0 or length < 0:
        return -errno.EINVAL
    if memory < 0 or memory + length > arena_bytes:
        return -errno.EFAULT
    return 0


class StorageDevice:
    """Base class of storage devices.

    Law 2: from `submit` until its completion is reaped, the arena range of an operation belongs
    to the device. A cancelled operation still completes (with -ECANCELED or its real result).
    Every accepted operation completes exactly once, except on a device that loses it (`faulty`).
    What cannot be started (see `refusal`) is accepted and completes with its -errno. `close` waits
    for the medium without a limit, since nothing else keeps the arena safe. Submit from threads
    that live on: the kernel cancels the requests of a thread that ends.
    """

    name: ClassVar[str] = ""

    on_files: ClassVar[bool] = True
    """Whether it reads and writes the files it is given; else it is for tests."""

    engine: str = ""
    """What really runs, in words: "io_uring, fixed buffers, fixed files"."""
    notes: tuple[str, ...] = ()
    """Everything that is less than what was asked for, in words; empty when all is well."""

    def __init__(self, files: Sequence[File], arena: Arena, depth: int) -> None:
        """Open over `files`; at most `depth` operations are in flight. Raises DeviceError."""
        self.files = tuple(files)
        self.arena = arena
        self.depth = depth

    @property
    def in_flight(self) -> int:
        """Operations accepted and not yet reaped."""
        raise NotImplementedError

    def submit(self, ops: Ops) -> int:
        """Start as many of `ops` as fit, in order, and return how many. Never blocks.

        Operations that cannot be started complete with -errno; only lack of room refuses one.
        """
        raise NotImplementedError

    def reap(self) -> Completions:
        """All completions there are (a fresh array, maybe empty). Never blocks."""
        raise NotImplementedError

    def reap_some(self, count: int) -> Completions:
        """Block until about `count` completions have come (at least one), then take them all."""
        while len(completions := self.reap()) == 0:
            self.wait(1_000_000_000)
        return completions

    def change_file(self, number: int, file: File) -> None:
        """From here on operations on file `number` are for `file`; with descriptor -1 none is to be
        asked for. Nothing may be in flight on it. The old descriptor is the caller's to close.

        Raises DeviceError, with nothing changed, where files cannot be changed while others are in
        use.
        """
        raise DeviceError(
            f"device {self.name or type(self).__name__} cannot change a file while it is open; "
            "close the store and use `prefetchd store replace`"
        )

    def _put_file(self, number: int, file: File) -> None:
        self.files = (*self.files[:number], file, *self.files[number + 1 :])

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Ask that these operations end early. Best effort; never blocks."""

    def fileno(self) -> int:
        """A descriptor that polls readable while there is something to reap."""
        raise NotImplementedError

    def wait(self, timeout_ns: int, count: int = 1) -> None:
        """Block until there may be something to reap, or the timeout. Safe in any thread.

        A device that can tell waits for `count` completions; others return at the first.
        """
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.poll(max(0, timeout_ns) / 1e6)

    def close(self) -> None:
        """Let go of everything. No byte of the arena is touched after this returns."""
        raise NotImplementedError
