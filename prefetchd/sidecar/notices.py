"""What the daemon is to hear, and has no answer: with the next request, or soon.

Decides how long tickets that were given back, and pages that were read in place, may wait for a
request that takes them along. Between two demands a release then costs neither end a system call,
and the daemon no turn; a caller that goes on to compute gives its leases back all the same. Refuses
to know sockets.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from prefetchd.sidecar.conversation import Use, release_frame, used_frames

WAIT_S = 0.002
_PAGES_MAX = 1 << 18


class Notices:
    """`flush` has those sent that nothing took along. It is a bound method, whose owner this does
    not keep alive. All other methods are called under the owner's lock."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._tickets: list[int] = []
        self._uses: deque[Use] = deque()
        self._pages = 0  # of these
        self.dropped = 0
        self._called = threading.Event()
        self._flush = weakref.WeakMethod(flush, lambda _: self._called.set())
        self._thread: threading.Thread | None = None
        self._taken = False
        self.awake = False
        """Whether its thread looks again."""

    @property
    def waiting(self) -> bool:
        return bool(self._tickets or self._uses)

    def release(self, number: int) -> None:
        """A ticket was given back."""
        self._tickets.append(number)
        self._look_soon()

    def use(self, use: Use) -> None:
        """Pages were read in place. The daemon only learns from that: if it takes nothing for long,
        the oldest are dropped, and counted."""
        self._uses.append(use)
        self._pages += len(use[0])
        while self._pages > _PAGES_MAX and len(self._uses) > 1:
            self.dropped += 1
            self._pages -= len(self._uses.popleft()[0])
        self._look_soon()

    def _look_soon(self) -> None:
        if self.awake:
            return
        self.awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="prefetchd-notices", daemon=True)
            self._thread.start()
        self._called.set()

    def take(self, most: int) -> bytes:
        """What tells the daemon of all of them, in messages of at most so many pages."""
        tickets, uses = self._tickets, self._uses
        self._tickets, self._uses, self._pages, self._taken = [], deque(), 0, True
        released = release_frame(tickets) if tickets else b""
        return used_frames(uses, most) + released if uses else released

    def look(self) -> bool:
        """Whether they have waited long enough. With nothing new, the thread rests."""
        due = self.waiting and not self._taken
        self.awake = self.waiting or self._taken
        self._taken = False
        return due

    def clear(self) -> None:
        """The daemon has gone, and with it what was held there."""
        self.dropped += len(self._uses)
        self._tickets, self._uses, self._pages = [], deque(), 0

    def _run(self) -> None:
        while self._flush() is not None:
            self._called.wait()
            self._called.clear()
            while self.awake:
                time.sleep(WAIT_S)
                if not self._owner_lives():
                    return

    def _owner_lives(self) -> bool:
        flush = self._flush()
        if flush is None:
            return False
        flush()
        return True
