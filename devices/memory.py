"""The storage device `memory`: files are arrays of this process. The shortest whole device.

Decides nothing; an operation is carried out inside `submit` and only its completion waits to be
reaped. Also home of `Mailbox`, which holds completions behind a descriptor that can be polled.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import (
    DONE,
    READ,
    SYNC,
    Arena,
    Completions,
    File,
    Op,
    Ops,
    StorageDevice,
    refusal,
)


class Mailbox:
    """Completions (tag, result) on their way to the caller. Safe in any thread.

    The descriptor of `fileno` is readable while there is something to take; rarely it is once more
    when that has just been taken.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._posted: list[tuple[int, int]] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, completions: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            is_first = not self._posted
            self._posted.extend(completions)
        # Not under the lock: the system call lets go of the GIL, and all workers would queue up.
        if is_first and completions:
            os.eventfd_write(self._event, 1)

    def take(self) -> Completions:
        # The event is cleared before looking, so that a completion in between sets it again.
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            posted, self._posted = self._posted, []
        return np.array(posted, DONE)

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


class Memory(StorageDevice):
    """Files in memory. `contents`, one uint8 array a file, lets another device open the same bytes.

    Descriptors and paths are ignored. As on a medium of fixed size, a read past the end is short
    and a write past it is short too, or -ENOSPC if nothing fits.
    """

    name = "memory"
    on_files = False
    engine = "arrays in process memory"

    def __init__(
        self,
        files: Sequence[File],
        arena: Arena,
        depth: int,
        *,
        contents: Sequence[NDArray[np.uint8]] | None = None,
    ) -> None:
        super().__init__(files, arena, depth)
        if contents is None:
            contents = [np.zeros(file.size_bytes, np.uint8) for file in files]
        self.contents = list(contents)
        self._mailbox = Mailbox()
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, ops: Ops) -> int:
        ops = ops[: self.depth - self._in_flight]
        self._mailbox.post([(op[0], self._carry_out(op)) for op in ops.tolist()])
        self._in_flight += len(ops)
        return len(ops)

    def _carry_out(self, op: Op) -> int:
        refused = refusal(op, len(self.contents), len(self.arena))
        _, offset, memory, length, file, kind = op
        if refused or kind == SYNC:
            return refused
        medium = self.contents[file][offset : offset + length]
        ours = self.arena[memory : memory + len(medium)]
        if kind == READ:
            ours[:] = medium
            return len(medium)
        medium[:] = ours
        return len(medium) if len(medium) or not length else -errno.ENOSPC

    def reap(self) -> Completions:
        done = self._mailbox.take()
        self._in_flight -= len(done)
        return done

    def change_file(self, number: int, file: File) -> None:
        """The new one is blank."""
        self._put_file(number, file)
        self.contents[number] = np.zeros(file.size_bytes, np.uint8)

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def close(self) -> None:
        self._in_flight = 0
        self._mailbox.close()
