"""The storage device `liburing`: io_uring through the calls of the `liburing` package.

The reference that the tests hold `uring` against, and the plainest use of io_uring: one preparing
call per operation, ordinary buffers and descriptors. Decides nothing but which slot of its own an
operation uses.

The calls of the package (2026.3.30) do NOT release the GIL: its library imports none of CPython's
thread-state functions, and a thread that counts stands still while another is in
`io_uring_wait_cqe_timeout`. So nothing here ever waits inside the package: an eventfd registered
with the ring is polled instead, and `select.poll` does release the GIL.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import (
    DONE,
    READ,
    SYNC,
    Arena,
    Completions,
    DeviceError,
    File,
    Op,
    Ops,
    StorageDevice,
    refusal,
)
from prefetchd.hostinfo import errno_name, uring_forbidden_because

_RETRY = (errno.EAGAIN, errno.EBUSY, errno.EINTR)


class Liburing(StorageDevice):
    """One operation, one call. An operation is known to the kernel by its slot, not by its tag."""

    name = "liburing"
    engine = "io_uring through liburing's calls, plain buffers and files"

    def __init__(self, files: Sequence[File], arena: Arena, depth: int) -> None:
        super().__init__(files, arena, depth)
        try:
            import liburing
        except ImportError as error:
            raise DeviceError(
                f"device liburing: the package liburing is missing: {error}"
            ) from error
        self._api: Any = liburing
        self._ring: Any = liburing.Ring()
        try:
            liburing.io_uring_queue_init(depth, self._ring)
        except OSError as error:
            why = uring_forbidden_because(error)
            raise DeviceError(f"device liburing, depth {depth}: {why}") from error
        self._event = -1
        try:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            liburing.io_uring_register_eventfd(self._ring, self._event)
        except OSError as error:
            liburing.io_uring_queue_exit(self._ring)
            if self._event >= 0:
                os.close(self._event)
            why = errno_name(error.errno or 0)
            raise DeviceError(f"device liburing: no event for its completions: {why}") from error
        self._bytes = arena.data
        self._free = list(range(depth))
        self._running: dict[int, int] = {}  # slot: tag
        self._cancelled: set[int] = set()  # slots in `_running`, so that each is asked once
        self._vectors: list[Any] = [None] * depth  # must live until the kernel takes the entry
        self._refused: list[tuple[int, int]] = []
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._refused)

    def submit(self, ops: Ops) -> int:
        room = min(self.depth - self.in_flight, self._api.io_uring_sq_space_left(self._ring))
        ops = ops[:room]
        for op in ops.tolist():
            refused = refusal(op, len(self.files), len(self._bytes))
            if refused:
                self._refused.append((op[0], refused))
            else:
                self._prepare(op)
        if self._refused:
            os.eventfd_write(self._event, 1)
        self._flush()
        return len(ops)

    def _prepare(self, op: Op) -> None:
        tag, offset, memory, length, file, kind = op
        slot = self._free.pop()
        self._running[slot] = tag
        entry = self._api.io_uring_get_sqe(self._ring)
        descriptor = self.files[file].fd
        if kind == SYNC:
            self._api.io_uring_prep_fsync(entry, descriptor, self._api.IORING_FSYNC_DATASYNC)
        else:
            self._vectors[slot] = self._api.Iovec([self._bytes[memory : memory + length]])
            read, write = self._api.io_uring_prep_readv, self._api.io_uring_prep_writev
            (read if kind == READ else write)(entry, descriptor, self._vectors[slot], offset)
        entry.user_data = slot

    def _flush(self) -> None:
        """Give the kernel what is prepared. What it cannot take now stays for the next call."""
        if self._api.io_uring_sq_ready(self._ring):
            try:
                self._api.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno not in _RETRY:
                    raise

    def reap(self) -> Completions:
        # The event is cleared before looking, so that a completion in between sets it again.
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._flush()
        done, self._refused = self._refused, []
        entries, seen = self._api.Cqe(), 0
        for _ in self._api.CqeIter(self._ring, entries):
            seen += 1
            entry = entries[0]
            slot = entry.user_data
            if slot < self.depth:  # else it answers a cancellation, and nobody waits for that
                done.append((self._running.pop(slot), _result(entry)))
                self._cancelled.discard(slot)
                self._vectors[slot] = None
                self._free.append(slot)
        self._api.io_uring_cq_advance(self._ring, seen)
        return np.array(done, DONE)

    def change_file(self, number: int, file: File) -> None:
        self._put_file(number, file)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        unwanted = set(tags.tolist())
        self._cancel([slot for slot, tag in self._running.items() if tag in unwanted])

    def _cancel(self, slots: list[int]) -> None:
        # Once each: the completion queue has room for two entries a slot, no more.
        for slot in slots:
            if slot in self._cancelled:
                continue
            entry = self._api.io_uring_get_sqe(self._ring)
            if entry is None:
                break
            self._api.io_uring_prep_cancel64(entry, slot, 0)
            entry.user_data = self.depth
            self._cancelled.add(slot)
        self._flush()

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        """Cancel what can be cancelled and wait for the rest, however long the drive takes."""
        if self._closed:
            return
        self._closed = True
        self._cancel(list(self._running))
        while self._running:
            self.wait(100_000_000)
            self.reap()
        self._refused.clear()
        self._api.io_uring_queue_exit(self._ring)
        os.close(self._event)
        self._bytes.release()


def _result(entry: Any) -> int:
    try:
        return int(entry.res)  # the package raises for a negative one
    except OSError as error:
        return -(error.errno or errno.EIO)
