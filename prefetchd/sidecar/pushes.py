"""A namespace's pushes into buffers that clients have lent: one after another, two at a time.

Decides in which threads CUDA is waited for, so that the daemon's loop never is: one starts pushes
and opens handles, in the order in which they were asked for; another waits for their events in
that order, and gives buffers back. So a buffer is given back only when every push into it that was
asked for before has ended. Refuses to know clients and messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

from prefetchd.gpu import Borrowed, GpuDevice, GpuError
from prefetchd.model import Slots

log = logging.getLogger("prefetchd")

Told = Callable[[str], None]
"""Why it failed; empty if it did not."""


class Pusher:
    """Callbacks are called in threads of its own; once it is closed, nothing is done or told."""

    def __init__(self, gpu: GpuDevice, name: str) -> None:
        self.gpu = gpu
        self._starting = ThreadPoolExecutor(1, f"prefetchd-push-{name}")
        self._ending = ThreadPoolExecutor(1, f"prefetchd-pushed-{name}")
        self._borrowed: list[Borrowed] = []
        self._lock = Lock()

    # --- what is asked for, in this order ---

    def borrow(
        self, handle: bytes, pages: int, owner: object, told: Callable[[Borrowed | str], None]
    ) -> None:
        """`told`: the buffer, or why not. `owner`: no two of them may share memory."""
        self._submit(partial(self._borrow, handle, pages, owner, told))

    def push(self, borrowed: Borrowed, slots: Slots, start: int, told: Told) -> None:
        """`told` when the pages are there: their event is done, so no stream of anybody's can
        read what was there before."""
        self._submit(partial(self._push, borrowed, slots, start, told))

    def give_back(self, borrowed: Borrowed, told: Told) -> None:
        self._submit(lambda: self._ending.submit(self._give_back, borrowed, told))

    def _submit(self, work: Callable[[], object]) -> None:
        try:
            self._starting.submit(work)
        except RuntimeError:
            log.debug("a push came after the end")  # everything was given back by then

    # --- in the threads ---

    def _borrow(
        self, handle: bytes, pages: int, owner: object, told: Callable[[Borrowed | str], None]
    ) -> None:
        try:
            borrowed = self.gpu.borrow(handle, pages)
        except Exception as error:
            told(str(error))
            return
        borrowed.owner = owner
        with self._lock:
            strange = [one for one in self._borrowed if one.owner is not owner]
            overlaps = any(
                one.address < borrowed.end and borrowed.address < one.end for one in strange
            )
            if not overlaps:
                self._borrowed.append(borrowed)
        if overlaps:
            self._close(borrowed)
            told("the buffer is another client's")
        else:
            told(borrowed)

    def _push(self, borrowed: Borrowed, slots: Slots, start: int, told: Told) -> None:
        try:
            push = self.gpu.push(slots, borrowed.buffer, start)
        except Exception as error:
            told(str(error))
        else:
            self._ending.submit(self._wait, push.wait, told)

    def _wait(self, wait: Callable[[], None], told: Told) -> None:
        try:
            wait()
        except Exception as error:
            told(str(error))
        else:
            told("")

    def _give_back(self, borrowed: Borrowed, told: Told) -> None:
        with self._lock:
            self._borrowed.remove(borrowed)
        told(self._close(borrowed))

    def _close(self, borrowed: Borrowed) -> str:
        try:
            borrowed.close()
        except GpuError as error:
            log.warning("%s", error)
            return str(error)
        return ""

    def close(self) -> None:
        """Wait for what was asked for, then give everything back."""
        self._starting.shutdown()
        self._ending.shutdown()
        for borrowed in self._borrowed:
            self._close(borrowed)
        self._borrowed.clear()
