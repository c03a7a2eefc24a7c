"""Payloads on their way from a caller's memory into write buffers, hashed as they are copied.

Decides in what portions that is done and by how many threads. Refuses to know what a block is for
and where it lies. Both copying and hashing are bound by memory, which one core does not use up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from prefetchd.format import page_checksum

_THREADS_MAX = 4
_PORTION_BYTES = 1 << 19
"""What is copied before it is hashed. Copying gives up the interpreter's lock and hashing a page
does not: with portions of one page two threads are slower than one, with 512 KiB almost twice as
fast; and it is still in the processor's cache when it is hashed."""
_SHARED_BYTES_MIN = 1 << 18  # a smaller block is copied sooner than handed over


def threads_for_copies() -> int:
    """As many as there are cores for us, up to a few: more do not copy faster."""
    return min(_THREADS_MAX, len(os.sched_getaffinity(0)))


def fill(payload: NDArray[np.uint8], pages: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
    """Copy `pages` (layers, page_bytes) into `payload` (layers, slot_bytes), padded with zeros;
    their checksums."""
    layers, page_bytes = pages.shape
    exact = payload[:, :page_bytes]
    step = max(1, _PORTION_BYTES // page_bytes)
    checksums = np.empty(layers, np.uint64)
    for first in range(0, layers, step):
        last = min(first + step, layers)
        exact[first:last] = pages[first:last]
        # The copy is hashed: should the caller write while we read, it is still true to itself.
        checksums[first:last] = [
            page_checksum(exact[layer], seed, layer) for layer in range(first, last)
        ]
    if page_bytes < payload.shape[1]:
        payload[:, page_bytes:] = 0
    return checksums


class Fillers:
    """Threads that fill beside the caller; none are started before they are needed."""

    def __init__(self, threads: int, block_bytes: int) -> None:
        helpers = threads - 1 if block_bytes >= _SHARED_BYTES_MIN else 0
        self.helpers = helpers
        self._pool = ThreadPoolExecutor(helpers, "prefetchd-fill") if helpers else None

    def shift(self) -> Shift:
        """The fills of one put."""
        return Shift(self._pool, self.helpers)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class Shift:
    """Use as a context manager: at its end, however it ends, nothing reads the caller's memory."""

    def __init__(self, pool: ThreadPoolExecutor | None, helpers: int) -> None:
        self._pool = pool
        self._helpers = helpers
        self._given: list[Future[None]] = []

    def do(self, task: Callable[[], None], *, last: bool) -> None:
        """Run `task` in a thread that is free, or else (or if it is the `last`) in this one."""
        if self._pool is None:
            task()
            return
        waiting = [future for future in self._given if not future.done()]
        for future in self._given:
            if future not in waiting:
                future.result()
        self._given = waiting
        if len(waiting) < self._helpers and not last:
            self._given.append(self._pool.submit(task))
        else:
            task()

    def __enter__(self) -> Shift:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        failures = [future.exception() for future in self._given]
        for failure in failures:
            if failure is not None and error is None:
                raise failure
