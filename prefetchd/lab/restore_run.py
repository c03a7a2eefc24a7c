"""One run of recorded requests on a modelled drive, under a virtual clock.

Decides the life of a request, the same as in `bench.restore`: announced `lead_ns` before its start,
its reusable blocks demanded in prefix order at the consumer's rate, its new ones put at its start,
and told to be done once all of those are found. A wait moves the rest of a request back. Knows no
policy (the core's, as live), no file and no clock; the same arguments give the same log.

Block b is page b of a core with one layer. Blocks put are found at once where staging has room for
them, else when they have been written; the drive writes them behind, `WRITE_BLOCKS` an operation,
out of `WRITE_BUFFERS` buffers, and who finds none free waits for one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefetchd.bench.restore import Pace, RestoreLog
from prefetchd.core import Core
from prefetchd.drive_model import DriveModel
from prefetchd.lab.dpu import NO_DPU, Dpu
from prefetchd.lab.requests import Requests
from prefetchd.lab.virtual import Record, VirtualEngine
from prefetchd.model import (
    NO_IDS,
    ChainHint,
    Cleaned,
    Demanded,
    DoneHint,
    Filled,
    Ids,
    Offered,
    Outcome,
    Ready,
    Released,
)

WRITE_BUFFERS = 64
WRITE_BLOCKS = 16
EARLY_BLOCKS = 2  # that show who a request is
TIMEOUT_NS = 120_000_000_000
_ENQUEUE, _START, _TAKE = range(3)
_OUTCOMES = len(Outcome)
_NEVER_NS = 1 << 62


@dataclass(slots=True)
class _Request:
    pages: Ids  # what it restores
    taken: int = 0
    started: bool = False
    out: int = 0  # blocks of the demand that is out
    asked_ns: int = 0  # when it came
    to_put: int = 0  # blocks that are not found yet
    over: bool = False  # has all it asked for


@dataclass(slots=True)
class _Writes:
    """Blocks put, on their way to the drive."""

    queue: deque[tuple[int, Ids]] = field(default_factory=deque)  # request, blocks without buffer
    under_way: deque[tuple[int, Ids, bool]] = field(default_factory=deque)  # ..., whether kept
    buffers: int = WRITE_BUFFERS


class SimulatedRestore:
    """`visible` (bool, one a block): which blocks can be found; the planner of `core` knows it.

    Blocks that were had go over the link of `dpu` one after another, and a request takes no further
    one before its last is over. `progress` is told of requests as they end. `record`: see
    `VirtualEngine`.
    """

    def __init__(
        self,
        requests: Requests,
        core: Core,
        drive: DriveModel,
        visible: NDArray[np.bool_],
        pace: Pace,
        *,
        block_bytes: int,
        depth: int = 128,
        dpu: Dpu = NO_DPU,
        progress: Callable[[int], None] = lambda count: None,
        record: Record | None = None,
    ) -> None:
        self._answers: list[Ready] = []
        self.engine = VirtualEngine(
            core,
            drive,
            self._answers.append,
            page_bytes=block_bytes,
            depth=depth,
            decision_ns=int(dpu.decision_us * 1e3),
            cores=dpu.cores,
            record=record,
        )
        self._core = core
        self._requests = requests
        self._reusable = requests.reusable().tolist()
        self._visible = visible
        self._putting = np.zeros(len(visible), np.bool_)
        self._pace = pace
        self._block_bytes = block_bytes
        self._handover_ns = dpu.handover_ns(block_bytes)
        self._link_ns = 0  # when the link is free
        self._progress = progress
        self._live: dict[int, _Request] = {}
        self._tickets: dict[int, int] = {}
        self._numbers = 0
        self._events: list[tuple[int, int, int]] = []
        self._writes = _Writes()
        self._ready: list[Ready] = []  # all answers of the run
        count = len(requests)
        self.log = RestoreLog(np.zeros(count, np.int64), np.full(count, -1, np.int64))

    def run(self) -> RestoreLog:
        """Simulate everything once."""
        lead_ns = self._pace.lead_ns
        self._arrival_ns: list[int] = (self._requests.arrival_ns + lead_ns).tolist()
        events = self._events
        for number, at_ns in enumerate(self._arrival_ns):
            events += [(at_ns - lead_ns, number, _ENQUEUE), (at_ns, number, _START)]
        heapq.heapify(events)
        act = (self._enqueue, self._start, self._take)
        engine, answers = self.engine, self._answers
        while events or self._live:
            due_ns = events[0][0] if events else _NEVER_NS
            if engine.run_until(due_ns, lambda: bool(answers)):
                self._answered()
            else:
                _, number, kind = heapq.heappop(events)
                act[kind](number)
                self._answered()
        self._sum_up()
        return self.log

    def _sum_up(self) -> None:
        log = self.log
        outcomes = np.concatenate([np.empty(0, np.uint8), *(one.outcomes for one in self._ready)])
        slots = np.concatenate([NO_IDS, *(one.slots for one in self._ready)])
        log.outcomes += np.bincount(outcomes, minlength=_OUTCOMES)
        log.missing = int(np.count_nonzero(slots < 0))
        log.seconds = self.engine.now_ns / 1e9

    # --- a request's life ---

    def _known(self, number: int, most: int) -> Ids:
        chain = self._requests.chain(number)[:most]
        found = self._visible[chain]
        return chain if found.all() else chain[: int(np.argmin(found))]

    def _enqueue(self, number: int) -> None:
        most = self._reusable[number]
        if self._pace.hints:
            blocks = self._known(number, most)
            if len(blocks):
                self.engine.hint(ChainHint(number, blocks, self._arrival_ns[number]))
            return
        pages = self._known(number, min(EARLY_BLOCKS, most))
        if len(pages):
            request = self._live[number] = _Request(pages)
            self._demand(number, request, len(pages))

    def _start(self, number: int) -> None:
        reusable = self._reusable[number]
        pages = self._known(number, reusable)
        self.log.unstored += reusable - len(pages)
        request = self._live.setdefault(number, _Request(pages))
        request.pages, request.started = pages, True
        self._put(number, request)
        if reusable:
            self.log.ready_ns[number] = 0
        if not request.out:
            self._take(number)

    def _take(self, number: int) -> None:
        """Demand the next block of a request; nothing left: it ends."""
        request = self._live[number]
        if request.taken < len(request.pages):
            self._demand(number, request, 1)
        else:
            request.over = True
            self._end(number, request)

    def _demand(self, number: int, request: _Request, count: int) -> None:
        self._numbers += 1
        self._tickets[self._numbers] = number
        request.out = count
        pages = request.pages[request.taken : request.taken + count]
        now_ns = request.asked_ns = self.engine.now_ns
        self.engine.handle(Demanded(self._numbers, pages, now_ns + TIMEOUT_NS, number))

    def _answered(self) -> None:
        while self._answers:
            self._took(self._answers.pop())

    def _took(self, ready: Ready) -> None:
        """A demand was answered: note it, let its pages go, see to the next."""
        number = self._tickets.pop(ready.ticket)
        request, log = self._live[number], self.log
        now_ns = self.engine.now_ns
        self._ready.append(ready)
        log.waits_ns.append(ready.waits_ns)
        self.engine.handle(Released(ready.ticket))
        request.taken += request.out
        self._link_ns = max(self._link_ns, now_ns) + request.out * self._handover_ns
        if request.started:
            if now_ns > request.asked_ns:
                log.ready_ns[number] = now_ns - self._arrival_ns[number]
            next_ns = max(self._link_ns, now_ns + request.out * self._pace.block_ns)
            heapq.heappush(self._events, (next_ns, number, _TAKE))
        else:
            came = (ready.outcomes >= Outcome.LATE) & (ready.slots >= 0)
            log.early += int(np.count_nonzero(came))
        request.out = 0

    def _end(self, number: int, request: _Request) -> None:
        """Once what it made is there to be told of."""
        if request.to_put:
            return
        del self._live[number]
        chain = self._requests.chain(number)
        blocks = self._known(number, len(chain))
        self.engine.hint(DoneHint(number, self._requests.stops[number], blocks=blocks))
        self._progress(1)

    # --- its new blocks ---

    def _put(self, number: int, request: _Request) -> None:
        new = self._requests.chain(number)[self._reusable[number] :]
        if len(new) == 0:
            return
        new = new[~(self._visible[new] | self._putting[new])]
        self._putting[new] = True
        request.to_put = len(new)
        self._writes.queue.extend(
            (number, new[at : at + WRITE_BLOCKS]) for at in range(0, len(new), WRITE_BLOCKS)
        )
        self._move()

    def _move(self) -> None:
        """Give blocks that were put buffers, in order, as long as there are any."""
        writes = self._writes
        while writes.queue and writes.buffers >= len(writes.queue[0][1]):
            number, blocks = writes.queue.popleft()
            writes.buffers -= len(blocks)
            while len(blocks):
                kept = self._offered(blocks)
                part = kept or len(blocks)
                self._write(number, blocks[:part], kept=kept > 0)
                blocks = blocks[part:]

    def _write(self, number: int, blocks: Ids, *, kept: bool) -> None:
        if kept:
            self._found(number, blocks)
        self._writes.under_way.append((number, blocks, kept))
        self.engine.write(np.array([len(blocks) * self._block_bytes]), self._written)

    def _offered(self, blocks: Ids) -> int:
        """How many of the first blocks staging took: there is room for some, or for none."""
        count = len(blocks)
        while count:
            self.engine.handle(Offered(blocks[:count]))
            if self._core.staging.slot_of[blocks[0]] >= 0:
                self.engine.handle(Filled(blocks[:count]))
                return count
            count //= 2
        return 0

    def _found(self, number: int, blocks: Ids) -> None:
        self._visible[blocks] = True
        request = self._live[number]
        request.to_put -= len(blocks)
        if request.over and not request.to_put:
            heapq.heappush(self._events, (self.engine.now_ns, number, _TAKE))

    def _written(self) -> None:
        """The drive ends its writes in the order in which they were given."""
        number, blocks, kept = self._writes.under_way.popleft()
        self._writes.buffers += len(blocks)
        if kept:
            self.engine.handle(Cleaned(blocks))
        else:
            self._found(number, blocks)
        self._move()
