"""The requests of a day against one runtime, on a clock that jumps from event to event.

Decides what a request asks for and when, and what its answers must be. Of each request: a hint
`LEAD` before it arrives; at its arrival its chain is looked up, and the prefix that is there is
demanded in batches, one every `STEP`, each held until the next; then what was not there is put,
"durable" for one request in eight and "fast" for the others; a `STEP` later it says that it is
done. Several are open at once, as their times overlap. Knows no books: see `day_books`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd import ChainHint, DoneHint, Found, PutTicket, Runtime, Ticket
from prefetchd.bench.content import block_names
from prefetchd.lab.requests import Requests
from prefetchd.model import Ids
from tests.day_books import must

LEAD_NS, STEP_NS = 10_000_000_000, 4_000_000_000
START_NS = 2_000_000_000 * 10**9
"""What the wall clock shows when the day begins: some day in 2033."""
DURABLE_EVERY = 8  # requests
OPEN_MAX = 12  # demands held at once; beyond, the oldest is answered and let go of early
PUTS_MAX = 8  # puts not waited for yet
_HINT, _ARRIVE, _STEP = range(3)


@dataclass(slots=True)
class Tally:
    """Blocks, unless the name says otherwise."""

    requests: int = 0
    wanted: int = 0
    found: int = 0
    demanded: int = 0
    gone: int = 0  # found, and evicted or expired before they were demanded
    verified: int = 0
    put: int = 0
    puts_known: int = 0  # put although there, or on their way, already
    hinted: int = 0  # requests
    open_most: int = 0  # demands held at the same time


@dataclass(slots=True)
class _Live:
    found: Found
    taken: int = 0
    put: bool = False


class Traffic:
    """`batch`: blocks of one demand."""

    def __init__(self, runtime: Runtime, day: Requests, ttl_s: float, batch: int) -> None:
        assert runtime.geometry.layers == 1, "a block of the day is one page"
        self._runtime, self._day = runtime, day
        self._ttl_ns, self._batch = int(ttl_s * 1e9), batch
        self.now_ns = START_NS
        self.tally = Tally()
        names = np.frombuffer(b"".join(block_names(day.distinct, 0)), np.uint8)
        self.names: NDArray[np.uint8] = names.reshape(-1, 16)
        self._stamps = np.zeros(day.distinct, np.int64)  # of each block when it was last put
        self._born_ns = np.zeros(day.distinct, np.int64)  # and when that was
        words = runtime.page_bytes // 8
        self._base = np.random.default_rng(7).integers(0, 2**64, words, np.uint64)
        self._buffer = runtime.buffer(batch)
        self._live: dict[int, _Live] = {}
        self._tickets: dict[int, tuple[Ticket, Ids]] = {}  # oldest first
        self._puts: deque[tuple[PutTicket, Ids, int]] = deque()
        runtime.room.wall_ns = lambda: self.now_ns

    def run(self, moved: Callable[[int], None]) -> None:
        """`moved` is told of each event's time (ns since the day began), after it."""
        day = self._day
        arrivals = (day.arrival_ns + START_NS + LEAD_NS).tolist()
        events = [(at_ns - LEAD_NS, number, _HINT) for number, at_ns in enumerate(arrivals)]
        heapq.heapify(events)
        while events:
            at_ns, number, kind = heapq.heappop(events)
            self.now_ns = at_ns
            if kind == _HINT:
                self._hint(number)
                heapq.heappush(events, (arrivals[number], number, _ARRIVE))
            else:
                if kind == _ARRIVE:
                    self._live[number] = _Live(self.look(day.chain(number)))
                if self._step(number):
                    heapq.heappush(events, (at_ns + STEP_NS, number, _STEP))
            moved(at_ns - START_NS)
        self.calm()

    def calm(self) -> None:
        """Let go of all that is held, wait for all that is written."""
        while self._tickets:
            self._take(next(iter(self._tickets)))
        self._settle(0)

    # --- what a request does ---

    def _hint(self, number: int) -> None:
        blocks = self._runtime.lookup(self.names[self._day.chain(number)])
        if len(blocks):
            self._runtime.hint(ChainHint(number + 1, blocks))
            self.tally.hinted += 1

    def _step(self, number: int) -> bool:
        """Whether there is more to come of a request."""
        live, chain = self._live[number], self._day.chain(number)
        if number in self._tickets:
            self._take(number)
        if live.taken < len(live.found):
            self._demand(number, live, chain)
        elif not live.put:
            live.put = True
            self._put(number, chain[len(live.found) :])
        else:
            del self._live[number]
            blocks = self._runtime.lookup(self.names[chain])
            self._runtime.hint(DoneHint(number + 1, self._day.stops[number], blocks=blocks))
            self.tally.requests += 1
            return False
        return True

    def look(self, chain: Ids) -> Found:
        """Look a chain up. What is found must be what was last put, and not past its time."""
        self._settle(PUTS_MAX)
        found = self._runtime.find(self.names[chain])
        have = chain[: len(found)]
        if (self._stamps[have] != found.stamps).any():
            self._settle(0)  # seen before its put was waited for
        must((self._stamps[have] == found.stamps).all(), "a block is found that nobody has put")
        over = int(np.count_nonzero(self._born_ns[have] + self._ttl_ns <= self.now_ns))
        must(over == 0, f"{over} blocks were found whose time is over")
        self.tally.wanted += len(chain)
        self.tally.found += len(found)
        return found

    def _demand(self, number: int, live: _Live, chain: Ids) -> None:
        if len(self._tickets) >= OPEN_MAX:
            self._take(next(iter(self._tickets)))
        part = slice(live.taken, live.taken + self._batch)
        pages = self._runtime.pages(live.found.blocks[part], 0)
        ticket = self._runtime.demand(pages, stamps=live.found.stamps[part], request=number + 1)
        self._tickets[number] = ticket, chain[: len(live.found)][part]
        live.taken += len(pages)
        self.tally.demanded += len(pages)
        self.tally.open_most = max(self.tally.open_most, len(self._tickets))

    def _take(self, number: int) -> None:
        """Wait for a demand, compare every byte of it, let it go."""
        ticket, numbers = self._tickets.pop(number)
        present = ~ticket.missing
        count = int(np.count_nonzero(present))
        ticket.push(self._buffer, skip_missing=True).wait()
        rows = self._runtime.peek(self._buffer, count, self._runtime.page_bytes)
        self.check_bytes(rows, numbers[present])
        ticket.release()
        self.tally.verified += count
        self.tally.gone += len(numbers) - count

    def check_bytes(self, rows: NDArray[np.uint8], numbers: Ids) -> None:
        wrong = (rows.view(np.uint64) != self._content(numbers)).any(axis=1)
        must(not wrong.any(), f"wrong bytes under the keys of blocks {numbers[wrong].tolist()}")

    def _content(self, numbers: Ids) -> NDArray[np.uint64]:
        """Pages (blocks, words): no two alike in any word, since an odd factor loses nothing."""
        factor = np.uint64(0x9E37_79B9_7F4A_7C15)
        words: NDArray[np.uint64] = self._base + numbers.astype(np.uint64)[:, None] * factor
        return words

    # --- puts ---

    def _put(self, number: int, new: Ids) -> None:
        level = "fast" if number % DURABLE_EVERY else "durable"
        for start in range(0, len(new), self._batch):
            some = new[start : start + self._batch]
            pages = self._content(some).view(np.uint8).reshape(len(some), 1, -1)
            ticket = self._runtime.put(self.names[some], pages, durability=level)
            self._puts.append((ticket, some, self.now_ns))
            self._settle(PUTS_MAX)

    def _settle(self, most: int) -> None:
        """Take note of puts in their order, until one is not done and at most so many are left."""
        while self._puts and (len(self._puts) > most or self._puts[0][0].done):
            ticket, numbers, at_ns = self._puts.popleft()
            ticket.wait()
            must(not ticket.failures, f"a put failed: {ticket.failures[:1]}")
            new = self._stamps[numbers] != ticket.stamps
            self._stamps[numbers] = ticket.stamps
            self._born_ns[numbers[new]] = at_ns
            self.tally.put += int(np.count_nonzero(new))
            self.tally.puts_known += int(np.count_nonzero(~new))
