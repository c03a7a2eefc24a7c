"""Tickets that were given back: on their way to the daemon with the next request, or soon.

Decides how long a release may wait for a request that takes it along. Between two demands it then
costs neither end a system call, and the daemon no turn; a caller that goes on to compute gives its
leases back all the same. Refuses to know sockets.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

_WAIT_S = 0.002


class Releases:
    """`flush` sends what has not been taken along, and tells whether there was anything to take
    since it was last called. It is a bound method, whose owner this does not keep alive."""

    def __init__(self, flush: Callable[[], bool]) -> None:
        self._called = threading.Event()
        self._flush = weakref.WeakMethod(flush, lambda _: self._called.set())
        self._thread: threading.Thread | None = None
        self._awake = False
        self._ended = False

    def soon(self) -> None:
        """Something was given back. Called under the owner's lock, which `flush` takes as well."""
        if self._awake:
            return
        self._awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetchd-release", daemon=True)
            self._thread.start()
        self._called.set()

    def rest(self) -> None:
        """Nothing is there to be given back. Called under the owner's lock."""
        self._awake = False

    def end(self) -> None:
        self._ended = True
        self._called.set()

    def _run(self) -> None:
        while True:
            self._called.wait()
            self._called.clear()
            going_on = True
            while going_on:
                if self._ended:
                    return
                time.sleep(_WAIT_S)
                flush = self._flush()
                if flush is None:
                    return
                going_on = flush()
                del flush
