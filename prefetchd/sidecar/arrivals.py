"""What a namespace's device has finished, taken note of a part at a time.

Decides how much of it the loop deals with before it looks at its sockets again, and what that has
cost. Pages are verified in parts, and the core is told of several parts at once: of the last of
what was reaped, and before that of so many that the first of them is not kept waiting by what is
reaped meanwhile. Refuses to know who waits for them.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from prefetchd.driver import RawReads
from prefetchd.engine import Engine
from prefetchd.model import Completed
from prefetchd.sidecar.loop_turns import (
    BEGIN_COST,
    BEGINS_COST,
    PART_PAGES,
    READ_COST,
    READS_COST,
    VERIFIED_BYTES_A_COST,
)

_TOLD_PARTS_MAX = 8
"""Telling costs about as much for one part as for a few."""


class Arrivals:
    """All methods are called by the loop's thread; they raise EngineError."""

    def __init__(self, engine: Engine, page_bytes: int) -> None:
        self._engine = engine
        self._page_cost = READ_COST + page_bytes // VERIFIED_BYTES_A_COST
        self._raw: deque[RawReads] = deque()
        self._verified: list[Completed] = []

    def __bool__(self) -> bool:
        """Whether something was reaped that nobody has been told of."""
        return bool(self._raw)

    def reap(self, *, in_parts: bool) -> int:
        """See what has ended, for `go_on`, and begin what may begin now; the cost."""
        device = self._engine.driver.device
        before = device.in_flight
        reads, _ = self._engine.reap()
        begun = device.in_flight - before
        if reads is not None:
            self._raw += parts(reads, PART_PAGES) if in_parts else [reads]
            begun += len(reads.slots)
        return BEGINS_COST + max(0, begun) * BEGIN_COST

    def go_on(self) -> int:
        """Verify a part of what was reaped, and tell of it or leave that to a later one. The
        cost."""
        if not self._raw:
            return 0
        part = self._raw.popleft()
        self._verified.append(self._engine.driver.verify(part))
        cost = len(part.slots) * self._page_cost
        if self._raw and len(self._verified) < _TOLD_PARTS_MAX:
            return cost
        ended, self._verified = together(self._verified), []
        self._engine.handle(ended)
        return cost + READS_COST + len(ended.slots) * READ_COST

    def finish(self) -> int:
        """Tell of all that was reaped; the cost."""
        cost = 0
        while self._raw:
            cost += self.go_on()
        return cost

    def forget(self) -> None:
        """The engine has stopped."""
        self._raw.clear()
        self._verified.clear()


def parts(reads: RawReads, pages_max: int) -> list[RawReads]:
    """In order, at most so many pages in each."""
    cuts = [slice(start, start + pages_max) for start in range(0, len(reads.slots), pages_max)]
    return [
        RawReads(reads.slots[cut], reads.pages[cut], reads.generations[cut], reads.whole[cut])
        for cut in cuts
    ]


def together(ended: list[Completed]) -> Completed:
    if len(ended) == 1:
        return ended[0]
    return Completed(
        np.concatenate([part.slots for part in ended]),
        np.concatenate([part.generations for part in ended]),
        np.concatenate([part.verified for part in ended]),
    )
