"""Operations of a store on a device that nobody else uses: while it is opened and closed.

Decides how long a device may be silent, and what is said of one that refuses. Refuses to
know what the bytes mean.
"""

from __future__ import annotations

import errno
import time

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import OP, Ops, StorageDevice
from prefetchd.hostinfo import errno_name

_TIMEOUT_NS = 30_000_000_000
_CLOSE_TIMEOUT_NS = 10_000_000_000

Results = NDArray[np.int64]
"""Bytes moved or -errno, one an operation."""


def operations(
    device: StorageDevice,
    rows: NDArray[np.uint8],
    kind: int,
    offsets: NDArray[np.int64],
    files: NDArray[np.int64] | int = 0,
) -> Ops:
    """One operation per row of `rows`, a view into the device's arena."""
    ops = np.zeros(len(rows), OP)
    start = rows.ctypes.data - device.arena.ctypes.data
    ops["tag"] = np.arange(len(rows))
    ops["offset"] = offsets
    ops["memory"] = start + np.arange(len(rows)) * rows.shape[1]
    ops["length"] = rows.shape[1]
    ops["file"] = files
    ops["kind"] = kind
    return ops


def transfer(device: StorageDevice, ops: Ops) -> Results:
    """Carry out operations tagged 0..n-1 on an idle device; their results in order."""
    return Transfer(device, ops).results()


class Transfer:
    """Operations tagged 0..n-1 on an idle device, begun at once as far as there is room."""

    def __init__(self, device: StorageDevice, ops: Ops) -> None:
        self._device = device
        self._results = np.full(len(ops), -errno.ETIMEDOUT, np.int64)
        self._left = ops[device.submit(ops) :]

    def results(self) -> Results:
        """In order, when all have ended. What does not end within 30 s gives -ETIMEDOUT. Late
        completions of others are passed over."""
        device, left, results, ended = self._device, self._left, self._results, 0
        # Many in one turn, but never so many that the device runs dry.
        turn = max(1, device.depth // 4)
        deadline_ns = time.monotonic_ns() + _TIMEOUT_NS
        while ended < len(results) and (patience_ns := deadline_ns - time.monotonic_ns()) > 0:
            # This may return early, with nothing to reap.
            device.wait(patience_ns, max(1, min(turn, len(results) - len(left) - ended)))
            done = device.reap()
            mine = done[done["tag"] < len(results)]
            results[mine["tag"].astype(np.int64)] = mine["result"]
            ended += len(mine)
            left = left[device.submit(left) :]
        return results


def refused(where: str, device: str, what: str, size: int, result: int) -> str:
    reason = errno_name(result) if result < 0 else f"only {result} of {size} bytes"
    return (
        f"store {where}: {what} the first page through {device} failed: {reason}; O_DIRECT was "
        "accepted at open but does not work here, or the device is failing: use another path"
    )


def drain(device: StorageDevice) -> None:
    """Let what is in flight end, within a limit, so that the device can be used alone."""
    deadline_ns = time.monotonic_ns() + _CLOSE_TIMEOUT_NS
    while device.in_flight and (patience_ns := deadline_ns - time.monotonic_ns()) > 0:
        device.wait(patience_ns)  # which may return early, with nothing to reap
        device.reap()
