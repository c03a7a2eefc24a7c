"""`uring_sqpoll`: the same engine with a kernel thread that polls for submissions (SQPOLL).

Submitting then costs no system call, some 90 us a batch less on the caller's thread where the
block layer is slow to enter, and one processor is kept busy all the while. So it is never chosen
for anyone: name it where a core is to spare.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from prefetchd.device import OP, SYNC, Arena, DeviceError, File
from prefetchd.device import StorageDevice as _StorageDevice
from prefetchd.devices.uring import Uring as _Uring

_IDLE_MS = 20
_PROBE_TIMEOUT_NS = 2_000_000_000
_ORDERED = ("x86_64", "AMD64", "i686")


class UringSqpoll(_Uring, _StorageDevice):
    """See the contract. Raises DeviceError as well where the polling thread does nothing."""

    name: ClassVar[str] = "uring_sqpoll"

    def __init__(self, files: Sequence[File], arena: Arena, depth: int) -> None:
        if platform.machine() not in _ORDERED:
            raise DeviceError(
                f"uring_sqpoll needs a processor that shows stores in order, this is "
                f"{platform.machine()}; use uring"
            )
        super().__init__(files, arena, depth, poll_idle_ms=_IDLE_MS)
        self.engine += ", submission polling (one processor busy)"
        if files:
            self._probe()

    def _probe(self) -> None:
        """One flush, with a time limit: some kernels accept the flag and then never poll."""
        op = np.zeros(1, OP)
        op["kind"] = SYNC
        self.submit(op)
        self.wait(_PROBE_TIMEOUT_NS)
        if len(self.reap()) == 0:
            self._ring.close()  # a flush uses no memory of ours
            raise DeviceError(
                "uring_sqpoll: the kernel's polling thread did not take a submission in 2 s; "
                "use uring"
            )
