"""The storage device `emulated`: any other device, no faster than a drive profile says.

Decides when a completion may be seen: not before a model of the drive has served it
(`prefetchd.drive_model`, the one that simulations run on). The bytes do move below, so what is seen
is real; how fast is EMULATED. What comes even later from below is counted, since the figures are
then not the profile's. Knows nothing of what runs below: it is given an open device and closes it.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import DONE, READ, WRITE, Completions, DeviceError, File, Ops, StorageDevice
from prefetchd.drive_model import DriveModel

_MONOTONIC, _NONBLOCK, _CLOEXEC, _ABSOLUTE = 1, 0o4000, 0o2000000, 1
_LATE_SHARE, _LATE_NS = 1.2, 20_000  # of a modelled time, and beyond it
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Alarm:
    """A descriptor that becomes readable at a set time on the monotonic clock (timerfd)."""

    def __init__(self) -> None:
        self.fd = int(_LIBC.timerfd_create(_MONOTONIC, _NONBLOCK | _CLOEXEC))
        if self.fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise DeviceError(
                f"device emulated needs a timer from the kernel, which says: {reason}"
            )

    def set(self, at_ns: int) -> None:
        seconds, rest = divmod(max(at_ns, 1), 1_000_000_000)
        when = (ctypes.c_long * 4)(0, 0, seconds, rest)
        _LIBC.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(when), None)

    def silence(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)


class Emulated(StorageDevice):
    """`inner`, as fast as `model` at most. Tags must be unique among those in flight.

    With `held` False everything passes freely, so that opening a store of many blocks need not be
    waited for; it may be set at any time. Flushes always pass freely, and writes unless `writes`.
    """

    name = "emulated"
    on_files = False

    def __init__(
        self, inner: StorageDevice, model: DriveModel, *, held: bool = True, writes: bool = True
    ) -> None:
        super().__init__(inner.files, inner.arena, inner.depth)
        self.inner = inner
        self.model = model
        self.held = held
        self._kinds = (READ, WRITE) if writes else (READ,)
        self.engine = f"{inner.engine}; held to drive profile {model.profile.name}"
        self.notes = (*inner.notes, f"speed is EMULATED: drive profile {model.profile.name}")
        self.served = 0  # operations that were held, and are over
        self.late = 0  # of these, such as came much later from below than the model says
        self._due: dict[int, tuple[int, int]] = {}  # tag: when it is served, when it is late
        self._held: list[tuple[int, int, int]] = []  # due, tag, result: ended below, not due yet
        self._alarm = _Alarm()
        try:
            self._epoll = select.epoll()
        except OSError:
            self._alarm.close()
            raise
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._epoll.register(self._alarm.fd, select.EPOLLIN)
        self._closed = False

    @property
    def in_flight(self) -> int:
        return 0 if self._closed else self.inner.in_flight + len(self._held)

    def submit(self, ops: Ops) -> int:
        ops = ops[: self.depth - self.in_flight]
        taken = self.inner.submit(ops) if len(ops) else 0
        if self.held:
            for kind in self._kinds:
                self._hold(ops[:taken][ops["kind"][:taken] == kind], write=kind == WRITE)
        return taken

    def _hold(self, ops: Ops, *, write: bool) -> None:
        now_ns = time.monotonic_ns()
        lengths = np.maximum(ops["length"].astype(np.int64), 0)
        due = self.model.submit(lengths, write=write, now_ns=now_ns)
        late = now_ns + ((due - now_ns) * _LATE_SHARE).astype(np.int64) + _LATE_NS
        times = zip(due.tolist(), late.tolist(), strict=True)
        self._due.update(zip(ops["tag"].tolist(), times, strict=True))

    def reap(self) -> Completions:
        self._alarm.silence()
        now_ns = time.monotonic_ns()
        for tag, result in self.inner.reap().tolist():
            due_ns, late_ns = self._due.pop(tag, (0, 0))
            self._held.append((due_ns, tag, result))
            self.served += due_ns > 0
            self.late += 0 < late_ns < now_ns
        if not self._held:
            return np.empty(0, DONE)
        self._held.sort()
        ready = [(tag, result) for due, tag, result in self._held if due <= now_ns]
        self._held = self._held[len(ready) :]
        if self._held:
            self._alarm.set(self._held[0][0])
        return np.array(ready, DONE)

    def change_file(self, number: int, file: File) -> None:
        self.inner.change_file(number, file)
        self.files = self.inner.files

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Passed on; the time of what is cancelled is used up all the same."""
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
