"""The contract of a storage device: submit a batch, reap a batch, close. Buffers are ours.

A device moves bytes between files and one *arena* (a page-aligned uint8 array given at open) and
decides nothing: order, priority, retry and verification belong to its callers. `submit` and `reap`
never block and are called by one thread at a time; `fileno` may be polled by any thread.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

OP = np.dtype(
    [
        ("tag", "<u8"),  # the caller's; comes back in the completion
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


class StorageDevice:
    """Base class of storage devices.

    Law 2: from `submit` until its completion is reaped, the arena range of an operation belongs
    to the device. A cancelled operation still completes (with -ECANCELED or its real result).
    Every accepted operation completes exactly once, except on a device that loses it (`faulty`).
    """

    name: ClassVar[str] = ""

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

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Ask that these operations end early. Best effort; never blocks."""

    def fileno(self) -> int:
        """A descriptor that polls readable while there is something to reap."""
        raise NotImplementedError

    def wait(self, timeout_ns: int) -> None:
        """Block until there may be something to reap, or the timeout. Safe in any thread."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        poller.poll(max(0, timeout_ns) / 1e6)

    def close(self) -> None:
        """Let go of everything. No byte of the arena is touched after this returns."""
        raise NotImplementedError
