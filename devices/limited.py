"""The storage device `limited`: any other device, no faster than so many bytes a second.

Decides when a completion may be seen: reads are served one after another, first come first
served, each for as long as its bytes take at the limit. The bytes do move below, so what is seen
is real; how fast is EMULATED. Writes and flushes pass unlimited. Knows nothing of what runs below:
it is given an open device and closes it.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import DONE, READ, Completions, DeviceError, Ops, StorageDevice

_MONOTONIC, _NONBLOCK, _CLOEXEC, _ABSOLUTE = 1, 0o4000, 0o2000000, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Alarm:
    """A descriptor that becomes readable at a set time on the monotonic clock (timerfd)."""

    def __init__(self) -> None:
        self.fd = int(_LIBC.timerfd_create(_MONOTONIC, _NONBLOCK | _CLOEXEC))
        if self.fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise DeviceError(f"device limited needs a timer from the kernel, which says: {reason}")

    def set(self, at_ns: int) -> None:
        seconds, rest = divmod(max(at_ns, 1), 1_000_000_000)
        when = (ctypes.c_long * 4)(0, 0, seconds, rest)
        _LIBC.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(when), None)

    def silence(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)


class Limited(StorageDevice):
    """`inner` reading at most `bytes_s` a second. Tags must be unique among those in flight.

    With `held` False reads pass freely, so that opening a store of many blocks need not be waited
    for; it may be set at any time.
    """

    name = "limited"
    on_files = False

    def __init__(self, inner: StorageDevice, bytes_s: float, *, held: bool = True) -> None:
        super().__init__(inner.files, inner.arena, inner.depth)
        if not bytes_s > 0:
            raise ValueError(f"a limit of {bytes_s} bytes/s lets nothing through")
        self.inner = inner
        self.held = held
        self.engine = f"{inner.engine}; reads held to {bytes_s / 1e6:,.3g} MB/s, one at a time"
        self.notes = (*inner.notes, "read speed is EMULATED; writes are not limited")
        self._ns_per_byte = 1e9 / bytes_s
        self._free_ns = 0  # when the last read accepted will have been served
        self._due: dict[int, int] = {}  # tag: when its read will have been served
        self._held: list[tuple[int, int, int]] = []  # due, tag, result: ended below, not due yet
        self._alarm = _Alarm()
        self._epoll = select.epoll()
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._epoll.register(self._alarm.fd, select.EPOLLIN)
        self._closed = False

    @property
    def in_flight(self) -> int:
        return 0 if self._closed else self.inner.in_flight + len(self._held)

    def submit(self, ops: Ops) -> int:
        ops = ops[: self.depth - self.in_flight]
        taken = self.inner.submit(ops) if len(ops) else 0
        ops = ops[:taken]
        reads = ops[ops["kind"] == READ]
        if len(reads) and self.held:
            start_ns = max(self._free_ns, time.monotonic_ns())
            ends: NDArray[np.float64] = start_ns + np.cumsum(reads["length"]) * self._ns_per_byte
            due = ends.astype(np.int64).tolist()
            self._due.update(zip(reads["tag"].tolist(), due, strict=True))
            self._free_ns = due[-1]
        return taken

    def reap(self) -> Completions:
        self._alarm.silence()
        for tag, result in self.inner.reap().tolist():
            self._held.append((self._due.pop(tag, 0), tag, result))
        if not self._held:
            return np.empty(0, DONE)
        self._held.sort()
        now_ns = time.monotonic_ns()
        ready = [(tag, result) for due, tag, result in self._held if due <= now_ns]
        self._held = self._held[len(ready) :]
        if self._held:
            self._alarm.set(self._held[0][0])
        return np.array(ready, DONE)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Passed on; the time of a cancelled read is used up all the same."""
        self.inner.cancel(tags)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.inner.close()
        self._epoll.close()
        self._alarm.close()
