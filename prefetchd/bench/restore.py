"""One run of recorded requests against a runtime, in real time: arrivals, demands, puts, ends.

Decides what is asked when and what is noted down. Arrivals are open loop: a request starts when it
is due, however late the ones before it are, and everything is counted from the intended start.

A request is announced `lead_ns` before it starts: with hints its known blocks are told, without
them its first two blocks are demanded then, as an engine that looks its queue over would do. From
its start on its reusable blocks are demanded in prefix order, one every `block_ns`; where one has
to be waited for, the rest moves back by as much. Its new blocks are put at its start and exist from
then on. One thread does all but the puts and tends the runtime in between.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefetchd.bench.content import STAMP_BYTES, nonce, stamped
from prefetchd.bench.decode import WrongBytes
from prefetchd.bench.served import Serving
from prefetchd.lab.requests import Requests
from prefetchd.model import NO_IDS, ChainHint, DoneHint, Ids, Outcome
from prefetchd.resting import collector_rests
from prefetchd.tickets import PutTicket, Ticket

_ENQUEUE, _START, _TAKE = range(3)
_EARLY_BLOCKS = 2  # that show who a request is
_TAKEN_MAX = 64  # blocks of one demand, when the replay is late
_SLICE_NS = 300_000  # of waiting, between two looks at what has arrived


@dataclass(frozen=True, slots=True)
class Pace:
    """Times on the replay's own clock, that is after `--speed`."""

    lead_ns: int
    block_ns: int
    hints: bool


class Moved(Protocol):
    """What a result needs of a runtime's `Stats`, or of a simulation's counters."""

    @property
    def prefetch(self) -> dict[str, int]: ...
    @property
    def failures(self) -> dict[str, int]: ...
    @property
    def pages_read(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def achieved_depth(self) -> float: ...
    @property
    def decision_ns(self) -> NDArray[np.int64]: ...


@dataclass(slots=True)
class RestoreLog:
    """What one run saw. Of requests in order: lateness of their start, and the time from the
    intended start to the end of their last wait (0: never waited; -1: had nothing to restore)."""

    lateness_ns: NDArray[np.int64]
    ready_ns: NDArray[np.int64]
    outcomes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Outcome), np.int64))
    early: int = 0  # blocks demanded before the start that were waited for, but not at the start
    unstored: int = 0  # reusable blocks whose put had not ended at the start
    missing: int = 0  # demanded blocks that could not be had
    waits_ns: list[NDArray[np.int64]] = field(default_factory=list)
    verified: int = 0
    failed_puts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    at_start: int | None = None  # reusable blocks readable at the starts; None where nobody looked
    cpu_ns: int | None = None  # unknown where no processor was at work
    after: Moved | None = None


@dataclass(slots=True)
class _Request:
    number: int
    pages: Ids  # what it restores
    taken: int = 0
    started: bool = False
    ticket: Ticket | None = None
    count: int = 0  # of the demand that is out
    waited: bool = False
    made: int = 0  # blocks that it puts


class RestoreRun:
    """`names`: the key of every block. `progress` is told of requests as they end."""

    def __init__(
        self,
        runtime: Serving,
        requests: Requests,
        names: NDArray[np.uint8],
        pace: Pace,
        seed: int,
        progress: Callable[[int], None],
    ) -> None:
        self._runtime = runtime
        self._requests = requests
        self._names = names
        self._pace = pace
        self._seed = seed
        self._progress = progress
        self._reusable = requests.reusable()
        self._random = np.random.Generator(np.random.SFC64(seed))
        self._live: dict[int, _Request] = {}
        self._waiting: list[int] = []
        self._ending: list[int] = []  # took everything; what they put is not there yet
        self._events: list[tuple[int, int, int]] = []
        self._puts: dict[int, PutTicket | None] = {}  # None: refused
        self._to_put: SimpleQueue[tuple[int, NDArray[np.uint8], NDArray[np.uint8]] | None]
        self._to_put = SimpleQueue()
        self._buffer = runtime.buffer(_TAKEN_MAX)
        count = len(requests)
        self.log = RestoreLog(np.zeros(count, np.int64), np.full(count, -1, np.int64))

    def run(self) -> RestoreLog:
        """Replay everything once. Raises WrongBytes."""
        putter = Thread(target=self._put_all, name="restore-puts")
        with collector_rests():
            putter.start()
            try:
                self._run()
            finally:
                self._to_put.put(None)
                putter.join()
        self.log.after = self._runtime.stats()
        return self.log

    def _run(self) -> None:
        begun_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        self._arrival_ns = self._requests.arrival_ns + begun_ns + self._pace.lead_ns + 10_000_000
        for number, at_ns in enumerate(self._arrival_ns.tolist()):
            self._events.append((at_ns - self._pace.lead_ns, number, _ENQUEUE))
            self._events.append((at_ns, number, _START))
        heapq.heapify(self._events)
        act = {_ENQUEUE: self._enqueue, _START: self._start, _TAKE: self._take}
        while self._events or self._waiting or self._ending:
            self._answered()
            now_ns = time.monotonic_ns()
            due_ns = self._events[0][0] if self._events else now_ns + _SLICE_NS
            if due_ns <= now_ns:
                at_ns, number, kind = heapq.heappop(self._events)
                act[kind](number, at_ns)
            else:
                self._ending = [one for one in self._ending if not self._ended(one)]
                self._runtime.tend(min(due_ns - now_ns, _SLICE_NS) / 1e9)
        self.log.seconds = (time.monotonic_ns() - begun_ns) / 1e9
        self.log.cpu_ns = time.process_time_ns() - cpu_ns

    # --- a request's life ---

    def _known(self, number: int, most: int) -> Ids:
        """Pages of the longest stored prefix; a block has one page here."""
        chain = self._requests.chain(number)[: min(most, int(self._reusable[number]))]
        return self._runtime.lookup(self._names[chain]) if len(chain) else NO_IDS

    def _enqueue(self, number: int, at_ns: int) -> None:
        if self._pace.hints:
            blocks = self._known(number, self._runtime.geometry.blocks)
            if len(blocks):
                start_ns = int(self._arrival_ns[number])
                self._runtime.hint(ChainHint(number, blocks, start_ns))
            return
        pages = self._known(number, _EARLY_BLOCKS)
        if len(pages):
            request = self._live[number] = _Request(number, pages)
            self._demand(number, request, len(pages))

    def _start(self, number: int, at_ns: int) -> None:
        self.log.lateness_ns[number] = time.monotonic_ns() - at_ns
        reusable = int(self._reusable[number])
        pages = self._known(number, reusable)
        self.log.unstored += reusable - len(pages)
        request = self._live.setdefault(number, _Request(number, pages))
        request.made = self._put_new(number)
        request.pages, request.started = pages, True
        if reusable:
            self.log.ready_ns[number] = 0
        if request.ticket is None:
            self._take(number, at_ns)

    def _put_new(self, number: int) -> int:
        """Hand the new blocks to the thread that puts, as an engine offloads behind its back."""
        new = self._requests.chain(number)[int(self._reusable[number]) :]
        if len(new):
            page_bytes = self._runtime.page_bytes
            words = self._random.integers(0, 2**64, len(new) * page_bytes // 8, np.uint64)
            rows = words.reshape(len(new), -1)
            rows[:, 0], rows[:, 1] = new.astype(np.uint64), nonce(self._seed)
            pages = rows.view(np.uint8).reshape(len(new), 1, page_bytes)
            self._to_put.put((number, self._names[new], pages))
        return len(new)

    def _put_all(self) -> None:
        """The thread that puts: one request after another, until there is none.

        It outlives its writes: the kernel cancels what a thread submitted that is gone.
        """
        while (job := self._to_put.get()) is not None:
            number, names, pages = job
            try:
                self._puts[number] = self._runtime.put(names, pages, durability="fast")
            except BaseException as error:
                self.log.failed_puts.append(str(error))
                self._puts[number] = None
        for ticket in self._puts.values():
            self.log.failed_puts += ticket.wait().failures if ticket else []

    def _take(self, number: int, at_ns: int) -> None:
        """Demand what is due of a request; nothing left: it has ended."""
        request = self._live[number]
        left = len(request.pages) - request.taken
        if left <= 0:
            self._ending.append(number)
            return
        due = 1 + max(0, time.monotonic_ns() - at_ns) // self._pace.block_ns
        self._demand(number, request, min(left, int(due), _TAKEN_MAX), at_ns)

    def _demand(self, number: int, request: _Request, count: int, at_ns: int = 0) -> None:
        pages = request.pages[request.taken : request.taken + count]
        request.ticket, request.count = self._runtime.demand(pages, request=number), count
        request.waited = not request.ticket.done
        if request.waited:
            self._waiting.append(number)
        else:
            self._took(number, request, at_ns)

    def _answered(self) -> None:
        for number in list(self._waiting):
            request = self._live[number]
            if request.ticket is not None and request.ticket.done:
                self._waiting.remove(number)
                self._took(number, request, time.monotonic_ns())

    def _took(self, number: int, request: _Request, at_ns: int) -> None:
        """A demand was answered: note it, check its bytes, let its pages go."""
        ticket = request.ticket
        assert ticket is not None
        log = self.log
        log.outcomes += np.bincount(ticket.outcomes, minlength=len(Outcome))
        log.waits_ns.append(ticket.waits_ns)
        self._check(request, ticket)
        request.ticket = None
        request.taken += request.count
        if request.started:
            if request.waited and ticket.waits_ns.any():  # and not only for an answer
                log.ready_ns[number] = time.monotonic_ns() - int(self._arrival_ns[number])
            next_ns = at_ns + request.count * self._pace.block_ns
            heapq.heappush(self._events, (next_ns, number, _TAKE))
        else:
            came = (ticket.outcomes >= Outcome.LATE) & (ticket.slots >= 0)
            log.early += int(np.count_nonzero(came))

    def _check(self, request: _Request, ticket: Ticket) -> None:
        present = ticket.slots >= 0
        self.log.missing += int(np.count_nonzero(~present))
        ticket.push(self._buffer, skip_missing=True).wait()
        stamps = self._runtime.peek(self._buffer, int(np.count_nonzero(present)), STAMP_BYTES)
        # Puts are made in the order of first need and extents given out in order of puts; the
        # stamp and the key, not the number of the extent, say which block it is.
        chain = self._requests.chain(request.number)
        wanted = chain[request.taken : request.taken + request.count][present]
        if not stamped(stamps, wanted, self._seed).all():
            raise WrongBytes(f"blocks {wanted.tolist()} were handed over with other blocks' bytes")
        self.log.verified += len(wanted)
        ticket.release()

    def _ended(self, number: int) -> bool:
        """Say that a request is done, once all it made is there to be told of."""
        if self._live[number].made:
            if number not in self._puts:
                return False
            put = self._puts[number]
            if put and not put.done:
                return False
        del self._live[number]
        chain = self._requests.chain(number)
        blocks = self._runtime.lookup(self._names[chain])
        self._runtime.hint(DoneHint(number, self._requests.stops[number], blocks=blocks))
        self._progress(1)
        return True
