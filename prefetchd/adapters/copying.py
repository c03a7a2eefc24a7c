"""Copies made by a second thread while the first computes: one at a time.

Decides who copies. Refuses to know what: it is given a copy to make, and asked for its end. torch
lets go of the interpreter's lock while it copies, so the two threads hardly meet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Copier:
    """One thread, started by the first copy; `close` ends it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "prefetchd-copy")

    def begin(self, copy: Callable[[], bool]) -> Future[bool]:
        """`copy` tells whether it has been made."""
        return self._threads.submit(_made, copy)

    def close(self) -> None:
        self._threads.shutdown()


def _made(copy: Callable[[], bool]) -> bool:
    # Whether a caller's tensors may be written to outside this mode depends on where they were
    # made, within it on nothing.
    with torch.inference_mode():
        return copy()
