"""Who goes next, and how much may be under way: fair shares as arithmetic, without I/O and clock.

Decides the order of those that wait for one thing (a thread, a drive) and how much of a drive each
may have under way. Costs are whole numbers in any unit; times, where one is needed, come with the
calls. Refuses to know what is served and who the members are.

The order is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): what is served moves its
member's own time on by cost / weight, who waits has the time at which it began to, and the smallest
goes first. With several under way at once it still shares fairly (Jin, Chase, Kaur, SIGMETRICS
2004). Less urgent work waits a bounded time longer, so it yields and does not starve.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.sidecar.window import UNBOUNDED, Window

WEIGHT_MAX = 1000
_SCALE = 1 << 20  # of time, so that whole numbers will do


def check_weight(weight: int) -> int:
    """Raises ValueError."""
    if not 1 <= weight <= WEIGHT_MAX:
        raise ValueError(f"a weight is a whole number from 1 to {WEIGHT_MAX}, not {weight}")
    return weight


@dataclass(slots=True)
class _Standing:
    weight: int
    number: int  # in order of joining: ties go to who came first
    finish: int = 0
    start: int = 0
    handicap: int = 0
    waits: bool = False


class FairOrder:
    """Members wait, the `first` is served, and its cost is charged.

    `credit`, in cost at weight 1: so much of its share may a member that rested have served before
    it counts as having waited only from now. What it asks in short bursts then goes before the work
    of those who ask without end, who get as much less as it was served ahead of them, and no more.
    """

    def __init__(self, credit: int = 0) -> None:
        self._credit = credit * _SCALE
        self._members: dict[Hashable, _Standing] = {}
        self._waiting: dict[Hashable, _Standing] = {}
        self._time = 0
        self._joined = 0

    def join(self, member: Hashable, weight: int = 1) -> None:
        """A member that is there already gets the new weight."""
        known = self._members.get(member)
        if known is not None:
            known.weight = check_weight(weight)
            return
        self._joined += 1
        start = self._time - self._credit
        self._members[member] = _Standing(check_weight(weight), self._joined, start)

    def leave(self, member: Hashable) -> None:
        self._members.pop(member, None)
        self._waiting.pop(member, None)

    def __contains__(self, member: Hashable) -> bool:
        return member in self._members

    def wait(self, member: Hashable, handicap: int = 0) -> None:
        """It has something to be served. `handicap`, in cost at weight 1: how much others may get
        meanwhile before it counts as having waited from now."""
        standing = self._members[member]
        if not standing.waits:
            standing.waits = True
            standing.start = max(self._time - self._credit, standing.finish)
            self._waiting[member] = standing
        standing.handicap = handicap * _SCALE

    def rest(self, member: Hashable) -> None:
        """It has nothing any more."""
        if self._waiting.pop(member, None) is not None:
            self._members[member].waits = False

    def first(self) -> Hashable | None:
        """Of those that wait, whose turn it is."""
        if len(self._waiting) < 2:
            return next(iter(self._waiting), None)
        return min(self._waiting, key=self._key)

    def _key(self, member: Hashable) -> tuple[int, int]:
        standing = self._members[member]
        return standing.start + standing.handicap, standing.number

    def until_next(self, member: Hashable) -> int:
        """The cost that `member`, which waits, may have served before it is another's turn; 0 if it
        is another's already."""
        others = [self._key(other) for other in self._waiting if other != member]
        if not others:
            return UNBOUNDED
        own, number = self._key(member)
        other, rival = min(others)
        if (own, number) > (other, rival):
            return 0
        return (other - own) * self._members[member].weight // _SCALE + 1

    def ahead(self, member: Hashable) -> int:
        """By what cost `member`, which waits, was served more than its share of late."""
        standing = self._members[member]
        return (standing.start - self._time) * standing.weight // _SCALE

    @property
    def waiting(self) -> Iterable[Hashable]:
        return self._waiting

    def forget_settled(self) -> None:
        """Let go of those that wait for nothing and owe nothing: they would come back the same."""
        for member in [
            m
            for m, s in self._members.items()
            if not s.waits and s.finish <= self._time - self._credit
        ]:
            del self._members[member]

    def charge(self, member: Hashable, cost: int) -> None:
        """So much of its work was served, whether it had waited or not."""
        standing = self._members[member]
        rested = max(self._time - self._credit, standing.finish)
        start = standing.start if standing.waits else rested
        self._time = max(self._time, start)
        standing.finish = start + cost * _SCALE // standing.weight
        standing.start = standing.finish


_HANDICAPS = (0, 2, 4)
"""Of demands, prefetches and writes, in windows: what others' more urgent work gets before them."""
_HANDICAP_WINDOW_MAX = 8 << 20
_LATELY_NS = 10_000_000_000


@dataclass(slots=True)
class _Flow:
    weight: int
    present: bool = False
    in_flight: int = 0
    demands: int = 0
    ahead_bytes: int = 0
    demanded_ns: int = -_LATELY_NS
    demand_waits: bool = False


class DriveShares:
    """Bytes in flight on one drive, shared out by weight among the members that are present.

    While only one is, nothing is bounded. Else all together keep a `window` in flight, in fair
    order, except that a demand of a member that has had less than its share begins at once: it does
    not wait for another's completion, up to its share, or to a window if it had nothing in flight.
    What stands ahead of it in the drive then is brief, at the cost of the drive's rate, while
    demands come that the drive has room for; whose demands wait here for their turn anyway have
    more of it if the drive is kept busy.
    """

    def __init__(self, window: Window | None = None) -> None:
        self.window = window or Window()
        self._flows: dict[Hashable, _Flow] = {}
        self._order = FairOrder()
        self.in_flight = 0
        self.refused = 0
        """Times that a member was told to wait."""
        self._now_ns = 0

    def join(self, member: Hashable, weight: int) -> None:
        self._order.join(member, weight)
        self._flows.setdefault(member, _Flow(weight)).weight = weight

    def leave(self, member: Hashable) -> None:
        """Whatever it has in flight is not counted any more."""
        self._order.leave(member)
        flow = self._flows.pop(member, None)
        if flow is not None:
            self.in_flight -= flow.in_flight

    def counts(self, member: Hashable) -> tuple[int, int]:
        """How often demands of this member began, and the bytes of others that were in flight
        then, all together."""
        return self._flows[member].demands, self._flows[member].ahead_bytes

    def attend(self, member: Hashable, present: bool) -> None:
        """Whether somebody may ask something of this member at any time."""
        self._flows[member].present = present

    def _quick(self, member: Hashable) -> list[_Flow]:
        """Others that demand now and then and need not wait for that."""
        since_ns = self._now_ns - _LATELY_NS
        return [
            flow
            for other, flow in self._flows.items()
            if flow.demanded_ns > since_ns
            and other != member
            and (flow.present or flow.in_flight)
            and not flow.demand_waits
        ]

    def brief(self, member: Hashable) -> bool:
        """Whether this member, or one that waits, is to leave the drive quick for others."""
        return any(self._quick(one) for one in (*self._order.waiting, member))

    def window_for(self, member: Hashable) -> int:
        """How many bytes all together may have in flight when this member begins something. What
        they have in flight themselves for whom the drive is left quick is their own affair."""
        quick = self._quick(member)
        if not quick:
            return self.window.bytes
        return min(
            self.window.bytes, self.window.brief_bytes + sum(flow.in_flight for flow in quick)
        )

    def _share(self, member: Hashable, window: int) -> int:
        """Its part of the window, in bytes."""
        weights = sum(f.weight for f in self._flows.values() if f.present or f.in_flight)
        flow = self._flows[member]
        weights += 0 if flow.present or flow.in_flight else flow.weight
        return max(1, window * flow.weight // weights)

    def contended(self, member: Hashable) -> bool:
        """Whether somebody else is there for whom room is to be kept."""
        return any(
            (flow.present or flow.in_flight) and other != member
            for other, flow in self._flows.items()
        )

    def grant(
        self, member: Hashable, io_class: int, lengths: NDArray[np.int64], now_ns: int = 0
    ) -> int:
        """How many of these operations, from the first, may begin now; they count as begun.

        If not all, the member waits: see `next`.
        """
        flow, order, count = self._flows[member], self._order, len(lengths)
        self._now_ns = max(self._now_ns, now_ns)
        if io_class == 0:
            flow.demanded_ns = self._now_ns
        if self.contended(member):
            window = self.window_for(member)
            # All by the same measure, whoever it is brief for.
            wide = min(self.window.bytes, _HANDICAP_WINDOW_MAX)
            order.wait(member, _HANDICAPS[io_class] * wide)
            room = min(window - self.in_flight, order.until_next(member))
            if io_class == 0:
                at_once = self._share(member, window) - flow.in_flight if flow.in_flight else window
                room = max(room, at_once - order.ahead(member))
            # What begins within the room may go beyond it: the largest fits no window otherwise.
            before = np.cumsum(lengths) - lengths
            count = int(np.searchsorted(before, room)) if room > 0 else 0
        size = int(lengths[:count].sum())
        if size and io_class == 0:
            flow.demands += 1
            flow.ahead_bytes += self.in_flight - flow.in_flight
        if size:
            flow.in_flight += size
            self.in_flight += size
            order.charge(member, size)
        flow.demand_waits = io_class == 0 and count < len(lengths)
        if count == len(lengths):
            order.rest(member)
        else:
            self.refused += 1
        return count

    def refuse(self, member: Hashable, size: int) -> None:
        """What was granted did not begin after all, since the device had no room."""
        self.ended(member, size)
        self._order.charge(member, -size)

    def ended(self, member: Hashable, size: int) -> None:
        self._flows[member].in_flight -= size
        self.in_flight -= size

    def rest(self, member: Hashable) -> None:
        """It has nothing that waits to begin."""
        self._flows[member].demand_waits = False
        self._order.rest(member)

    @property
    def limited(self) -> bool:
        """Whether somebody waits for the window."""
        return self._order.first() is not None

    def next(self) -> Hashable | None:
        """Who is to be told that it may begin something now; it then asks for a grant."""
        first = self._order.first()
        return first if first is not None and self.in_flight < self.window_for(first) else None
