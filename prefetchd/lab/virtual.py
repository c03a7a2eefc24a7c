"""The core on a modelled drive under a virtual clock: what `engine` and `driver` are in real time.

Decides the order of what happens: completions by their time, in order of submission where that is
equal; hints and idle turns once a core is free that decides. Holds no policy: the
core is the very one that runs live. Moves no bytes, reads no clock and draws no random number but
the drive's own, so a run repeats exactly.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.core import Core
from prefetchd.depth import DepthMeter
from prefetchd.drive_model import DriveModel
from prefetchd.model import (
    Cancel,
    Command,
    Completed,
    Event,
    Hint,
    Hinted,
    Idle,
    IoClass,
    PlanSoon,
    Read,
    Ready,
    Slots,
)

Record = Callable[[int, Event, list[Command]], None]
_LOOK_NS = 50_000_000  # as `engine` does: how often it looks while anything is under way
_NEVER_NS = 1 << 62
_WRITES = int(IoClass.WRITE_BACK)


# When it ends, its number, slot, generation, whether it is read, and who is told of a write.
_Flying = tuple[int, int, int, int, bool, Callable[[], None] | None]


@dataclass(slots=True)
class _Batch:
    """Operations of one command that wait for the drive to have room; `slots` None: of a write."""

    io_class: int
    lengths: NDArray[np.int64]
    slots: Slots | None
    generations: NDArray[np.int64]
    told: Callable[[], None] | None = None

    def take(self, room: int) -> _Batch:
        head = _Batch(
            self.io_class,
            self.lengths[:room],
            None if self.slots is None else self.slots[:room],
            self.generations[:room],
            self.told,
        )
        self.lengths, self.generations = self.lengths[room:], self.generations[room:]
        if self.slots is not None:
            self.slots = self.slots[room:]
        return head


class VirtualEngine:
    """`on_ready` is told of every answered demand. `depth`: operations that the drive is given at
    once. `decision_ns`: what a hint or an idle turn takes, on one of so many `cores`, before it is
    acted on. `record` sees every event with its time and the commands that came of it."""

    def __init__(
        self,
        core: Core,
        drive: DriveModel,
        on_ready: Callable[[Ready], None],
        *,
        page_bytes: int,
        depth: int = 128,
        decision_ns: int = 0,
        cores: int = 1,
        record: Record | None = None,
    ) -> None:
        self.core = core
        self.drive = drive
        self.now_ns = 0
        self.depth = DepthMeter()
        self.bytes_read = 0
        self.bytes_written = 0
        self.decisions = 0
        self._on_ready = on_ready
        self._page_bytes = page_bytes
        self._depth_max = depth
        self._decision_ns = decision_ns
        self._record = record
        self._plan_since_ns = _NEVER_NS  # since when an idle turn is wanted
        self._hints: deque[tuple[int, Hint]] = deque()  # given when, in order
        self._cores_free_ns = [0] * cores  # a heap
        self._look_ns = 0
        self._writing = 0  # writes that have not ended
        self._waiting: list[deque[_Batch]] = [deque() for _ in IoClass]
        self._flying: list[_Flying] = []
        self._submitted = 0

    # --- what a caller does at the present time ---

    def handle(self, event: Event) -> None:
        """Give the core an event now, and carry out what it says."""
        commands = self.core.handle(event, self.now_ns)
        if self._record:
            self._record(self.now_ns, event, commands)
        for command in commands:
            if isinstance(command, Read):
                self._read(command)
            elif isinstance(command, Ready):
                self._on_ready(command)
            elif isinstance(command, PlanSoon):
                self._plan_since_ns = min(self._plan_since_ns, self.now_ns)
            elif isinstance(command, Cancel):
                self._cancel(command)
        self._start()

    def hint(self, hint: Hint) -> None:
        """Acted on now, or once the time that deciding takes has passed."""
        if self._decision_ns:
            self._hints.append((self.now_ns, hint))
        else:
            self.decisions += 1
            self.handle(Hinted(hint))

    def write(self, lengths: NDArray[np.int64], told: Callable[[], None]) -> None:
        """Write operations of so many bytes; `told` once for each that ends."""
        self.bytes_written += int(lengths.sum())
        self._writing += len(lengths)
        self._waiting[_WRITES].append(_Batch(_WRITES, lengths, None, lengths, told))
        self._start()

    # --- time ---

    def run_until(self, at_ns: int, done: Callable[[], bool] | None = None) -> bool:
        """Let time pass, until `at_ns` or until `done()`, which is returned (True without it)."""
        while not (done and done()):
            next_ns, act = self._next()
            if next_ns > at_ns or next_ns >= _NEVER_NS:  # nothing is to come
                self.now_ns = max(self.now_ns, at_ns)
                return done is None or done()
            self.now_ns = max(self.now_ns, next_ns)
            act()
        return True

    def _next(self) -> tuple[int, Callable[[], None]]:
        """What happens next, and when: a completion before a decision of the same time."""
        due_ns, act = _NEVER_NS, self._complete
        if self._flying:
            due_ns = self._flying[0][0]
        given_ns = self._hints[0][0] if self._hints else self._plan_since_ns
        if given_ns < _NEVER_NS:
            at_ns = max(given_ns, self._cores_free_ns[0]) + self._decision_ns
            if at_ns < due_ns:
                due_ns, act = at_ns, self._decide
        core = self.core
        if core.reading or core.unanswered or self._writing:
            at_ns = self._look_ns + _LOOK_NS
            if at_ns < due_ns:
                due_ns, act = at_ns, self._look
        return due_ns, act

    def _decide(self) -> None:
        heapq.heapreplace(self._cores_free_ns, self.now_ns)
        self.decisions += 1
        if self._hints:
            self.handle(Hinted(self._hints.popleft()[1]))
        else:
            self._look()

    def _look(self) -> None:
        self._plan_since_ns = _NEVER_NS
        self._look_ns = self.now_ns
        self.handle(Idle())

    # --- the drive ---

    def _read(self, command: Read) -> None:
        lengths = np.full(len(command.slots), self._page_bytes, np.int64)
        self.bytes_read += int(lengths.sum())
        io_class = int(command.io_class)
        batch = _Batch(io_class, lengths, command.slots, command.generations)
        self._waiting[io_class].append(batch)

    def _start(self) -> None:
        """Give the drive what waits, by class, as far as its depth allows."""
        if not any(self._waiting):
            return
        begun = False
        for queue in self._waiting:
            while queue and (room := self._depth_max - len(self._flying)) > 0:
                batch = queue[0].take(room)
                if not len(queue[0].lengths):
                    queue.popleft()
                self._fly(batch)
                begun = True
        if begun:
            self.depth.note(len(self._flying), self.now_ns)

    def _fly(self, batch: _Batch) -> None:
        write = batch.slots is None
        ends = self.drive.submit(batch.lengths, write=write, now_ns=self.now_ns)
        slots = np.full(len(ends), -1) if batch.slots is None else batch.slots
        for end_ns, slot, generation in zip(
            ends.tolist(), slots.tolist(), batch.generations.tolist(), strict=True
        ):
            self._submitted += 1
            entry = (end_ns, self._submitted, slot, generation, True, batch.told)
            heapq.heappush(self._flying, entry)

    def _complete(self) -> None:
        """Take note of all that ends at this time."""
        slots, generations, read, written = [], [], [], []
        while self._flying and self._flying[0][0] <= self.now_ns:
            _, _, slot, generation, is_read, told = heapq.heappop(self._flying)
            if told:
                written.append(told)
            else:
                slots.append(slot)
                generations.append(generation)
                read.append(is_read)
        self.depth.note(len(self._flying), self.now_ns)
        if slots:
            self.handle(Completed(np.array(slots), np.array(generations), np.array(read)))
        self._writing -= len(written)
        for told in written:
            told()
        self._start()

    def _cancel(self, command: Cancel) -> None:
        """What waits still ends unread, and is told at once; what the drive has ends in time."""
        for queue in self._waiting[:_WRITES]:
            for batch in queue:
                assert batch.slots is not None
                cancelled = np.isin(batch.slots, command.slots)
                slots, generations = batch.slots[cancelled], batch.generations[cancelled]
                for slot, generation in zip(slots.tolist(), generations.tolist(), strict=True):
                    self._submitted += 1
                    entry = (self.now_ns, self._submitted, slot, generation, False, None)
                    heapq.heappush(self._flying, entry)
                batch.slots = batch.slots[~cancelled]
                batch.lengths = batch.lengths[~cancelled]
                batch.generations = batch.generations[~cancelled]
