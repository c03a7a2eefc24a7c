"""The live loop: one core, one driver, one clock, a lock, and a thread for when nobody calls.

Decides who drives. A caller that asks for something drives the core and the device itself, in its
own thread, so that a demand costs no hand-over between threads. While callers compute, the pump
thread notices completions, verifies pages, starts what is queued and runs the predictor. Holds no
policy and knows no file. Verification runs outside the lock: until it is over the slots are the
device's, so nobody else looks at them.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefetchd.core import Core
from prefetchd.driver import Driver
from prefetchd.model import Cancel, Event, Hinted, Idle, PlanSoon, Read, Ready
from prefetchd.writer import Written

log = logging.getLogger("prefetchd")

_SAMPLES = 1 << 16
_NAP_NS = 100_000_000  # the longest sleep of a waiter: deadlines are looked at this often
_SHARED_NAP_NS = 2_000_000  # the same while several threads wait for one device
_PUMP_NAP_MS, _PUMP_IDLE_MS = 50, 1000


class EngineError(Exception):
    """The engine has stopped, or was closed; says why."""


class Samples:
    """The last 65,536 values of something, kept whole for percentiles."""

    def __init__(self) -> None:
        self._values = np.zeros(_SAMPLES, np.int64)
        self.count = 0

    def add(self, value: int) -> None:
        self._values[self.count % _SAMPLES] = value
        self.count += 1

    def values(self) -> NDArray[np.int64]:
        return self._values[: min(self.count, _SAMPLES)].copy()


class Engine:
    """`on_ready` and `on_written` are called under the lock: they must be short."""

    def __init__(
        self,
        core: Core,
        driver: Driver,
        on_ready: Callable[[Ready], None],
        on_written: Callable[[Written], None],
    ) -> None:
        self.core = core
        self.driver = driver
        self.lock = threading.RLock()
        self.clock = time.monotonic_ns
        self.decision_ns = Samples()
        self._on_ready = on_ready
        self._on_written = on_written
        self._foreground = 0
        self._plan_wanted = False
        self._parked = False
        self._stopping = False
        self._broken: BaseException | None = None
        self._pump_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._front_wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._pump, name="prefetchd-pump", daemon=True)
        self._thread.start()

    # --- driving ---

    def handle(self, event: Event) -> None:
        """Give the core an event and carry out what it says. Raises EngineError when stopped."""
        with self.lock:
            self.check()
            now_ns = self.clock()
            commands = self.core.handle(event, now_ns)
            if isinstance(event, Hinted | Idle):
                self.decision_ns.add(self.clock() - now_ns)
            for command in commands:
                if isinstance(command, Read):
                    self.driver.read(command)
                elif isinstance(command, Ready):
                    self._on_ready(command)
                elif isinstance(command, PlanSoon):
                    self._plan_wanted = True
                elif isinstance(command, Cancel):
                    self.driver.cancel(command)
                else:
                    raise TypeError(f"unknown command {command}")
            self.driver.start(now_ns)

    def collect(self) -> bool:
        """Take note of whatever the device has finished; whether there was anything."""
        with self.lock:
            reads, written = self.driver.reap(self.clock())
            for end in written:
                self._on_written(end)
            if reads is not None or written or self.driver.queued:
                self.driver.start(self.clock())
        if reads is None:
            return bool(written)
        self.handle(self.driver.verify(reads))
        return True

    def wait(self, done: Callable[[], bool], deadline_ns: int | None = None) -> bool:
        """Drive until `done()`, or the deadline (on `clock`). Returns `done()`."""
        with self.lock:
            self._foreground += 1
        try:
            poller = select.poll()
            poller.register(self.driver.device.fileno(), select.POLLIN)
            poller.register(self._front_wake, select.POLLIN)
            while not done():
                self.check()
                if self.collect():
                    continue
                left_ns = _NAP_NS if self._foreground == 1 else _SHARED_NAP_NS
                if deadline_ns is not None:
                    left_ns = min(left_ns, deadline_ns - self.clock())
                if left_ns <= 0:
                    break
                if not poller.poll(left_ns / 1e6):
                    self.handle(Idle())
                _drain(self._front_wake)
        finally:
            with self.lock:
                self._foreground -= 1
            self.wake()
        return done()

    def wake(self) -> None:
        """Let the pump take over what is left to do."""
        if self._plan_wanted or (self._parked and (self.core.reading or self.driver.queued)):
            os.eventfd_write(self._pump_wake, 1)

    def resolved(self) -> None:
        """Something that somebody waits for has ended: tell the waiters in other threads."""
        if self._foreground and threading.current_thread() is self._thread:
            os.eventfd_write(self._front_wake, 1)

    # --- the pump ---

    def _pump(self) -> None:
        try:
            both, wake_only = select.poll(), select.poll()
            both.register(self.driver.device.fileno(), select.POLLIN)
            both.register(self._pump_wake, select.POLLIN)
            wake_only.register(self._pump_wake, select.POLLIN)
            while not self._stopping:
                self._parked = self._foreground > 0  # the foreground has the device to itself
                poller = wake_only if self._parked else both
                busy = self.core.reading or self.driver.writer.in_flight
                event = poller.poll(_PUMP_NAP_MS if busy else _PUMP_IDLE_MS)
                _drain(self._pump_wake)
                if self._foreground or self._stopping:
                    continue
                self._turn(overdue=not event and bool(busy))
        except BaseException as error:
            self._broken = error
            log.exception("the pump thread has stopped")
            os.eventfd_write(self._front_wake, 1)

    def _turn(self, *, overdue: bool) -> None:
        self.collect()
        if self._plan_wanted or overdue:
            with self.lock:
                self._plan_wanted = False
                self.handle(Idle())

    def check(self) -> None:
        """Raise EngineError if the engine can do nothing more."""
        if self._broken is not None:
            raise EngineError(f"the engine has stopped: {self._broken!r}") from self._broken
        if self._stopping:
            raise EngineError("the engine is closed")

    def stop(self) -> None:
        """End the pump thread. The device is untouched."""
        self._stopping = True
        os.eventfd_write(self._pump_wake, 1)
        self._thread.join()
        os.close(self._pump_wake)
        os.close(self._front_wake)


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return
