"""One run of recorded requests on a modelled drive, under a virtual clock.

Decides the life of a request, the same as in `bench.restore`: announced `lead_ns` before its start,
its reusable blocks demanded in prefix order at the consumer's rate, its new ones put at its start,
and told to be done once all of those are found. A wait moves the rest of a request back. Knows no
policy (the core's, as live), no file and no clock; the same arguments give the same log.

Block b is page b of a core with one layer. What becomes of blocks put is `lab.restore_puts`'s.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.bench.restore import Pace, RestoreLog
from prefetchd.core import Core
from prefetchd.drive_model import DriveModel
from prefetchd.lab.dpu import NO_DPU, Dpu
from prefetchd.lab.requests import Requests
from prefetchd.lab.restore_puts import SimulatedPuts
from prefetchd.lab.virtual import Record, VirtualEngine
from prefetchd.masks import every
from prefetchd.model import (
    NO_IDS,
    ChainHint,
    Codes,
    Demanded,
    DoneHint,
    Ids,
    Outcome,
    Ready,
    Released,
    Slots,
)
from prefetchd.staging import READY

EARLY_BLOCKS = 2  # that show who a request is
TIMEOUT_NS = 120_000_000_000
_ENQUEUE, _START, _TAKE = range(3)
_OUTCOMES = len(Outcome)
_LATE = int(Outcome.LATE)
_NEVER_NS = 1 << 61


@dataclass(slots=True)
class _Request:
    pages: Ids  # what it restores
    taken: int = 0
    started: bool = False
    out: int = 0  # blocks of the demand that is out
    asked_ns: int = 0  # when it came
    to_put: int = 0  # blocks that are not found yet
    over: bool = False  # has all it asked for


class SimulatedRestore:
    """`visible` (bool, one a block): which blocks can be found; the planner of `core` knows it.

    Blocks that were had go over the link of `dpu` one after another, and a request takes no further
    one before its last is over. `progress` is told of requests as they end. `record`: see
    `VirtualEngine`. `take_blocks`: how many a request asks for at a time, at its rate all the same.
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
        take_blocks: int = 1,
        dpu: Dpu = NO_DPU,
        progress: Callable[[int], None] = lambda count: None,
        record: Record | None = None,
    ) -> None:
        self._answers: deque[Ready] = deque()
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
        self._pace = pace
        self._take_blocks = take_blocks
        self._handover_ns = dpu.handover_ns(block_bytes)
        self._link_ns = 0  # when the link is free
        self._progress = progress
        self._live: dict[int, _Request] = {}
        self._tickets: dict[int, int] = {}
        self._numbers = 0
        self._events: list[tuple[int, int, int]] = []
        self._puts = SimulatedPuts(self.engine, visible, block_bytes, self._found)
        self._due_ns = 0
        self._outcomes: list[Codes] = [np.empty(0, np.uint8)]  # of all answers of the run
        self._slots: list[Slots] = [NO_IDS]
        count = len(requests)
        self._at_start = 0
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
        while events or self._live:
            self._due_ns = events[0][0] if events else _NEVER_NS
            self.engine.run_until(self._due_ns, self._news)
            if self._answers:
                self._answered()
            else:  # what is due; without any a live request waits for nothing, which cannot be
                _, number, kind = heapq.heappop(events)
                act[kind](number)
                self._answered()
        self._sum_up()
        return self.log

    def _news(self) -> bool:
        """Whether a demand was answered, or something has become due before what was to be next."""
        sooner = bool(self._events) and self._events[0][0] < self._due_ns
        return sooner or bool(self._answers)

    def _sum_up(self) -> None:
        log = self.log
        log.outcomes += np.bincount(np.concatenate(self._outcomes), minlength=_OUTCOMES)
        log.at_start = self._at_start
        log.missing = int(np.count_nonzero(np.concatenate(self._slots) < 0))
        log.seconds = self.engine.now_ns / 1e9

    # --- a request's life ---

    def _known(self, number: int, most: int) -> Ids:
        chain = self._requests.chain(number)[:most]
        found = self._visible[chain]
        return chain if every(found) else chain[: int(np.argmin(found))]

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
        self._at_start += self._staged(pages)
        self._put(number, request)
        if reusable:
            self.log.ready_ns[number] = 0
        if not request.out:
            self._take(number)

    def _staged(self, pages: Ids) -> int:
        staging = self._core.staging
        slots = staging.slot_of[pages]
        return int(np.count_nonzero((slots >= 0) & (staging.state[slots] == READY)))

    def _take(self, number: int) -> None:
        """Demand the next blocks of a request; nothing left: it ends."""
        request = self._live[number]
        left = len(request.pages) - request.taken
        if left > 0:
            self._demand(number, request, min(left, self._take_blocks))
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
            self._took(self._answers.popleft())

    def _took(self, ready: Ready) -> None:
        """A demand was answered: note it, let its pages go, see to the next."""
        number = self._tickets.pop(ready.ticket)
        request, log = self._live[number], self.log
        now_ns = self.engine.now_ns
        self._outcomes.append(ready.outcomes)
        self._slots.append(ready.slots)
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
            came = (ready.outcomes >= _LATE) & (ready.slots >= 0)
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

    def _put(self, number: int, request: _Request) -> None:
        request.to_put = self._puts.put(
            number, self._requests.chain(number)[self._reusable[number] :]
        )
        self._puts.move()

    def _found(self, number: int, count: int) -> None:
        request = self._live[number]
        request.to_put -= count
        if request.over and not request.to_put:
            heapq.heappush(self._events, (self.engine.now_ns, number, _TAKE))
