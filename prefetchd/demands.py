"""Open demands: what each still waits for, and when it is answered.

Decides when a demand is complete, expired or lost, and what its answer says. Gives out no slots
and issues no reads; the core does. Only demands that what has happened concerns are looked at, and
of these only the pages concerned, so that many that wait cost nothing: an index tells for each slot
on its way which page of which demand waits for it. An entry whose demand was answered meanwhile is
passed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetchd.masks import every, some
from prefetchd.model import NO_IDS, Codes, Demanded, Ids, Mask, Outcome, Ready, Slots
from prefetchd.staging import READY, Staging

UNPLACED, FAILED = -2, -1
# Beside an array numpy takes ten times as long for a member of an enumeration.
TIMELY, LATE, MISS = np.uint8(Outcome.TIMELY), np.uint8(Outcome.LATE), np.uint8(Outcome.MISS)
# In the index the order of a demand stands above the place of its page: for the most slots that
# there may be, and for 2^39 demands, one every 20 us for four months.
_ORDER_BITS = 24


@dataclass(slots=True)
class Demand:
    """Per page its slot (or UNPLACED, FAILED), its outcome, and how long it was waited for.
    `order`: the older, the smaller. `unsettled`: pages that are neither readable nor failed."""

    number: int
    order: int
    pages: Ids
    slots: Slots
    outcomes: Codes
    waits_ns: Ids
    demanded_ns: int
    deadline_ns: int
    once: bool = False
    unsettled: int = 0


class Demands:
    """All open demands; those in `waiting` have not been answered, oldest first."""

    def __init__(self, staging: Staging, tickets_max: int, *, retain: bool = True) -> None:
        self._staging = staging
        self._retain = retain
        self._tickets_max = tickets_max
        self._open: dict[int, Demand] = {}
        self.waiting: dict[int, Demand] = {}  # by order
        self._lacking: dict[int, Demand] = {}  # those of them with pages UNPLACED, oldest first
        # Of each slot on its way the first; of others maybe one that was answered.
        self._waiter = np.full(staging.slots, -1, np.int64)
        self._others: dict[int, list[int]] = {}  # and those after it
        self._news: list[tuple[Demand, Ids]] = []  # whose pages have settled since `complete`
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
        placed = demand.slots >= 0
        held = demand.slots if every(placed) else demand.slots[placed]
        self._staging.pins[held] -= 1
        leaving = NO_IDS
        if demand.once:
            leaving = demand.slots[placed & (demand.outcomes == MISS)]
        elif not self._retain:
            leaving = held
        if self.waiting.pop(demand.order, None) is None:
            return leaving, None
        self._lacking.pop(demand.order, None)
        nothing = np.full(len(demand.slots), FAILED, np.int64)
        return leaving, Ready(number, nothing, demand.outcomes, demand.waits_ns)

    def wait(self, demand: Demand) -> None:
        """From here on it waits, the youngest of all, for all its pages but those that are
        readable."""
        self.waiting[demand.order] = demand

    def wait_for(self, demand: Demand, places: Ids, slots: Slots) -> None:
        """Its pages at `places` are on their way into these slots, until `arrived` or `lose`."""
        entries = places + (demand.order << _ORDER_BITS)
        alone = len(self.waiting) == 1 and not self._others
        if not alone and some(taken := self._waiter[slots] >= 0):
            for slot, entry in zip(slots[taken].tolist(), entries[taken].tolist(), strict=True):
                self._others.setdefault(slot, []).append(entry)
            slots, entries = slots[~taken], entries[~taken]
        self._waiter[slots] = entries

    def arrived(self, slots: Slots) -> None:
        """These slots have become readable: whoever waits for them has news."""
        if self.waiting:
            self._news += self._waiting_for(slots)
        elif self._others:
            self._others.clear()

    def _waiting_for(self, slots: Slots) -> list[tuple[Demand, Ids]]:
        """Who waits for these slots, and for which pages; from here on nobody does."""
        entries = self._waiter[slots]
        self._waiter[slots] = -1
        if self._others:
            others = [entry for s in slots.tolist() for entry in self._others.pop(s, ())]
            entries = np.concatenate([entries, np.array(others, np.int64)])
        orders = entries >> _ORDER_BITS
        places = entries & ((1 << _ORDER_BITS) - 1)
        if len(self.waiting) == 1:
            (concerned,) = self.waiting
            return self._of(concerned, orders, places)
        return [
            pair
            for concerned in dict.fromkeys(orders.tolist())
            if concerned in self.waiting
            for pair in self._of(concerned, orders, places)
        ]

    def _of(self, order: int, orders: Ids, places: Ids) -> list[tuple[Demand, Ids]]:
        mine = orders == order
        if not every(mine):
            places = places[mine]
        return [(self.waiting[order], places)] if len(places) else []

    def lacking(self) -> Demand | None:
        """The oldest waiting demand that has no slots for some of its pages."""
        return next(iter(self._lacking.values()), None)

    def still_absent(self, demand: Demand) -> Ids:
        """Which of its pages have no slots yet. It takes up what others have brought meanwhile."""
        (unplaced,) = (demand.slots == UNPLACED).nonzero()
        found = self._staging.slot_of[demand.pages[unplaced]].astype(np.int64)
        shared = found >= 0
        if some(shared):
            places, slots = unplaced[shared], found[shared]
            coming = self._staging.state[slots] != READY
            self._news.append((demand, places[~coming]))
            self.give(demand, places, slots)
            self.wait_for(demand, places[coming], slots[coming])
        left: Ids = unplaced[~shared]
        return left

    def give(self, demand: Demand, places: Ids, slots: Slots) -> None:
        """Its pages at `places` are in these slots or on the way there; it holds them."""
        demand.slots[places] = slots
        self._staging.pins[slots] += 1

    def placed(self, demand: Demand, *, every_page: bool) -> None:
        """Some of its pages were given slots; once all have any, it never lacks them again."""
        if every_page:
            self._lacking.pop(demand.order, None)
        else:
            self._lacking[demand.order] = demand

    def step_back(self, demand: Demand) -> None:
        """Give back the pins of a demand that has to wait behind an older one: it begins anew, and
        what was here may have gone by then, so all of it counts as missed."""
        self._staging.pins[demand.slots[demand.slots >= 0]] -= 1
        demand.slots[:] = UNPLACED
        demand.outcomes[:] = MISS
        demand.unsettled = len(demand.slots)
        self._lacking[demand.order] = demand

    def answer(self, demand: Demand) -> Ready:
        self.waiting.pop(demand.order, None)
        self._lacking.pop(demand.order, None)
        demand.slots.flags.writeable = False  # its pins are given back by it
        return Ready(demand.number, demand.slots, demand.outcomes, demand.waits_ns)

    def complete(self, now_ns: int) -> list[Ready]:
        """Answer every waiting demand that lacks nothing any more, the oldest first."""
        if not self._news:
            return []
        concerned = {demand.order for demand, _ in self._news}
        for demand, places in self._news:
            demand.waits_ns[places] = max(1, now_ns - demand.demanded_ns)
            demand.unsettled -= len(places)
        self._news.clear()
        due = [self.waiting[order] for order in sorted(concerned) if order in self.waiting]
        return [self.answer(demand) for demand in due if not demand.unsettled]

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
        news = self._waiting_for(slots)
        for demand, places in news:
            demand.slots[places] = FAILED
        self._news += news

    def next_deadline_ns(self, default_ns: int) -> int:
        return min([default_ns, *(d.deadline_ns for d in self.waiting.values())])

    def _readable(self, slots: Slots) -> Mask:
        readable: Mask = self._staging.state[np.maximum(slots, 0)] == READY
        readable &= slots >= 0
        return readable
