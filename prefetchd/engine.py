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
import queue
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefetchd.core import Core
from prefetchd.driver import Driver
from prefetchd.model import (
    Cancel,
    Command,
    Event,
    Hinted,
    Idle,
    PlanSoon,
    Read,
    Ready,
    Released,
)
from prefetchd.writer import Written

log = logging.getLogger("prefetchd")

_SAMPLES = 1 << 16
_NAP_NS = 100_000_000  # the longest sleep of a waiter: deadlines are looked at this often
_SHARED_NAP_NS = 2_000_000  # the same while several threads wait for one device
_PUMP_NAP_S, _PUMP_IDLE_S = 150e-6, 50e-3
_LOOK_NS = 50_000_000  # how often deadlines are looked at while reads are in flight
_INBOX_MAX = 64
_TENDED_NS = 20_000_000  # so long after its last turn a caller is expected back
_STARVED_MAX = 8  # calls too short for any step, after which one is made all the same
_STEP_NS, _COLLECT_NS = 250_000, 150_000  # time to leave for a step, and for what has arrived


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
        self._waiters: set[int] = set()  # the threads in the foreground
        self.awaiting: list[Callable[[], object]] = []  # told when there is nothing to come
        self._plan_wanted = False
        self._look_ns = 0
        self._tended_ns = -_TENDED_NS
        self._starved = 0
        self._stopping = False
        self._broken: BaseException | None = None
        self._inbox: queue.SimpleQueue[Hinted | None] = queue.SimpleQueue()  # None: look around
        self.hints_dropped = 0
        self.urgent: deque[int] = deque()  # one entry a caller that is about to take the lock
        self._released: deque[int] = deque()
        self._front_wake = _bell(self)
        self._thread = threading.Thread(target=self._pump, name="prefetchd-pump", daemon=True)
        self._thread.start()

    # --- driving ---

    def handle(self, event: Event) -> None:
        """Give the core an event and carry out what it says. Raises EngineError when stopped."""
        with self.lock:
            self.check()
            now_ns = self.clock()
            commands: list[Command] = []
            while self._released:
                commands += self.core.handle(Released(self._released.popleft()), now_ns)
            commands += self.core.handle(event, now_ns)
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
            self.check()
            reads, written = self.driver.reap(self.clock())
            for end in written:
                self._on_written(end)
            if written:
                self.resolved()  # a write buffer is free
            if reads is not None or written or self.driver.queued:
                self.driver.start(self.clock())
        if reads is None:
            return bool(written)
        self.handle(self.driver.verify(reads))
        return True

    def wait(self, done: Callable[[], bool], deadline_ns: int | None = None) -> bool:
        """Drive until `done()`, or the deadline (on `clock`). Returns `done()`."""
        if done():
            return True
        with self.lock:
            self.check()
            self._foreground += 1
            self._waiters.add(threading.get_ident())
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
                self._waiters.discard(threading.get_ident())
            self.wake()
        return done()

    def release(self, number: int) -> None:
        """A reader is done with a ticket: noted at once, acted on by whoever drives next.

        Raises EngineError when stopped.
        """
        self.check()
        self._released.append(number)
        if self.core.unanswered:
            self._inbox.put(None)  # somebody may be waiting for just these slots

    def post(self, event: Hinted) -> None:
        """Take a hint: here and now if the caller tends the engine, else by the pump.

        A pump that cannot keep up loses hints rather than time: they are counted and dropped.
        Raises EngineError when stopped.
        """
        if self.tended():
            self.handle(event)
            return
        self.check()
        if self._inbox.qsize() >= _INBOX_MAX:
            self.hints_dropped += 1
        else:
            self._inbox.put(event)

    def tend(self, until_ns: int) -> None:
        """Give the engine this thread until then: learn, plan, collect; then just sleep.

        A host thread that waits for its GPU anyway does here what the pump would otherwise do
        beside it, at the price of the interpreter's lock going to and fro.
        """
        now_ns = self.clock()
        self._tended_ns = max(self._tended_ns, until_ns, now_ns)
        last_ns = until_ns - min(_STEP_NS, (until_ns - now_ns) // 2)
        self._starved += 1
        while self._wanted() and (self.clock() < last_ns or self._starved > _STARVED_MAX):
            self._starved = 0
            self._step()
        self._sleep_until(until_ns - _COLLECT_NS)
        if self.core.reading and self.clock() < until_ns:
            self.collect()
        self._sleep_until(until_ns)

    def _sleep_until(self, when_ns: int) -> None:
        left_ns = when_ns - self.clock()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)

    def tended(self) -> bool:
        """Whether a caller has lately given the engine its idle time, so that the pump may rest."""
        return self.clock() < self._tended_ns + _TENDED_NS

    def wake(self) -> None:
        """Let the pump take over what is left to do, unless a caller tends to it."""
        core, driver = self.core, self.driver
        going_on = core.reading or driver.queued or driver.writer.in_flight
        if (self._plan_wanted or core.unanswered or going_on) and not self.tended():
            self._inbox.put(None)

    def resolved(self) -> None:
        """Something that somebody waits for has ended: tell the waiters in other threads."""
        if self._foreground and self._foreground > (threading.get_ident() in self._waiters):
            os.eventfd_write(self._front_wake, 1)

    # --- the pump ---

    def _pump(self) -> None:
        """Take hints as they come; between them look after the device, less often the less comes.

        It waits on a queue, never on the device: waking it must not cost the caller the
        interpreter lock, and reads that nobody waits for are best collected several at a time.
        """
        nap_s = _PUMP_IDLE_S
        try:
            while not self._stopping:
                try:
                    event = self._inbox.get(timeout=nap_s)
                    nap_s = _PUMP_NAP_S
                except queue.Empty:
                    event = None
                    nap_s = min(2 * nap_s, _PUMP_IDLE_S)
                if self._stopping:
                    return
                if event is not None:
                    self.give_way()
                    self.handle(event)
                if self._turn():
                    nap_s = _PUMP_NAP_S
        except BaseException as error:
            if self._stopping and isinstance(error, EngineError):
                return
            self._broken = error
            log.exception("the pump thread has stopped")
            self._end()

    def _turn(self) -> bool:
        """Learn and plan if asked, unless hints are waiting; collect what nobody waits for."""
        if self.tended():
            return False
        while self._wanted() and self._inbox.empty() and not self._stopping:
            self.give_way()
            self._step()
        return not self._foreground and self.collect()

    def _step(self) -> None:
        with self.lock:
            self._plan_wanted = False
            self._look_ns = self.clock() + _LOOK_NS
            self.handle(Idle())

    def _wanted(self) -> bool:
        core = self.core
        overdue = (core.reading or core.unanswered) and self.clock() >= self._look_ns
        return bool(self._plan_wanted or overdue or (self._released and core.unanswered))

    def give_way(self) -> None:
        """Let callers who are in a hurry have the lock first."""
        while self.urgent:
            time.sleep(0)

    def check(self) -> None:
        """Raise EngineError if the engine can do nothing more."""
        if self._broken is not None:
            raise EngineError(f"the engine has stopped: {self._broken!r}") from self._broken
        if self._stopping:
            raise EngineError("the engine is closed")

    def stop(self) -> None:
        """End the pump thread; nobody drives the device any more when this returns."""
        with self.lock:
            self._stopping = True
        self._inbox.put(None)
        self._thread.join()
        self._end()

    def _end(self) -> None:
        """Whoever waits has nothing to wait for."""
        os.eventfd_write(self._front_wake, 1)
        with self.lock:
            for tell in self.awaiting:
                tell()


def _bell(engine: Engine) -> int:
    """An eventfd as long-lived as the engine: a waiter may look at it after `stop`."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    weakref.finalize(engine, os.close, descriptor)
    return descriptor


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return
