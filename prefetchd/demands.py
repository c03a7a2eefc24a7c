"""Open demands: what each still waits for, and when it is answered.

Decides when a demand is complete, expired or lost, and what its answer says. Gives out no slots
and issues no reads; the core does. Only demands that what has happened concerns are looked at, so
that many that wait cost nothing: an index tells for each slot on its way who waits for it. A number
in it whose demand was answered meanwhile is passed over, and goes with the slot's read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetchd.model import NO_IDS, Codes, Demanded, Ids, Mask, Outcome, Ready, Slots, every, some
from prefetchd.staging import READING, READY, Staging

UNPLACED, FAILED = -2, -1
# Beside an array numpy takes ten times as long for a member of an enumeration.
TIMELY, LATE, MISS = np.uint8(Outcome.TIMELY), np.uint8(Outcome.LATE), np.uint8(Outcome.MISS)


@dataclass(slots=True)
class Demand:
    """Per page its slot (or UNPLACED, FAILED), its outcome, and how long it was waited for.
    `order`: the older, the smaller."""

    number: int
    order: int
    pages: Ids
    slots: Slots
    outcomes: Codes
    waits_ns: Ids
    demanded_ns: int
    deadline_ns: int
    once: bool = False


class Demands:
    """All open demands; those in `waiting` have not been answered, oldest first."""

    def __init__(self, staging: Staging, tickets_max: int, *, retain: bool = True) -> None:
        self._staging = staging
        self._retain = retain
        self._tickets_max = tickets_max
        self._open: dict[int, Demand] = {}
        self.waiting: dict[int, Demand] = {}
        self._lacking: dict[int, Demand] = {}  # those of them with pages UNPLACED, oldest first
        self._waiter = np.full(staging.slots, -1, np.int64)  # of each slot on its way, by number
        self._others: dict[int, list[int]] = {}  # of slots that several wait for
        self._due: dict[int, None] = {}  # numbers of those with news since `complete`
        self._opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, event: Demanded, slots: Slots, now_ns: int) -> Demand:
        """Take on a demand. Raises ValueError for a reused number or one demand too many."""
        if event.ticket in self._open:
            raise ValueError(f"ticket {event.ticket} is already open")
        if len(self._open) >= self._tickets_max:
            raise ValueError(f"{len(self._open)} demands are open, the most allowed: release some")
        count = len(event.pages)
        demand = Demand(
            event.ticket,
            self._opened,
            event.pages,
            slots,
            np.zeros(count, np.uint8),
            np.zeros(count, np.int64),
            now_ns,
            event.deadline_ns,
            event.once,
        )
        self._opened += 1
        self._open[event.ticket] = demand
        return demand

    def close(self, number: int) -> tuple[Slots, Ready | None]:
        """A reader is done, its pins go: the slots whose pages it was the only one to want. If it
        still waited, its answer: nothing.

        Raises ValueError for an unknown number.
        """
        demand = self._open.pop(number, None)
        if demand is None:
            raise ValueError(f"ticket {number} is not open")
        held = demand.slots[demand.slots >= 0]
        self._staging.pins[held] -= 1
        leaving = NO_IDS
        if demand.once:
            leaving = demand.slots[(demand.slots >= 0) & (demand.outcomes == Outcome.MISS)]
        elif not self._retain:
            leaving = held
        if self.waiting.pop(number, None) is None:
            return leaving, None
        self._lacking.pop(number, None)
        nothing = np.full(len(demand.slots), FAILED, np.int64)
        return leaving, Ready(number, nothing, demand.outcomes, demand.waits_ns)

    def wait(self, demand: Demand) -> None:
        """From here on it waits, the youngest of all."""
        self.waiting[demand.number] = demand

    def wait_for(self, demand: Demand, slots: Slots) -> None:
        """It waits for what is on its way into any of these slots, until `arrived` or `lose`."""
        on_the_way: Slots = slots[self._staging.state[slots] == READING]
        if len(on_the_way) < len(slots):
            self._due[demand.number] = None
        awaited = self._waiter[on_the_way] >= 0
        if some(awaited):
            for slot in on_the_way[awaited].tolist():
                self._others.setdefault(slot, []).append(demand.number)
            on_the_way = on_the_way[~awaited]
        self._waiter[on_the_way] = demand.number

    def arrived(self, slots: Slots) -> None:
        """These slots have become readable: whoever waits for them has news."""
        self._due.update(dict.fromkeys(self._waiting_for(slots)))

    def _waiting_for(self, slots: Slots) -> list[int]:
        first = self._waiter[slots]
        self._waiter[slots] = -1
        numbers = dict.fromkeys(first.tolist())
        numbers.pop(-1, None)
        if self._others:
            for slot in slots.tolist():
                numbers.update(dict.fromkeys(self._others.pop(slot, ())))
        return list(numbers)

    def lacking(self) -> Demand | None:
        """The oldest waiting demand that has no slots for some of its pages."""
        return next(iter(self._lacking.values()), None)

    def give(self, demand: Demand, places: Ids, slots: Slots) -> None:
        """Its pages at `places` are in these slots or on the way there; it holds them."""
        demand.slots[places] = slots
        self._staging.pins[slots] += 1
        self.wait_for(demand, slots)

    def placed(self, demand: Demand, *, every_page: bool) -> None:
        """Some of its pages were given slots; once all have any, it never lacks them again."""
        if every_page:
            self._lacking.pop(demand.number, None)
        else:
            self._lacking[demand.number] = demand

    def step_back(self, demand: Demand) -> None:
        """Give back the pins of a demand that has to wait behind an older one: it begins anew, and
        what was here may have gone by then, so all of it counts as missed."""
        self._staging.pins[demand.slots[demand.slots >= 0]] -= 1
        demand.slots[:] = UNPLACED
        demand.outcomes[:] = MISS
        self._lacking[demand.number] = demand

    def answer(self, demand: Demand) -> Ready:
        self.waiting.pop(demand.number, None)
        self._lacking.pop(demand.number, None)
        return Ready(demand.number, demand.slots.copy(), demand.outcomes, demand.waits_ns)

    def complete(self, now_ns: int) -> list[Ready]:
        """Answer every waiting demand that lacks nothing any more, the oldest first."""
        if not self._due:
            return []
        due = [self.waiting[number] for number in self._due if number in self.waiting]
        self._due.clear()
        if len(due) > 1:
            due.sort(key=lambda demand: demand.order)
        answers = []
        for demand in due:
            settled = self._readable(demand.slots) | (demand.slots == FAILED)
            news = settled & (demand.outcomes >= LATE) & (demand.waits_ns == 0)
            demand.waits_ns[news] = max(1, now_ns - demand.demanded_ns)
            if every(settled):
                answers.append(self.answer(demand))
        return answers

    def expire(self, now_ns: int) -> list[Ready]:
        """Answer every demand whose time is over with what there is; the rest has failed."""
        over = [d for d in self.waiting.values() if d.deadline_ns <= now_ns]
        for demand in over:
            unread = (demand.slots >= 0) & ~self._readable(demand.slots)
            self._staging.pins[demand.slots[unread]] -= 1
            late = unread | (demand.slots == UNPLACED)
            demand.slots[late] = FAILED
            demand.waits_ns[late] = now_ns - demand.demanded_ns
        return [self.answer(demand) for demand in over]

    def lose(self, slots: Slots) -> None:
        """The pages of these slots cannot be had."""
        for number in self._waiting_for(slots):
            if number in self.waiting:
                demand = self.waiting[number]
                demand.slots[np.isin(demand.slots, slots)] = FAILED
                self._due[number] = None

    def next_deadline_ns(self, default_ns: int) -> int:
        return min([default_ns, *(d.deadline_ns for d in self.waiting.values())])

    def _readable(self, slots: Slots) -> Mask:
        readable: Mask = self._staging.state[np.maximum(slots, 0)] == READY
        readable &= slots >= 0
        return readable
