"""The thread for when nobody calls: takes hints as they come, and between them looks around.

Decides how often it looks: less often the less there is. Refuses to know what there is to be done
and how; whoever made it says that. It waits on a queue, never on the device: waking it must not
cost the caller the interpreter lock, and reads that nobody waits for are best collected several at
a time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sized

from prefetchd.model import Hinted

_NAP_S, _IDLE_S = 150e-6, 50e-3
_ASLEEP_S, _LOOKS_BEFORE = 0.5, 60  # when it has looked so often, some seconds, in vain


_YIELDS_MAX, _YIELD_S = 20, 50e-6


def give_way(urgent: Sized) -> None:
    """Let callers who are in a hurry have the lock first, but not for ever."""
    for _ in range(_YIELDS_MAX):
        if not urgent:
            return
        time.sleep(_YIELD_S)


class Pump:
    """`act` takes a hint or None (look around), and tells whether it found anything to do.
    `failed` is told what `act` raised, which ends the thread. `open_ended` says that something is
    under way which time alone may end."""

    def __init__(
        self,
        act: Callable[[Hinted | None], bool],
        failed: Callable[[BaseException], None],
        open_ended: Callable[[], bool],
    ) -> None:
        self.inbox: queue.SimpleQueue[Hinted | None] = queue.SimpleQueue()  # None: look around
        self.hints: deque[Hinted] = deque()
        """Those that were posted and not handled yet; `act` takes the first of them away."""
        self._called = False
        self._act = act
        self._failed = failed
        self._open_ended = open_ended
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="prefetchd-pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def call(self) -> None:
        """Ask the pump to look around; once is enough until it has."""
        if not self._called:
            self._called = True
            self.inbox.put(None)

    def post(self, event: Hinted) -> None:
        self.hints.append(event)
        self.inbox.put(event)

    def stop(self) -> None:
        """End the thread; it does nothing more when this returns."""
        self._stopping = True
        self.inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        nap_s, looks = _IDLE_S, 0
        try:
            while not self._stopping:
                event = None
                try:
                    event = self.inbox.get(timeout=nap_s)
                    self._called &= event is not None
                    nap_s, looks = _NAP_S, 0
                except queue.Empty:
                    looks = 0 if self._open_ended() else looks + 1
                    nap_s = min(2 * nap_s, _IDLE_S) if looks < _LOOKS_BEFORE else _ASLEEP_S
                if self._stopping:
                    return
                if self._act(event):
                    nap_s, looks = _NAP_S, 0
        except BaseException as error:
            self._failed(error)
