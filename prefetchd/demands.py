"""Open demands: what each still waits for, and when it is answered.

Decides when a demand is complete, expired or lost, and what its answer says. Gives out no slots
and issues no reads; the core does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetchd.model import NO_IDS, Codes, Demanded, Ids, Mask, Outcome, Ready, Slots
from prefetchd.staging import READY, Staging

UNPLACED, FAILED = -2, -1


@dataclass(slots=True)
class Demand:
    """Per page its slot (or UNPLACED, FAILED), its outcome, and how long it was waited for."""

    number: int
    pages: Ids
    slots: Slots
    outcomes: Codes
    waits_ns: Ids
    demanded_ns: int
    deadline_ns: int
    once: bool = False
    lacking: bool = False  # whether pages are UNPLACED
    unsettled: Ids | None = None  # places that may not be readable yet; None: not looked at


class Demands:
    """All open demands; those in `waiting` have not been answered, oldest first."""

    def __init__(self, staging: Staging, tickets_max: int, *, retain: bool = True) -> None:
        self._staging = staging
        self._retain = retain
        self._tickets_max = tickets_max
        self._open: dict[int, Demand] = {}
        self.waiting: dict[int, Demand] = {}

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
            event.pages,
            slots,
            np.zeros(count, np.uint8),
            np.zeros(count, np.int64),
            now_ns,
            event.deadline_ns,
            event.once,
        )
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
        nothing = np.full(len(demand.slots), FAILED, np.int64)
        return leaving, Ready(number, nothing, demand.outcomes, demand.waits_ns)

    def lacking(self) -> Demand | None:
        """The oldest waiting demand that has no slots for some of its pages."""
        return next((demand for demand in self.waiting.values() if demand.lacking), None)

    def step_back(self, demand: Demand) -> None:
        """Give back the pins of a demand that has to wait behind an older one: it begins anew, and
        what was here may have gone by then, so all of it counts as missed."""
        self._staging.pins[demand.slots[demand.slots >= 0]] -= 1
        demand.slots[:] = UNPLACED
        demand.outcomes[:] = Outcome.MISS
        demand.lacking, demand.unsettled = True, None

    def answer(self, demand: Demand) -> Ready:
        self.waiting.pop(demand.number, None)
        return Ready(demand.number, demand.slots.copy(), demand.outcomes, demand.waits_ns)

    def complete(self, now_ns: int) -> list[Ready]:
        """Answer every waiting demand that lacks nothing any more."""
        answers = []
        for demand in list(self.waiting.values()):
            places = demand.unsettled
            if places is None:  # what was readable at first is pinned and stays so
                places = np.flatnonzero(demand.outcomes >= Outcome.LATE)
            slots = demand.slots[places]
            settled = self._readable(slots) | (slots == FAILED)
            if np.count_nonzero(settled):
                demand.waits_ns[places[settled]] = max(1, now_ns - demand.demanded_ns)
                places = places[~settled]
            demand.unsettled = places
            if len(places) == 0:
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
        for demand in self.waiting.values():
            demand.slots[np.isin(demand.slots, slots)] = FAILED

    def next_deadline_ns(self, default_ns: int) -> int:
        return min([default_ns, *(d.deadline_ns for d in self.waiting.values())])

    def _readable(self, slots: Slots) -> Mask:
        readable: Mask = self._staging.state[np.maximum(slots, 0)] == READY
        readable &= slots >= 0
        return readable
