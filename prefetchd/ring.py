"""An io_uring whose rings are numpy arrays: a batch is a few vector assignments and one call.

Decides how a batch becomes submission entries and how completions are read back. Knows nothing of
pages, slots, priorities or files beyond their descriptors. The kernel's interface is described in
io_uring_setup(2), io_uring_enter(2) and io_uring_register(2); every offset is taken from what the
kernel returns at setup, since they differ between versions.

Memory order: on x86 stores are seen in order, and a tail written here is only read by the kernel
inside io_uring_enter, which is a full barrier on every architecture. A completion tail read
without a system call may be old, never wrong.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import liburing
import numpy as np
from numpy.typing import NDArray

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same numbers on every architecture

_REGISTER_BUFFERS, _REGISTER_FILES, _UPDATE_FILES = 0, 2, 6  # the package does not name these

# Operations, by the numbers of linux/io_uring.h; the package names the flags but not these.
OP_FSYNC, OP_READ_FIXED, OP_WRITE_FIXED, OP_ASYNC_CANCEL, OP_READ, OP_WRITE = 3, 4, 5, 14, 22, 23

_OFFSETS = [("head", "<u4"), ("tail", "<u4"), ("mask", "<u4"), ("entries", "<u4")]
_PARAMS = np.dtype(
    [
        ("sq_entries", "<u4"),
        ("cq_entries", "<u4"),
        ("flags", "<u4"),
        ("sq_thread", "<u4", 2),
        ("features", "<u4"),
        ("wq_fd", "<u4"),
        ("reserved", "<u4", 3),
        (
            "sq",
            [*_OFFSETS, ("flags", "<u4"), ("dropped", "<u4"), ("array", "<u4"), ("rest", "V12")],
        ),
        (
            "cq",
            [*_OFFSETS, ("overflow", "<u4"), ("cqes", "<u4"), ("flags", "<u4"), ("rest", "V12")],
        ),
    ]
)
SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u4"),
        ("op_flags", "<u4"),
        ("user_data", "<u8"),
        ("buffer", "<u2"),
        ("personality", "<u2"),
        ("splice_fd", "<i4"),
        ("rest", "<u8", 2),
    ]
)
CQE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
_UPDATE = np.dtype([("offset", "<u4"), ("reserved", "<u4"), ("descriptors", "<u8")])
# Entries are copied as wholes: numpy copies structured ones field by field, at 10 times the price.
WHOLE_SQE, _WHOLE_CQE = np.dtype(f"V{SQE.itemsize}"), np.dtype(f"V{CQE.itemsize}")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _WaitArgument(ctypes.Structure):
    """`struct io_uring_getevents_arg`."""

    _fields_ = (
        ("sigmask", ctypes.c_uint64),
        ("sigmask_bytes", ctypes.c_uint32),
        ("rest", ctypes.c_uint32),
        ("timeout", ctypes.c_uint64),
    )


_WAITING = liburing.IORING_ENTER_GETEVENTS | liburing.IORING_ENTER_EXT_ARG

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = [ctypes.c_long] * 7
_syscall.restype = ctypes.c_long
_NOTHING = (0,) * 6


def _call(number: int, *arguments: int) -> int:
    """A raw system call (the GIL is released): its result, or -errno."""
    result: int = _syscall(number, *arguments, *_NOTHING[len(arguments) :])
    return result if result >= 0 else -ctypes.get_errno()


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
    return result


def _word(memory: mmap.mmap, offset: int) -> memoryview:
    """One number that the kernel shares with us; as a memoryview, read and written in no time."""
    start = int(offset)
    return memoryview(memory)[start : start + 4].cast("I")


class Ring:
    """One io_uring with room for `entries` submissions and twice as many completions.

    `single_issuer`: all calls come from the thread that made the ring; completions are then only
    posted inside `enter` (SINGLE_ISSUER | DEFER_TASKRUN), which saves interrupts.
    `poll_idle_ms`: a kernel thread takes submissions without a system call (SQPOLL), and sleeps
    after so long without any; it keeps a processor busy. Only where stores are seen in order.
    Raises OSError with the kernel's errno (EPERM, ENOSYS, ENOMEM, EINVAL ...).
    """

    def __init__(self, entries: int, *, single_issuer: bool = False, poll_idle_ms: int = 0) -> None:
        parameters = np.zeros(1, _PARAMS)
        flags = liburing.IORING_SETUP_SUBMIT_ALL | liburing.IORING_SETUP_CLAMP
        if single_issuer:
            flags |= liburing.IORING_SETUP_SINGLE_ISSUER | liburing.IORING_SETUP_DEFER_TASKRUN
        if poll_idle_ms:
            flags |= liburing.IORING_SETUP_SQPOLL
            parameters["sq_thread"] = (0, poll_idle_ms)
        self._polled = poll_idle_ms > 0
        parameters["flags"] = flags
        self.single_issuer = single_issuer
        self.fd = _checked("io_uring_setup", _call(_SETUP, entries, parameters.ctypes.data))
        self._maps: list[mmap.mmap] = []
        try:
            self._map(parameters[0])
        except BaseException:
            self.close()
            raise

    def _map(self, parameters: Any) -> None:
        sq, cq = parameters["sq"], parameters["cq"]
        self.entries = int(parameters["sq_entries"])
        self.cq_entries = int(parameters["cq_entries"])
        sq_bytes = int(sq["array"]) + 4 * self.entries
        cq_bytes = int(cq["cqes"]) + CQE.itemsize * self.cq_entries
        if int(parameters["features"]) & liburing.IORING_FEAT_SINGLE_MMAP:
            sq_memory = cq_memory = self._mmap(max(sq_bytes, cq_bytes), liburing.IORING_OFF_SQ_RING)
        else:
            sq_memory = self._mmap(sq_bytes, liburing.IORING_OFF_SQ_RING)
            cq_memory = self._mmap(cq_bytes, liburing.IORING_OFF_CQ_RING)
        sqe_memory = self._mmap(SQE.itemsize * self.entries, liburing.IORING_OFF_SQES)

        self._sq_head = _word(sq_memory, sq["head"])
        self._sq_flags = _word(sq_memory, sq["flags"])
        self._sq_tail = _word(sq_memory, sq["tail"])
        # Entry i of the submission ring always names submission entry i.
        np.frombuffer(sq_memory, "<u4", self.entries, int(sq["array"]))[:] = np.arange(self.entries)
        self._cq_head = _word(cq_memory, cq["head"])
        self._cq_tail = _word(cq_memory, cq["tail"])
        self._cqes = np.frombuffer(cq_memory, _WHOLE_CQE, self.cq_entries, int(cq["cqes"]))
        self._sqes: NDArray[Any] = np.frombuffer(sqe_memory, WHOLE_SQE, self.entries)

    def _mmap(self, length: int, offset: int) -> mmap.mmap:
        memory = mmap.mmap(self.fd, length, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)
        self._maps.append(memory)
        return memory

    def register_buffers(self, address: int, sizes: Sequence[int]) -> None:
        """Pin one memory range, cut into consecutive buffers of `sizes` bytes (each <= 1 GiB)."""
        vectors = np.zeros((len(sizes), 2), "<u8")
        vectors[:, 1] = sizes
        vectors[:, 0] = address + np.concatenate([[0], np.cumsum(sizes[:-1])])
        self._register(_REGISTER_BUFFERS, "register buffers", vectors)

    def register_files(self, descriptors: Sequence[int]) -> None:
        table = np.array(descriptors, "<i4")
        self._register(_REGISTER_FILES, "register files", table)

    def change_file(self, number: int, descriptor: int) -> None:
        """Another file, or none (-1), in the place of a registered one; what is in flight on the
        old one ends there."""
        table = np.array([descriptor], "<i4")
        update = np.zeros(1, _UPDATE)
        update["offset"], update["descriptors"] = number, table.ctypes.data
        self._register(_UPDATE_FILES, "change a file", update)

    def _register(self, opcode: int, what: str, table: NDArray[Any]) -> None:
        result = _call(_REGISTER, self.fd, opcode, table.ctypes.data, len(table))
        _checked(f"io_uring_register ({what})", result)

    def room(self) -> int:
        """How many submissions fit now."""
        return self.entries - self._pending()

    def _pending(self) -> int:
        return (self._sq_tail[0] - self._sq_head[0]) & 0xFFFFFFFF

    def push(self, entries: NDArray[Any]) -> None:
        """Copy entries (dtype SQE, at most `room`) into the ring and hand them to the kernel."""
        while self._polled and self.room() < len(entries):
            time.sleep(0)  # the polling thread is just taking them
        start, count = self._sq_tail[0] & (self.entries - 1), len(entries)
        first, whole = min(count, self.entries - start), entries.view(WHOLE_SQE)
        self._sqes[start : start + first] = whole[:first]
        if first < count:
            self._sqes[: count - first] = whole[first:]
        self._submit(count)

    def _submit(self, count: int) -> None:
        """Publish `count` entries and hand them over; busy and interrupted are tried again."""
        self._sq_tail[0] = (self._sq_tail[0] + count) & 0xFFFFFFFF
        if self._polled:
            self.nudge()
            return
        while pending := self._pending():
            result = _call(_ENTER, self.fd, pending)
            if result < 0 and -result not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                _checked("io_uring_enter", result)

    def nudge(self) -> None:
        """Wake the kernel's polling thread if it sleeps over entries; nothing without one.

        Called again whenever completions are looked for, since the flag may have been read before
        the thread saw the new tail.
        """
        if self._polled and self._sq_flags[0] & liburing.IORING_SQ_NEED_WAKEUP and self._pending():
            _call(_ENTER, self.fd, 0, 0, liburing.IORING_ENTER_SQ_WAKEUP)

    def wait(self, count: int, timeout_ns: int) -> None:
        """Block until `count` completions are there, the timeout (ns), or a signal."""
        limit = _Timespec(*divmod(timeout_ns, 1_000_000_000))
        argument = _WaitArgument(0, 0, 0, ctypes.addressof(limit))
        place, size = ctypes.addressof(argument), ctypes.sizeof(argument)
        result = _call(_ENTER, self.fd, 0, count, _WAITING, place, size)
        if result < 0 and -result not in (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
            _checked("io_uring_enter (wait)", result)

    def waiting(self) -> int:
        """How many completions are known to be there, without asking the kernel."""
        return (self._cq_tail[0] - self._cq_head[0]) & 0xFFFFFFFF

    def ready(self) -> bool:
        return self.waiting() > 0

    def reap(self) -> NDArray[Any]:
        """All completions there are, as a fresh array of CQE; each is seen once."""
        if self.single_issuer and not self.ready():
            _call(_ENTER, self.fd, 0, 0, liburing.IORING_ENTER_GETEVENTS)
        head = self._cq_head[0]
        count = (self._cq_tail[0] - head) & 0xFFFFFFFF
        start = head & (self.cq_entries - 1)
        completions, first = np.empty(count, _WHOLE_CQE), min(count, self.cq_entries - start)
        completions[:first] = self._cqes[start : start + first]
        if first < count:
            completions[first:] = self._cqes[: count - first]
        self._cq_head[0] = (head + count) & 0xFFFFFFFF
        return completions.view(CQE)

    def close(self) -> None:
        """Close the ring. The kernel ends what is in flight; reap it first if buffers matter."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
