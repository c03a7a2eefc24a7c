"""A device that is kept less deep than it was opened: fewer operations in flight at once.

Decides how many are handed on. What it is to the device, which goes on being the owner of its
memory and files, is nobody's but whoever made it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import Completions, Ops, StorageDevice


class Shallow(StorageDevice):
    """`inner` with at most `depth` operations in flight; `close` is its owner's to call."""

    def __init__(self, inner: StorageDevice, depth: int) -> None:
        super().__init__(inner.files, inner.arena, depth)
        self._inner = inner

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    def submit(self, ops: Ops) -> int:
        room = max(0, self.depth - self._inner.in_flight)
        return self._inner.submit(ops[:room]) if room else 0

    def reap(self) -> Completions:
        return self._inner.reap()

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        self._inner.cancel(tags)

    def fileno(self) -> int:
        return self._inner.fileno()

    def wait(self, timeout_ns: int, count: int = 1) -> None:
        self._inner.wait(timeout_ns, count)

    def close(self) -> None:
        self._inner.close()


def at_most(device: StorageDevice, depth: int) -> StorageDevice:
    """The device itself if it is no deeper."""
    return Shallow(device, depth) if depth < device.depth else device
