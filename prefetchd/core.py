"""The core: every decision of the staging engine, as a state machine.

    handle(event, now_ns) -> commands

No I/O, no clock, no thread, no random number: so the same core runs behind a real drive and in a
simulator, and a log of its events can be replayed. A driver carries the commands out.

*Demand.* Pages are looked up in the staging map and pinned. Readable ones are answered at once.
Absent ones get slots (clean pages make room) and are read with the highest class; those whose
read is already in flight simply wait for it. When room is short the oldest demand has all of it; a
younger one that lacks pages holds none meanwhile, or the two could wait for each other. A demand
is answered with one `Ready`: when all its pages are readable, or have failed, or its deadline has
come. A page that could not be had has slot -1: a failure is a miss, never wrong bytes.

*Prefetch.* A hint is turned into reads at once. Demands reach the predictor and the eviction
policy later, when nothing urgent waits (`Idle`), in the order they came: neither a demand nor a
hint pays for learning. Then the reserve of free slots is made good, too. A new plan replaces what
is left of the old one, and none is started while a demand waits.

*Failure.* A demanded read that fails is retried once, then answered as a miss. A read that does
not end in time is abandoned: its slot stays the device's until the completion does come, so that
no slot is ever shared (law 2). Completions carry the slot's generation.
*Pages that callers bring* take slots that no demand lacks, and keep them until the store has them.

Arrays in events and commands are never written to afterwards; nothing iterates a set; ties break
by the order of the caller's arrays.
"""

from __future__ import annotations

import numpy as np

from prefetchd.demands import LATE, MISS, TIMELY, UNPLACED, Demand, Demands
from prefetchd.fills import Fills
from prefetchd.foresight import Foresight
from prefetchd.guarded import Guarded
from prefetchd.leaving import Leaving
from prefetchd.limits import CoreLimits
from prefetchd.masks import every, some
from prefetchd.model import (
    NO_IDS,
    Access,
    Command,
    Completed,
    Demanded,
    Event,
    Hinted,
    Idle,
    Ids,
    IoClass,
    PlanSoon,
    Released,
    Slots,
    Used,
)
from prefetchd.observer import Observer
from prefetchd.planner import Plan, Planner
from prefetchd.predictor import Predictor
from prefetchd.reads import Reads
from prefetchd.staging import READING, Staging

__all__ = ["Core", "CoreLimits"]


class Core:
    def __init__(
        self, staging: Staging, predictor: Predictor, planner: Planner, limits: CoreLimits
    ) -> None:
        self.staging = staging
        self.planner = planner
        self.limits = limits
        guarded = Guarded(predictor)
        if staging.eviction.history is not None:
            guarded.share(staging.eviction.history)
        self._observer = Observer(staging, guarded, planner)
        self.demands = Demands(staging, limits.tickets_max, retain=limits.retain)
        self.foresight = Foresight(staging, guarded, planner, self._observer, limits.candidates)
        self._leaving = Leaving(staging)
        self.reads = Reads(staging, planner, self._observer.counters, limits.read_timeout_ns)
        self.counters = self._observer.counters
        slots_max = int(limits.filled_share_max * staging.slots)
        self.fills = Fills(staging, self.demands, self._observer, self.foresight, slots_max)

    @property
    def reading(self) -> int:
        """Reads in flight that are waited for."""
        return self.reads.in_flight

    @property
    def unanswered(self) -> int:  # demands
        return len(self.demands.waiting)

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take note of what happened; return what is to be done, in this order. Raises ValueError
        for an event that breaks the contract (an unknown or reused ticket, too many open ones); the
        state is then unchanged. Raises PredictorError for a predictor at fault; there is no going
        on then."""
        self.foresight.fresh = False
        if isinstance(event, Demanded):
            return self._demanded(event, now_ns)
        if isinstance(event, Completed):
            commands = self._completed(event, now_ns)
        elif isinstance(event, Released):
            commands = self._released(event, now_ns)
        elif isinstance(event, Hinted):
            commands = self._hinted(event, now_ns)
        elif isinstance(event, Idle):
            commands = self._idle(now_ns)
        elif isinstance(event, Used):
            commands = self._used(event, now_ns)
        else:
            commands = [*self.fills.handle(event), *self._serve(now_ns)]
        if now_ns >= self.reads.look_ns:
            commands += self._sweep(now_ns)
        return commands

    # --- demand ---

    def _demanded(self, event: Demanded, now_ns: int) -> list[Command]:
        staging, pages = self.staging, event.pages
        demand = self.demands.open(event, staging.slot_of[pages].astype(np.int64), now_ns)
        here = demand.slots >= 0
        all_here = every(here)
        (places,) = here.nonzero()
        held = demand.slots if all_here else demand.slots.take(places)
        reading = staging.state.take(held) == READING
        fresh = staging.fresh.take(held)
        staging.pins[held] += 1
        any_reading, any_fresh = some(reading), some(fresh)
        if any_reading or any_fresh:
            found = np.maximum(fresh.view(np.uint8) * TIMELY, reading.view(np.uint8) * LATE)
            demand.outcomes[places] = found
        if any_fresh:
            (used,) = fresh.nonzero()
            self._observer.prefetches_used(held.take(used), late=reading.take(used))
        done = all_here and not any_reading
        commands: list[Command] = [self.demands.answer(demand)] if done else []
        if not done:
            coming = places.take(reading.nonzero()[0])
            commands = self._await(demand, coming, (~here).nonzero()[0], now_ns)
        access = Access(pages, demand.outcomes, event.request, event.scores, now_ns)
        self._observer.demanded(demand.slots, access, once=event.once)
        if event.once:
            return commands
        wanted = self.foresight.demanded(pages, now_ns, missed=not all_here)
        if wanted or self._observer.crowded:
            commands.append(PlanSoon())
        return commands

    def _used(self, event: Used, now_ns: int) -> list[Command]:
        """As if they had been demanded while they were here, and released. Some may have gone."""
        self._observer.used(event, now_ns)
        parts = [event.pages[part] for part in event.parts()]
        wanted = [self.foresight.demanded(pages, now_ns, missed=False) for pages in parts]
        return [PlanSoon()] if any(wanted) or self._observer.crowded else []

    def _await(self, demand: Demand, coming: Ids, absent: Ids, now_ns: int) -> list[Command]:
        """A new demand waits for pages that are on the way, and for absent ones."""
        self.demands.wait(demand)
        self.reads.look_ns = min(self.reads.look_ns, demand.deadline_ns)
        if len(absent):
            demand.outcomes[absent], demand.slots[absent] = MISS, UNPLACED
            self._observer.missed(demand.pages.take(absent))
            if self.demands.lacking():
                self.demands.step_back(demand)
                return []
        demand.unsettled = len(coming) + len(absent)
        if len(coming):
            self.demands.wait_for(demand, coming, demand.slots[coming])
        return self._place(demand, absent, now_ns) if len(absent) else []

    def _place(self, demand: Demand, absent: Ids, now_ns: int) -> list[Command]:
        """Give slots to a demand's `absent` pages, as many as can be had, and read them."""
        pages = demand.pages[absent]
        slots = self._take_slots(pages, IoClass.DEMAND)
        self.demands.placed(demand, every_page=len(slots) == len(pages))
        if len(slots) == 0:
            return []
        self.demands.give(demand, absent[: len(slots)], slots)
        self.demands.wait_for(demand, absent[: len(slots)], slots)
        self.counters.demand_reads += len(slots)
        return [self.reads.begin(pages[: len(slots)], slots, IoClass.DEMAND, now_ns)]

    def _take_slots(self, pages: Ids, io_class: IoClass, plan: Plan | None = None) -> Slots:
        """Slots for a prefix of absent pages; whatever goes out for them is accounted for."""
        if len(pages) == 0:
            return NO_IDS
        sources, confidence = (plan.sources, plan.confidence) if plan else (None, None)
        slots, evicted = self.staging.place(pages, io_class, sources, confidence)
        self._observer.evicted(evicted, by_prefetch=io_class == IoClass.PREFETCH)
        return slots

    def _released(self, event: Released, now_ns: int) -> list[Command]:
        leaving, answer = self.demands.close(event.ticket)
        self._leaving.drop(leaving)
        served = self._serve(now_ns) if self.demands.waiting else []
        return served if answer is None else [answer, *served]

    # --- completions ---

    def _completed(self, event: Completed, now_ns: int) -> list[Command]:
        slots, verified = self.reads.end(event, now_ns)
        self.demands.arrived(come := slots[verified])
        self._leaving.arrived(come)
        commands = [] if every(verified) else self._failed(slots[~verified], now_ns)
        more = [PlanSoon()] if self.foresight.used_up else []
        return [*commands, *self._serve(now_ns), *self._issue(now_ns), *more]

    def _failed(self, slots: Slots, now_ns: int) -> list[Command]:
        """Try again what somebody waits for; give up the rest."""
        staging = self.staging
        staging.attempts[slots] += 1
        again = (staging.pins[slots] > 0) & (staging.attempts[slots] < self.limits.attempts_max)
        lost, retried = slots[~again], slots[again]
        self.counters.failed += len(lost)
        self._lose(lost)
        staging.free(lost)
        if len(retried) == 0:
            return []
        self.counters.retried += len(retried)
        return [self.reads.begin(staging.page_of[retried], retried, IoClass.DEMAND, now_ns)]

    def _lose(self, slots: Slots) -> None:
        """The pages of these slots cannot be had: their waiters get none, their pins go."""
        self.demands.lose(slots)
        self.foresight.unsettle()
        staging = self.staging
        staging.pins[slots] = 0
        unused = slots[staging.fresh[slots]]
        self._observer.prefetches_wasted(staging.page_of[unused], staging.source[unused])

    def _serve(self, now_ns: int) -> list[Command]:
        """Find room for demands still without, answer those that are complete."""
        commands: list[Command] = []
        while (demand := self.demands.lacking()) is not None:
            commands += self._place(demand, self.demands.still_absent(demand), now_ns)
            if self.demands.lacking() is demand:
                break  # a younger one must not hold what this one waits for
        return [*commands, *self.demands.complete(now_ns)]

    def _sweep(self, now_ns: int) -> list[Command]:
        """Abandon reads and answer demands whose time is over."""
        commands: list[Command] = []
        over = self.reads.overdue(now_ns)
        if len(over):
            self._lose(over)
            commands = [self.reads.give_up(over), *self._serve(now_ns)]
        answers = self.demands.expire(now_ns)
        self.counters.expired += sum(int(np.count_nonzero(a.slots < 0)) for a in answers)
        commands += answers
        if answers and self.demands.waiting:
            commands += self._serve(now_ns)
        soon_ns = now_ns + self.limits.read_timeout_ns // 4
        self.reads.look_ns = self.demands.next_deadline_ns(soon_ns)
        return commands

    # --- prediction ---

    def _hinted(self, event: Hinted, now_ns: int) -> list[Command]:
        """Guess and read first; what can be learned from earlier demands waits for `Idle`."""
        self.foresight.hinted(event.hint, now_ns)
        self.foresight.plan(now_ns)
        return [*self._issue(now_ns), PlanSoon()]

    def _idle(self, now_ns: int) -> list[Command]:
        """One small step of what can wait: a demand must never wait for long behind it. While hints
        drive the planning slots come first; without hints everything waits for what is learned."""
        commands: list[Command] = []
        if not self.foresight.hint_driven:
            if self.foresight.learn():
                return [PlanSoon()]
            self.foresight.plan(now_ns)
            commands = self._issue(now_ns)
        elif self.foresight.learn():
            commands = [PlanSoon()]
        evicted, for_prefetches = self.staging.replenish()
        self._observer.evicted(evicted, by_prefetch=for_prefetches)
        if self.demands.lacking():  # readers who do not ask tell nobody when they have done
            commands += self._serve(now_ns)
        return commands

    def _prefetch_room(self) -> int:
        """None while a demand waits, unless of pages needed in any case, on an idle device."""
        waiting = bool(self.demands.waiting)
        room = self.limits.prefetch_depth - self.reads.prefetching
        if not self.foresight.restores or self.demands.lacking():
            return 0 if waiting else room
        return min(room, self.planner.busy_depth(waiting=waiting) - self.reads.in_flight)

    def _issue(self, now_ns: int) -> list[Command]:
        """Start what the plan still holds, as far as the depth and waiting demands allow."""
        plan = self.foresight.take(self._prefetch_room() if self.foresight.planned else 0)
        slots = self._take_slots(plan.pages, IoClass.PREFETCH, plan)
        if len(slots) < len(plan.pages):
            self.foresight.unsettle()
        if len(slots) == 0:
            return []
        self.reads.prefetching += len(slots)
        self.counters.prefetch_reads += len(slots)
        return [self.reads.begin(plan.pages[: len(slots)], slots, IoClass.PREFETCH, now_ns)]
