"""The live loop: one core, one driver, one clock, a lock, and a thread for when nobody calls.

Decides who drives. A caller that asks for something drives the core and the device itself, in its
own thread, so that a demand costs no hand-over between threads. While callers compute, the pump
thread notices completions, verifies pages, starts what is queued and runs the predictor. Holds no
policy and knows no file. Verification runs outside the lock: until it is over the slots are the
device's, so nobody else looks at them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from prefetchd.core import Core
from prefetchd.driver import Driver, RawReads
from prefetchd.foreground import Foreground
from prefetchd.guarded import PredictorError
from prefetchd.model import Cancel, Command, Event, Hinted, Idle, PlanSoon, Read, Ready, Released
from prefetchd.pace import Pace
from prefetchd.pump import Pump, give_way
from prefetchd.samples import Samples
from prefetchd.tending import Tending
from prefetchd.writer import Written

log = logging.getLogger("prefetchd")

_LOOK_NS = 50_000_000  # how often deadlines are looked at while reads are in flight
_INBOX_MAX = 64
_STEP_NS, _LEARNING_NS = 100_000, 350_000


class EngineError(Exception):
    """The engine has stopped, or was closed; says why."""


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
        self._pace = Pace()  # of the same, in processor time
        self.at_end: Callable[[], object] = lambda: None
        """Called when it has stopped or failed: nothing is right any more from then on."""
        self._on_ready = on_ready
        self._on_written = on_written
        self._look_ns = self.hints_dropped = 0
        self.foreground = Foreground(
            self.lock, driver.device.fileno, self.collect, self._nothing, self.check, driver.ended
        )
        self.resolved = self.foreground.resolved
        self.awaiting: list[Callable[[], object]] = []  # told when there is nothing to come
        self._plan_wanted = self._stopping = False
        self._broken: BaseException | None = None
        self.urgent: deque[int] = deque()  # one entry a caller that is about to take the lock
        self._released: deque[int] = deque()
        self._tending = Tending(
            self.clock,
            self._due_ns,
            self.step,
            lambda: driver.device.in_flight,
            lambda ns: driver.device.wait(ns, driver.device.in_flight),
            self.collect,
        )
        self.tended = self._tending.lately
        """Whether a caller has lately given the engine its idle time: then the pump rests."""
        self._pump = Pump(self._act, self._pump_failed, self._open_ended)
        self._pump.start()

    # --- driving ---

    def handle(self, event: Event) -> None:
        """Give the core an event and carry out what it says. Raises EngineError when stopped."""
        with self.lock:
            self.check()
            now_ns, timed = self.clock(), isinstance(event, Hinted | Idle)
            began_ns = time.thread_time_ns() if timed else 0
            try:
                while self._released:  # whose commands hold even if the event is refused
                    self._carry_out(self.core.handle(Released(self._released.popleft()), now_ns))
                commands = self.core.handle(event, now_ns)
            except PredictorError as error:
                self.fail(error)
                self.check()
            if timed:
                self.decision_ns.add(self.clock() - now_ns)
                self._pace.note(time.thread_time_ns() - began_ns)  # not waits for the interpreter
            self._carry_out(commands)
            self.driver.start(now_ns)

    def _carry_out(self, commands: list[Command]) -> None:
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
                self.driver.fill(command)

    def collect(self) -> bool:
        """Take note of whatever the device has finished; whether there was anything."""
        reads, wrote = self.reap()
        if reads is not None:
            self.handle(self.driver.verify(reads))
        return wrote or reads is not None

    def reap(self) -> tuple[RawReads | None, bool]:
        """The first half of `collect`: reads that have ended, and whether writes have. Nobody has
        their pages before they were verified, in any parts, and `handle` was told."""
        with self.lock:
            self.check()
            reads, written = self.driver.reap(self.clock())
            for end in written:
                self._on_written(end)
            if wrote := self.driver.wrote:
                self.foreground.wrote()
            if reads is not None or written or self.driver.queued:
                self.driver.start(self.clock())
        return reads, wrote

    def wait(self, done: Callable[[], bool], deadline_ns: int | None = None) -> bool:
        """Drive until `done()`, or the deadline (on `clock`). Returns `done()`."""
        if done():
            return True
        self.check()
        try:
            return self.foreground.wait(done, deadline_ns, self.clock)
        finally:
            self.wake()

    def _nothing(self) -> None:
        """A thread that waits has seen nothing for a while."""
        self.handle(Idle())
        self.look_after_writes()

    def attend(self) -> None:
        """Collect what comes, for threads that wait as well, until `leave`. Raises EngineError."""
        with self.lock:
            self.check()
            self.foreground.attend()

    def leave(self) -> None:
        self.foreground.neglect()
        self.wake()

    def release(self, number: int) -> None:
        """A reader is done with a ticket; whoever drives next acts on it. See also `check`."""
        self.check()
        self._released.append(number)
        if self.core.unanswered and not self._by_loop:
            self._pump.call()  # somebody may be waiting for just these slots

    def post(self, event: Hinted) -> None:
        """Take a hint: here and now if the caller tends the engine, or a loop that attends calls
        (so that what was hinted before is done), else by the pump.

        A pump that cannot keep up loses hints rather than time: they are counted and dropped.
        Raises EngineError when stopped.
        """
        if (self.tended() or self._by_loop) and not self._pump.hints:
            self.handle(event)
            self.wake()  # the pump, if that took long
            return
        self.check()
        if len(self._pump.hints) >= _INBOX_MAX:
            self.hints_dropped += 1
        else:
            self._pump.post(event)

    def tend(self, until_ns: int) -> None:
        """Give the engine this thread until then, on `clock`."""
        if self.driver.queued:
            self.collect()  # or the device would have nothing to do until the next demand
        self._tending.until(until_ns)

    def wake(self) -> None:
        """Let the pump take over what is left to do, unless a caller or a loop tends to it."""
        going_on = self.core.reading or self.driver.queued or self.driver.writer.in_flight
        wanted = self._plan_wanted or self.core.unanswered or going_on
        if wanted and not (self.tended() or self._by_loop):
            self._pump.call()

    # --- the pump ---

    def _act(self, event: Hinted | None) -> bool:
        if event is not None:
            give_way(self.urgent)
            self.handle(event)
            self._pump.hints.popleft()
        return self._turn()

    def _pump_failed(self, error: BaseException) -> None:
        if self._stopping and isinstance(error, EngineError):
            return
        why = self._broken or error  # words alone where somebody has ended it on purpose
        told = isinstance(why, EngineError) and why.__cause__ is None
        log.error("the pump thread has stopped: %s", why, exc_info=None if told else error)
        self.fail(error)

    def _turn(self) -> bool:
        """Learn and plan if asked, unless hints are waiting; collect what nobody waits for, and
        what no descriptor tells of."""
        if self.tended():
            return False
        while self._wanted() and self._pump.inbox.empty() and not self._stopping:
            give_way(self.urgent)
            self.step()
        return bool(not self.foreground.count or self.driver.ended) and self.collect()

    @property
    def _by_loop(self) -> bool:
        """Whether a loop makes the steps that are wanted, and the pump none but those overdue."""
        return self.foreground.attending > 0 and not self._pace.slow

    @property
    def step_due(self) -> bool:
        """Whether a loop that attends is to make a `step`."""
        return self._by_loop and self._soon()

    def step(self) -> None:
        """Learn and plan a little, and look at what time alone has ended."""
        with self.lock:
            self._plan_wanted = False
            self._look_ns = self.clock() + _LOOK_NS
            self.handle(Idle())
            self.look_after_writes()

    def look_after_writes(self) -> None:
        """Settle the puts that the device does not write; flush what has waited for long enough."""
        if self.driver.writer.idle:
            return
        with self.lock:
            now_ns = self.clock()
            for end in self.driver.expire(now_ns):
                self._on_written(end)
            self.driver.write(now_ns)
            self.driver.start(now_ns)

    def _wanted(self) -> bool:
        overdue = self._open_ended() and self.clock() >= self._look_ns
        return overdue or (not self._by_loop and self._soon())

    def _soon(self) -> bool:
        return bool(self._plan_wanted or (self._released and self.core.unanswered))

    def _open_ended(self) -> bool:
        return bool(self.core.reading or self.core.unanswered or not self.driver.writer.idle)

    def _due_ns(self) -> int:
        """About how long the next step takes; 0 if none is wanted."""
        if not self._wanted():
            return 0
        return _LEARNING_NS if self.core.foresight.learning_due else _STEP_NS

    def check(self) -> None:
        """Raise EngineError if the engine can do nothing more."""
        if broken := self._broken:
            told = isinstance(broken, PredictorError | EngineError)  # whose cause leads to its line
            words = f"the engine has stopped: {broken if told else repr(broken)}"
            raise EngineError(words) from ((told and broken.__cause__) or broken)
        if self._stopping:
            raise EngineError("the engine is closed")

    def stop(self) -> None:
        """End the pump thread; nobody drives the device any more when this returns."""
        with self.lock:
            self._stopping = True
        self._pump.stop()
        self._end()

    def fail(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._end()

    def _end(self) -> None:
        """Whoever waits has nothing to wait for."""
        self.at_end()
        self.foreground.end()
        with self.lock:
            for tell in self.awaiting:
                tell()
