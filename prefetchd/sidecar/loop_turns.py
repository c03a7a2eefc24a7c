"""Whose turn it is in the daemon's one thread: every namespace gets its share, whatever it sends.

Decides in which order what has come is dealt with, and for how long before the loop looks at its
sockets again. Refuses to know what a task does; it says itself what it has cost. Within one
member, tasks take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from prefetchd.sidecar.shares import FairOrder

Task = Callable[[], int]
"""Deals with one thing, and says what that has cost."""

# About the microseconds that each takes. Counts and no clock: the order then depends on what was
# asked for, and not on what else this machine does.
MESSAGE_COST, BYTES_A_COST = 20, 64
READS_COST, READ_COST = 200, 8
"""Of asking for reads, or of being told of their ends, once and for each."""
BEGINS_COST, BEGIN_COST = 150, 4
"""Of giving operations to a drive, once and for each."""
STEP_COST = 150
"""Of a hint, and of a step of learning and planning."""
USE_COST = 5
"""Of a demand that was met in place."""
VERIFIED_BYTES_A_COST = 4096
PART_PAGES = 8
"""Of reads whose end is taken note of without a look at the sockets, while there are others."""
_SLICE_COST, _SHARED_SLICE_COST = 500, 150
_CREDIT = 1000
"""Of a member that comes to ask: a demand, from its message to its answer, fits in."""


class LoopTurns:
    def __init__(self) -> None:
        self._order = FairOrder(_CREDIT)
        self._lines: dict[Hashable, dict[Hashable, Task]] = {}
        self._served: Hashable = None  # the member whose task is being carried out

    def __bool__(self) -> bool:
        return bool(self._lines)

    def offer(self, member: Hashable, weight: int, key: Hashable, task: Task) -> None:
        """There is something to do for this member. A key that waits already keeps its place."""
        line = self._lines.get(member)
        if line is None:
            line = self._lines[member] = {}
            self._order.join(member, weight)
            self._order.wait(member)
        line.setdefault(key, task)

    def withdraw(self, key: Hashable) -> None:
        for member, line in list(self._lines.items()):
            if line.pop(key, None) is not None and not line and member != self._served:
                self._rest(member)

    def _rest(self, member: Hashable) -> None:
        del self._lines[member]
        self._order.rest(member)
        if not self._lines:
            self._order.forget_settled()

    def work(self, *, shared: bool = False) -> None:
        """One slice: a task at least, if there is one. Hardly more if it is `shared`, so that who
        comes meanwhile waits for no more than a task."""
        spent, most = 0, _SHARED_SLICE_COST if shared else _SLICE_COST
        while spent < most and (member := self._order.first()) is not None:
            line, self._served = self._lines[member], member
            key = next(iter(line))
            cost = line.pop(key)()  # which may offer more, or withdraw what is there
            self._served = None
            self._order.charge(member, cost)
            spent += cost
            if not line:
                self._rest(member)
