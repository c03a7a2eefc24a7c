"""The threads that wait for an engine: who of them drives it, and who is woken for what.

Decides that whoever waits drives the engine himself, unless a loop has promised to (`attend`): then
he sleeps until a write has ended, and does not take lock and interpreter from that loop only to
find what it is about to find. Refuses to know what is waited for, and what driving is.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sized
from typing import Any

from prefetchd.bell import Bell

# The longest sleep of a waiter, alone and while several threads wait for one device.
_NAP_NS, _SHARED_NAP_NS = 100_000_000, 2_000_000


class Foreground:
    """`lock` is the engine's; `collect` takes note of what has ended, if anything has; `idle` is
    called when nothing has for a while; both raise what ends the waiting. `unheard`: what has
    ended without the device's descriptor telling of it, so that a loop sleeps on."""

    def __init__(
        self,
        lock: Any,
        device: Callable[[], int],
        collect: Callable[[], bool],
        idle: Callable[[], None],
        check: Callable[[], None],
        unheard: Sized,
    ) -> None:
        self.count = 0
        """How many there are, a loop that attends included."""
        self.attending = 0
        """How many of them have promised to drive the engine for all."""
        self._lock = lock
        self._device = device
        self._collect = collect
        self._idle = idle
        self._check = check
        self._unheard = unheard
        self._threads: set[int] = set()
        self._bell = Bell()
        self._writes = threading.Condition(lock)
        self._writes_ended = 0  # how often `_writes` was notified of something

    def wait(
        self, done: Callable[[], bool], deadline_ns: int | None, clock: Callable[[], int]
    ) -> bool:
        """Until `done()`, or the deadline, on `clock`. Returns `done()`."""
        self._enter()
        try:
            poller = select.poll()
            poller.register(self._device(), select.POLLIN)
            poller.register(self._bell, select.POLLIN)
            while True:
                seen = self._writes_ended
                if done():
                    return True
                self._check()
                if (not self.attending or self._unheard) and self._collect():
                    continue
                left_ns = _NAP_NS if self.count == 1 else _SHARED_NAP_NS
                if deadline_ns is not None:
                    left_ns = min(left_ns, deadline_ns - clock())
                if left_ns <= 0:
                    return done()
                if self.attending:
                    self._sleep(seen, left_ns)
                    continue
                if not poller.poll(left_ns / 1e6):
                    self._idle()
                self._bell.silence()
        finally:
            self._leave()

    def _sleep(self, seen: int, left_ns: int) -> None:
        """Until a write ends: for no longer than a short while, and not at all if one has since
        `seen`."""
        with self._lock:
            if self.attending and self._writes_ended == seen:
                self._writes.wait(min(left_ns, _SHARED_NAP_NS) / 1e9)

    def attend(self) -> None:
        """The calling thread drives for all until it calls `neglect`."""
        with self._lock:
            self.attending += 1
            self._enter()
            if self.count > self.attending:
                self._bell.ring()  # who sleeps on the device is to sleep on the writes

    def neglect(self) -> None:
        with self._lock:
            self.attending -= 1
            self._leave()
            self._writes.notify_all()  # one of them drives now

    def _enter(self) -> None:
        with self._lock:
            self.count += 1
            self._threads.add(threading.get_ident())

    def _leave(self) -> None:
        with self._lock:
            self.count -= 1
            self._threads.discard(threading.get_ident())

    def wrote(self) -> None:
        """Writes have ended: a buffer or an extent may be free. Called under the lock."""
        self.resolved()
        self._tell()

    def resolved(self) -> None:
        """Something that a thread may wait for has ended. While a loop attends, whoever waits
        beside it waits for writes, or looks by himself before long."""
        others = self.count - (threading.get_ident() in self._threads) if self.count else 0
        if others and not self.attending:
            self._bell.ring()

    def end(self) -> None:
        """There is nothing to wait for any more."""
        self._bell.ring()
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        self._writes_ended += 1
        self._writes.notify_all()
