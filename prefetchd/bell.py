"""A bell: wakes threads that wait for a descriptor beside it.

Decides nothing; refuses to know who rings and why.
"""

from __future__ import annotations

import os
import weakref


class Bell:
    """An eventfd as long-lived as this object: a waiter may look at it after its owner's end."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return
