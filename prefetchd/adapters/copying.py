"""Work done by a second thread while the first computes: one piece at a time, in order.

Decides who works, what is told of the end, and how work ends that nobody wants any more. Refuses to
know what is done: it is given a piece of work that is waited for, and what is to be done after it.
torch, the kernel and the checks of pages let go of the interpreter's lock, so the two threads
hardly meet.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from prefetchd.engine import EngineError

_CLOSED = "the store is closed"
_END_S = 5.0
"""The longest that an end waits for the thread, whose work takes milliseconds once it is unwanted:
nothing may keep the interpreter from its exit."""


class Copy:
    """A piece of work, and what follows it: `work` is given this, to look whether it is `unwanted`;
    `wake` is called when that has changed, for work that sleeps. Bare locks tell of each end: an
    executor's futures cost the thread that computes 50 us a piece."""

    def __init__(
        self, work: Callable[[Copy], object], then: Callable[[], object], wake: Callable[[], object]
    ) -> None:
        self.unwanted = False
        self._work: Any = work
        self._then: Any = then
        self._wake = wake
        self._error: BaseException | None = None
        self._begun, self._made, self._over = (threading.Lock() for _ in range(3))
        self._made.acquire()
        self._over.acquire()

    def run(self) -> None:
        """In the copier's thread. What follows is left out where the work has failed."""
        if self._begun.acquire(blocking=False):
            self._make()
            self._follow()

    def _make(self) -> None:
        work, self._work = self._work, None  # what is done must not keep a sequence alive
        self._do(self._made, work, self)

    def _follow(self) -> None:
        then, self._then = self._then, None
        self._do(self._over, then)

    def _do(self, ended: threading.Lock, what: Callable[..., object], *given: Copy) -> None:
        try:
            if self._error is None and not self.unwanted:
                what(*given)
        except BaseException as error:
            self._error = error
        finally:
            ended.release()

    def wait(self) -> None:
        """Until the work is done. Raises what it raised, or what followed it, if that has ended,
        and EngineError if it was dropped: then nobody may take it for done."""
        with self._made:
            pass
        if self._error is not None:
            raise self._error
        if self.unwanted:
            raise EngineError(_CLOSED)

    def finish(self) -> None:
        """Until nothing is left to do. Raises as `wait` does."""
        with self._over:
            pass
        self.wait()

    def drop(self) -> None:
        """Whether it is done is nobody's concern any more."""
        self.unwanted = True
        self._wake()

    def end(self) -> None:
        """Drop it, and wait until it does nothing any more. Also if it was never given to a copier:
        what has not begun never will."""
        self.drop()
        if self._begun.acquire(blocking=False):
            self._work = self._then = None
            self._made.release()
            self._over.release()
        with self._over:
            self._error = None  # which would keep alive whatever has seen it


class Copier:
    """One thread, started by the first piece of work. `close` ends it, and so does the end of this
    object or of the interpreter: a thread that is inside torch then would abort the process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._newest: deque[Copy] = deque(maxlen=1)
        self._thread = threading.Thread(
            target=_run, args=(self._queue,), name="prefetchd-copy", daemon=True
        )
        self._end = weakref.finalize(self, _end, self._queue, self._newest, self._thread)

    def begin(self, copy: Copy) -> None:
        """Raises EngineError once closed."""
        self._check()
        if not self._thread.is_alive():
            self._thread.start()
        self._newest.append(copy)
        self._queue.put(copy)
        self._check()  # else it may lie behind the end of the queue

    def _check(self) -> None:
        if not self._end.alive:
            raise EngineError(_CLOSED)

    def close(self) -> None:
        self._end()


def _run(queue: SimpleQueue[Copy | None]) -> None:
    # Whether a caller's tensors may be written to outside this mode depends on where they were
    # made, within it on nothing.
    with torch.inference_mode():
        while (copy := queue.get()) is not None:
            copy.run()
            del copy  # while this waits for the next


def _end(queue: SimpleQueue[Copy | None], newest: deque[Copy], thread: threading.Thread) -> None:
    """Called by any thread, even by the one that is to end."""
    queue.put(None)
    for copy in list(newest):  # another thread may be adding one
        copy.drop()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_END_S)
