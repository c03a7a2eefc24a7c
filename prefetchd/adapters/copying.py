"""Work done by a second thread while the first computes: one piece at a time, in order.

Decides who works and what is told of the end. Refuses to know what is done: it is given a piece of
work that is waited for, and what is to be done after it. torch, the kernel and the checks of pages
let go of the interpreter's lock, so the two threads hardly meet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import torch


class Copy:
    """A piece of work that has begun. A bare lock tells of each end: an executor's futures cost
    the thread that computes 50 us a piece."""

    def __init__(self, work: Callable[[], object], then: Callable[[], object]) -> None:
        self._work = work
        self._then = then
        self._error: BaseException | None = None
        self._made, self._over = threading.Lock(), threading.Lock()
        self._made.acquire()
        self._over.acquire()

    def run(self) -> None:
        """In the copier's thread. What follows is left out where the work has failed."""
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._made.release()
        if self._error is None:
            # What cannot be asked for ahead of time fails again where it is waited for.
            with suppress(Exception):
                self._then()
        self._over.release()

    def wait(self) -> None:
        """Until the work is done. Raises what it raised."""
        with self._made:
            pass
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Until nothing is left to do. Whether it was done is nobody's concern any more."""
        with self._over:
            pass


class Copier:
    """One thread, started by the first piece of work; `close` ends it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], object], then: Callable[[], object]) -> Copy:
        """`then` follows the work, and nobody waits for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetchd-copy", daemon=True)
            self._thread.start()
        copy = Copy(work, then)
        self._queue.put(copy)
        return copy

    def _run(self) -> None:
        # Whether a caller's tensors may be written to outside this mode depends on where they were
        # made, within it on nothing.
        with torch.inference_mode():
            while (copy := self._queue.get()) is not None:
                copy.run()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
