"""What callers hold: a demand's ticket and a put's ticket.

Decides how an answer is waited for, looked at and given back, from threads and from asyncio.
Knows the engine only as something that can be driven.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from prefetchd.gpu import GpuDevice, Push
from prefetchd.lookups import Stamps
from prefetchd.model import Codes, Ids, Mask, Outcome, Ready, Slots


class PageMissing(Exception):  # noqa: N818  (it is an answer, not a fault)
    """A page of a demand could not be had: it must be recomputed."""


class Driven(Protocol):
    """What answers tickets, as far as they know: an engine here, or the line to one elsewhere."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Under which tickets are answered and callbacks run."""

    @property
    def awaiting(self) -> list[Callable[[], object]]:
        """Told when there is nothing to come."""

    def clock(self) -> int: ...
    def wait(self, done: Callable[[], bool], deadline_ns: int | None = None) -> bool: ...
    def wake(self) -> None: ...
    def check(self) -> None: ...
    def resolved(self) -> None: ...
    def release(self, number: int) -> None: ...


class _Awaitable:
    """Done once, then for ever; can be waited for by a thread or awaited by a coroutine."""

    def __init__(self, engine: Driven) -> None:
        self._engine = engine
        self._callbacks: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        raise NotImplementedError

    def _fire(self) -> None:
        self._engine.resolved()
        for callback in self._callbacks:
            callback()

    def then(self, callback: Callable[[], object]) -> None:
        """Call this when it is done: now if it is. The caller holds the engine's lock."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Self]:
        engine = self._engine
        with engine.lock:
            pending = not self.done
            if pending:
                engine.check()
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                tell = partial(_tell, loop, future)
                self._callbacks.append(tell)
                engine.awaiting.append(tell)
        if pending:
            try:
                engine.wake()
                yield from future
            finally:
                with engine.lock:
                    engine.awaiting.remove(tell)
            if not self.done:
                engine.check()
        return self


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    # The coroutine may have been cancelled and its loop closed: then nobody wants to know.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Ticket(_Awaitable):
    """A demand. Wait for it, read its pages in place or push them, then release it.

    After `wait`: `slots` (int64, -1 where a page could not be had), `outcomes` (Outcome, one a
    page) and `waits_ns` (int64, demand until readable), all in the order of `pages`.
    """

    def __init__(
        self,
        engine: Driven,
        gpu: GpuDevice,
        staged: NDArray[np.uint8],
        number: int,
        pages: Ids,
        fresh: Mask | None = None,
    ) -> None:
        """`fresh`: which of the pages are asked for (None: all); the others could not be had."""
        super().__init__(engine)
        self.fresh = fresh
        self.asked = pages if fresh is None else pages[fresh]
        self._gpu = gpu
        self._staged = staged  # (slots, page_bytes), read-only
        self.number = number
        self.pages = pages
        self._ready: Ready | None = None
        self._pushes: list[Push] = []
        self._released = False

    @property
    def done(self) -> bool:
        return self._ready is not None

    def resolve(self, ready: Ready) -> None:
        self._ready = ready if self.fresh is None else _spread(ready, self.fresh)
        self._fire()

    def wait(self) -> Self:
        """Block until the demand is answered, at its deadline at the latest."""
        if self._ready is None:
            self._engine.wait(lambda: self._ready is not None)
        return self

    @property
    def answer(self) -> Ready:
        """`slots`, `outcomes` and `waits_ns` together."""
        if self._ready is None:
            self.wait()
        assert self._ready is not None
        return self._ready

    @property
    def slots(self) -> Slots:
        return self.answer.slots

    @property
    def outcomes(self) -> Codes:
        return self.answer.outcomes

    @property
    def waits_ns(self) -> NDArray[np.int64]:
        return self.answer.waits_ns

    @property
    def missing(self) -> Mask:
        """Which pages could not be had (bool, one a page)."""
        missing: Mask = self.answer.slots < 0
        return missing

    def view(self, place: int) -> NDArray[np.uint8]:
        """Page number `place` of the demand, in place: read-only, valid until `release`.

        Raises PageMissing if it could not be had.
        """
        page: NDArray[np.uint8] = self._staged[self._present(np.array([place]))[0]]
        return page

    def views(self) -> list[NDArray[np.uint8]]:
        """All pages in place, without a copy. Raises PageMissing unless all could be had."""
        return [self._staged[slot] for slot in self._present(None)]

    def push(self, buffer: Any, start: int = 0, *, skip_missing: bool = False) -> Push:
        """Gather the pages into rows `start`... of a GPU buffer; `release` waits for the reads.

        With `skip_missing` the pages that could be had are pushed close together, in order.
        Raises PageMissing otherwise.
        """
        slots = self.slots[~self.missing] if skip_missing else self._present(None)
        push = self._gpu.push(slots, buffer, start)
        self._pushes.append(push)
        return push

    def _present(self, places: Ids | None) -> Slots:
        if self._released:
            raise ValueError("the ticket was released; its pages may be others by now")
        slots = self.slots if places is None else self.slots[places]
        if slots.min(initial=0) < 0:
            count = int(np.count_nonzero(slots < 0))
            raise PageMissing(f"{count} of {len(slots)} pages could not be had; recompute them")
        return slots

    def release(self) -> None:
        """Give the pins back, once pushes have read the slots. Harmless when repeated."""
        if self._released:
            return
        self._released = True
        for push in self._pushes:
            if not push.sources_free():
                push.wait()
        self._give_back()

    def _give_back(self) -> None:
        self._engine.release(self.number)

    def __enter__(self) -> Self:
        return self.wait()

    def __exit__(self, *_: object) -> None:
        self.release()


def _spread(ready: Ready, fresh: Mask) -> Ready:
    """The answer for all pages, of which only the fresh ones were asked for."""
    slots = np.full(len(fresh), -1, np.int64)
    outcomes = np.full(len(fresh), Outcome.MISS, np.uint8)
    waits_ns = np.zeros(len(fresh), np.int64)
    slots[fresh], outcomes[fresh], waits_ns[fresh] = ready.slots, ready.outcomes, ready.waits_ns
    return Ready(ready.ticket, slots, outcomes, waits_ns)


class PutTicket(_Awaitable):
    """A put of several blocks. After `wait`, `blocks` (int64) has -1 for each that is not stored.

    `failures`: for each that failed, why. `refused`: positions of those that admission did not
    let in, which is no failure. A block put "fast" can fail after it was found: then it is found no
    more, `blocks` has -1 for it from there on, and `failures` says why.
    """

    def __init__(self, engine: Driven, count: int) -> None:
        super().__init__(engine)
        self._blocks = np.full(count, -1, np.int64)
        self._stamps = np.zeros(count, np.int64)
        self._left = count
        self.failures: list[str] = []
        self.refused: list[int] = []

    @property
    def done(self) -> bool:
        return self._left == 0

    def settle(self, position: int, block: int, failure: str = "", stamp: int = 0) -> None:
        """One block has ended."""
        self._blocks[position] = block
        self._stamps[position] = stamp
        if failure:
            self.failures.append(failure)
        self._left -= 1
        if self._left == 0:
            self._fire()

    def withdraw(self, position: int, failure: str) -> None:
        """A block that had been acknowledged could not be written."""
        self._blocks[position], self._stamps[position] = -1, 0
        self.failures.append(failure)

    def wait(self, timeout_s: float = 60.0) -> Self:
        """Block until every block of the put is readable, or has failed. Raises TimeoutError."""
        deadline_ns = self._engine.clock() + int(timeout_s * 1e9)
        if not self.done and not self._engine.wait(lambda: self.done, deadline_ns):
            raise TimeoutError(f"{self._left} blocks of a put were not written in {timeout_s} s")
        return self

    @property
    def blocks(self) -> Ids:
        self.wait()
        return self._blocks

    @property
    def blocks_so_far(self) -> Ids:
        """The same without waiting: -1 also for those that have not ended."""
        return self._blocks

    @property
    def stamps(self) -> Stamps:
        """Of `blocks`, for `Runtime.demand`."""
        self.wait()
        return self._stamps
