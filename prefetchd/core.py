"""The core: every decision of the staging engine, as a state machine.

    handle(event, now_ns) -> commands

It does no I/O, reads no clock, starts no thread and draws no random number, so the same core runs
behind a real drive and in a simulator, and a log of its events can be replayed. A driver executes
the commands and reports back with events.

How it works
------------
*Demand.* Pages are looked up in the staging map and pinned. Readable ones are answered at once.
Absent ones get slots (clean pages make room) and are read with the highest class; those whose
read is already in flight, for whatever reason, simply wait for it. A demand is answered with one
`Ready`: when all its pages are readable, or have failed, or its deadline has come. A page that
could not be had has slot -1: a failure is a miss, never wrong bytes.

*Prefetch.* Hints and accesses reach the predictor only when nothing urgent waits (`Hinted`,
`Idle`): a demand must not pay for learning. A new plan replaces what is left of the old one, so a
queued prefetch never outlives its reason. Demands keep a reserve of the device's depth.

*Failure.* A demanded read that fails is retried once, then answered as a miss. A read that does
not end in time is abandoned: its page is forgotten, and its slot stays the device's until the
completion does come, so that no slot is ever shared (law 2). Completions carry the slot's
generation; an old one changes nothing but that.

Rules: state is changed only in here; arrays in events and commands are never written to
afterwards; nothing iterates a set; ties break by the order of the caller's arrays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from prefetchd.counters import Counters
from prefetchd.model import (
    NO_IDS,
    Access,
    Cancel,
    ChainHint,
    Codes,
    Command,
    Completed,
    Demanded,
    DoneHint,
    Event,
    Feedback,
    Hinted,
    Idle,
    Ids,
    IoClass,
    Mask,
    Outcome,
    PageHint,
    PlanSoon,
    Read,
    Ready,
    Released,
    Slots,
    Verdict,
)
from prefetchd.planner import Plan, Planner
from prefetchd.predictor import Predictor
from prefetchd.staging import ABANDONED, READING, READY, Placement, Staging

_UNPLACED, _FAILED = -2, -1
_ACCESSES_MAX = 64  # demands not yet shown to the predictor
_HINT_DRIVEN_DEMANDS = 8  # for so many demands after a hint, planning waits for the next hint


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """`prefetch_depth`: most prefetch reads in flight. `read_timeout_ns`: after it, a read is
    abandoned. `tickets_max`: demands open at once. `attempts_max`: tries of a demanded read."""

    prefetch_depth: int = 32
    read_timeout_ns: int = 5_000_000_000
    tickets_max: int = 4096
    attempts_max: int = 2
    candidates: int = 1024


@dataclass(slots=True)
class _Ticket:
    """An open demand: per page its slot (or _UNPLACED, _FAILED), outcome and wait."""

    pages: Ids
    slots: Slots
    outcomes: Codes
    waits_ns: Ids
    demanded_ns: int
    deadline_ns: int
    answered: bool = False


class Core:
    def __init__(
        self, staging: Staging, predictor: Predictor, planner: Planner, limits: CoreLimits
    ) -> None:
        self.staging = staging
        self.predictor = predictor
        self.planner = planner
        self.limits = limits
        self.counters = Counters()
        self._tickets: dict[int, _Ticket] = {}
        self._waiting: dict[int, _Ticket] = {}  # those of them not answered yet, oldest first
        self._accesses: deque[Access] = deque()
        self._touches: list[tuple[Slots, Access]] = []
        self._pending = Plan(NO_IDS, NO_IDS, None)
        self._prefetching = 0
        self._reading = 0
        self._hinted_ns: int | None = None
        self._hint_driven = 0
        # A predictor that never guesses needs no turn of its own after a demand.
        self._plans = type(predictor).predict is not Predictor.predict
        self._sweep_ns = 0
        self._pushed_out = np.zeros(len(staging.slot_of), np.bool_)  # by a prefetch

    @property
    def reading(self) -> int:
        """Reads in flight."""
        return self._reading

    @property
    def open_tickets(self) -> int:
        return len(self._tickets)

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take note of what happened; return what is to be done, in this order.

        Raises ValueError for an event that breaks the contract (an unknown or reused ticket, too
        many open tickets); the state is then unchanged.
        """
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
        else:
            assert_never(event)
        if now_ns >= self._sweep_ns:
            commands += self._sweep(now_ns)
        return commands

    # --- demand ---

    def _demanded(self, event: Demanded, now_ns: int) -> list[Command]:
        if event.ticket in self._tickets:
            raise ValueError(f"ticket {event.ticket} is already open")
        if len(self._tickets) >= self.limits.tickets_max:
            raise ValueError(f"{len(self._tickets)} demands are open, the most allowed: release")
        staging, pages = self.staging, event.pages
        slots: Slots = staging.slot_of[pages].astype(np.int64)
        outcomes = np.zeros(len(pages), np.uint8)
        ticket = _Ticket(
            pages, slots, outcomes, np.zeros(len(pages), np.int64), now_ns, event.deadline_ns
        )
        here = slots >= 0
        all_here = bool(here.all())
        held = slots if all_here else slots[here]
        reading = staging.state[held] == READING
        fresh = staging.fresh[held]
        outcomes[here] = np.where(reading, Outcome.LATE, fresh * np.uint8(Outcome.TIMELY))
        staging.pins[held] += 1
        self._tickets[event.ticket] = ticket
        if fresh.any():
            late = reading[fresh]
            self._prefetch_ended(pages[here][fresh], held[fresh], late.astype(np.uint8))
            staging.fresh[held[fresh]] = False
        access = Access(pages, outcomes, event.request, event.scores)
        commands: list[Command] = []
        if all_here and not reading.any():
            commands.append(self._answer(event.ticket, ticket))
        else:
            self._waiting[event.ticket] = ticket
            self._sweep_ns = min(self._sweep_ns, event.deadline_ns)
            if not all_here:
                outcomes[~here] = Outcome.MISS
                slots[~here] = _UNPLACED
                self.counters.pollution += int(np.count_nonzero(self._pushed_out[pages[~here]]))
                self._flush_touches()
                commands += self._place(ticket, now_ns)
        self.counters.count_outcomes(outcomes)
        self._noticed(ticket, access, now_ns)
        if self._hint_driven:
            self._hint_driven -= 1
        elif self._plans:
            commands.append(PlanSoon())
        return commands

    def _noticed(self, ticket: _Ticket, access: Access, now_ns: int) -> None:
        self._touches.append((ticket.slots, access))
        self._accesses.append(access)
        if len(self._accesses) > _ACCESSES_MAX:
            self._accesses.popleft()
        if len(self._touches) > _ACCESSES_MAX:
            self._flush_touches()
        if self._hinted_ns is not None:
            self.planner.observe_lead(now_ns - self._hinted_ns)
            self._hinted_ns = None

    def _place(self, ticket: _Ticket, now_ns: int) -> list[Command]:
        """Give slots to a demand's pages that have none yet, and read them."""
        unplaced = np.flatnonzero(ticket.slots == _UNPLACED)
        pages = ticket.pages[unplaced]
        found = self.staging.slot_of[pages]
        if (found >= 0).any():  # another demand, or a prefetch, brought them meanwhile
            shared = found >= 0
            ticket.slots[unplaced[shared]] = found[shared]
            self.staging.pins[found[shared]] += 1
            unplaced, pages = unplaced[~shared], pages[~shared]
        if len(pages) == 0:
            return []
        placement = self.staging.place(pages, IoClass.DEMAND)
        self._evicted(placement, by_prefetch=False)
        count = len(placement.slots)
        ticket.slots[unplaced[:count]] = placement.slots
        self.staging.pins[placement.slots] += 1
        if count == 0:
            return []
        self.counters.demand_reads += count
        return [self._read(pages[:count], placement.slots, IoClass.DEMAND, now_ns)]

    def _read(self, pages: Ids, slots: Slots, io_class: IoClass, now_ns: int) -> Read:
        staging = self.staging
        staging.generation[slots] += 1
        staging.issued_ns[slots] = now_ns
        staging.ahead[slots] = self._reading + np.arange(1, len(slots) + 1)
        self._reading += len(slots)
        self.planner.spend(len(slots))
        deadline_ns = now_ns + self.limits.read_timeout_ns
        self._sweep_ns = min(self._sweep_ns, deadline_ns)
        return Read(pages, slots, staging.generation[slots], io_class, deadline_ns)

    def _answer(self, number: int, ticket: _Ticket) -> Ready:
        ticket.answered = True
        self._waiting.pop(number, None)
        return Ready(number, ticket.slots.copy(), ticket.outcomes, ticket.waits_ns)

    def _released(self, event: Released, now_ns: int) -> list[Command]:
        ticket = self._tickets.pop(event.ticket, None)
        if ticket is None:
            raise ValueError(f"ticket {event.ticket} is not open")
        self._waiting.pop(event.ticket, None)
        self.staging.pins[ticket.slots[ticket.slots >= 0]] -= 1
        return self._serve(now_ns) if self._waiting else []

    # --- completions ---

    def _completed(self, event: Completed, now_ns: int) -> list[Command]:
        staging = self.staging
        state = staging.state[event.slots]
        current: Mask = (staging.generation[event.slots] == event.generations) & (
            (state == READING) | (state == ABANDONED)
        )
        self.counters.stale += int(np.count_nonzero(~current))
        slots, verified = event.slots[current], event.verified[current]
        self._reading -= len(slots)
        self.planner.advance(now_ns)
        given_up = staging.state[slots] == ABANDONED
        if given_up.any():
            self.counters.stale += int(np.count_nonzero(given_up))
            staging.free(slots[given_up])
            slots, verified = slots[~given_up], verified[~given_up]
        self.planner.observe_reads(staging.ahead[slots], now_ns - staging.issued_ns[slots])
        self._prefetching -= int(np.count_nonzero(staging.prefetched[slots]))
        staging.prefetched[slots] = False
        staging.state[slots[verified]] = READY
        commands: list[Command] = []
        if not verified.all():
            commands += self._failed(slots[~verified], now_ns)
        commands += self._serve(now_ns)
        return commands + self._issue(now_ns)

    def _failed(self, slots: Slots, now_ns: int) -> list[Command]:
        staging = self.staging
        staging.attempts[slots] += 1
        again = (staging.pins[slots] > 0) & (staging.attempts[slots] < self.limits.attempts_max)
        self.counters.failed += int(np.count_nonzero(~again))
        self._lost(slots[~again])
        staging.free(slots[~again])
        retried = slots[again]
        if len(retried) == 0:
            return []
        self.counters.retried += len(retried)
        return [self._read(staging.page_of[retried], retried, IoClass.DEMAND, now_ns)]

    def _lost(self, slots: Slots) -> None:
        """The pages of these slots cannot be had: their waiters get none, their pins go."""
        for ticket in self._waiting.values():
            ticket.slots[np.isin(ticket.slots, slots)] = _FAILED
        self.staging.pins[slots] = 0
        self._wasted(slots)

    def _wasted(self, slots: Slots) -> None:
        unused = slots[self.staging.fresh[slots]]
        if len(unused):
            verdicts = np.full(len(unused), Verdict.WASTED, np.uint8)
            self._prefetch_ended(self.staging.page_of[unused], unused, verdicts)

    def _serve(self, now_ns: int) -> list[Command]:
        """Answer every waiting demand that is complete; find room for those still without."""
        commands: list[Command] = []
        for number, ticket in list(self._waiting.items()):
            if (ticket.slots == _UNPLACED).any():
                commands += self._place(ticket, now_ns)
            placed = ticket.slots >= 0
            readable = placed & (self.staging.state[np.where(placed, ticket.slots, 0)] == READY)
            news = (ticket.outcomes >= Outcome.LATE) & (ticket.waits_ns == 0)
            ticket.waits_ns[news & (readable | (ticket.slots == _FAILED))] = max(
                1, now_ns - ticket.demanded_ns
            )
            if (readable | (ticket.slots == _FAILED)).all():
                commands.append(self._answer(number, ticket))
        return commands

    # --- time ---

    def _sweep(self, now_ns: int) -> list[Command]:
        """Expire demands and abandon reads whose time is over."""
        commands: list[Command] = []
        staging = self.staging
        reading = np.flatnonzero(staging.state == READING)
        over = reading[staging.issued_ns[reading] + self.limits.read_timeout_ns <= now_ns]
        if len(over):
            self.counters.abandoned += len(over)
            self._prefetching -= int(np.count_nonzero(staging.prefetched[over]))
            self._lost(over)
            staging.abandon(over)
            commands.append(Cancel(over))
            commands += self._serve(now_ns)
        for number, ticket in list(self._waiting.items()):
            if ticket.deadline_ns <= now_ns:
                commands.append(self._expire(number, ticket, now_ns))
        deadlines = [ticket.deadline_ns for ticket in self._waiting.values()]
        self._sweep_ns = min([now_ns + self.limits.read_timeout_ns // 4, *deadlines])
        return commands

    def _expire(self, number: int, ticket: _Ticket, now_ns: int) -> Ready:
        placed = ticket.slots >= 0
        unread = placed & (self.staging.state[np.where(placed, ticket.slots, 0)] != READY)
        self.staging.pins[ticket.slots[unread]] -= 1
        self.counters.expired += int(np.count_nonzero(unread | (ticket.slots == _UNPLACED)))
        ticket.slots[unread | (ticket.slots == _UNPLACED)] = _FAILED
        ticket.waits_ns[ticket.slots == _FAILED] = now_ns - ticket.demanded_ns
        return self._answer(number, ticket)

    # --- prediction ---

    def _hinted(self, event: Hinted, now_ns: int) -> list[Command]:
        hint = event.hint
        self._learn()
        if isinstance(hint, PageHint):
            self.predictor.on_page_hint(hint)
            self.staging.eviction.hinted(hint)
            self._hinted_ns = now_ns
            self._hint_driven = _HINT_DRIVEN_DEMANDS
        elif isinstance(hint, ChainHint):
            self.predictor.on_chain_hint(hint)
        elif isinstance(hint, DoneHint):
            self.predictor.on_done_hint(hint)
        else:
            assert_never(hint)
        return self._plan(now_ns)

    def _idle(self, now_ns: int) -> list[Command]:
        self._learn()
        return self._plan(now_ns)

    def _learn(self) -> None:
        self._flush_touches()
        while self._accesses:
            self.predictor.on_access(self._accesses.popleft())

    def _flush_touches(self) -> None:
        """Show demands to the eviction policy, those still here under the same slot."""
        touches, self._touches = self._touches, []
        for slots, access in touches:
            placed = slots >= 0
            here = placed & (self.staging.page_of[np.where(placed, slots, 0)] == access.pages)
            if here.all():
                self.staging.eviction.touched(slots, access.pages, access.scores)
            elif here.any():
                scores = None if access.scores is None else access.scores[here]
                self.staging.eviction.touched(slots[here], access.pages[here], scores)

    def _plan(self, now_ns: int) -> list[Command]:
        guess = self.predictor.predict(now_ns, self.limits.candidates)
        if len(guess.keep) or self.staging.kept.any():
            self.staging.keep(guess.keep)
        self._pending = self.planner.plan(guess, self.staging.slot_of, now_ns)
        return self._issue(now_ns)

    def _issue(self, now_ns: int) -> list[Command]:
        """Start what the plan still holds, as far as the depth for prefetch allows."""
        room = self.limits.prefetch_depth - self._prefetching
        if room <= 0 or len(self._pending.pages) == 0 or self._waiting:
            return []
        pages, sources = self._pending.pages[:room], self._pending.sources[:room]
        self._pending = Plan(self._pending.pages[room:], self._pending.sources[room:], None)
        absent = self.staging.slot_of[pages] < 0
        pages, sources = pages[absent], sources[absent]
        placement = self.staging.place(pages, IoClass.PREFETCH, sources)
        self._evicted(placement, by_prefetch=True)
        count = len(placement.slots)
        if count == 0:
            return []
        self._prefetching += count
        self.counters.prefetch_reads += count
        return [self._read(pages[:count], placement.slots, IoClass.PREFETCH, now_ns)]

    def _evicted(self, placement: Placement, *, by_prefetch: bool) -> None:
        self._pushed_out[placement.evicted_pages] = by_prefetch
        if len(placement.wasted_pages):
            verdicts = np.full(len(placement.wasted_pages), Verdict.WASTED, np.uint8)
            self._feed_back(placement.wasted_pages, placement.wasted_sources, verdicts)

    def _prefetch_ended(self, pages: Ids, slots: Slots, verdicts: Codes) -> None:
        self._feed_back(pages, self.staging.source[slots].astype(np.int64), verdicts)

    def _feed_back(self, pages: Ids, sources: Ids, verdicts: Codes) -> None:
        self.counters.count_verdicts(verdicts)
        feedback = Feedback(pages, sources.astype(np.uint8), verdicts)
        self.planner.observe_feedback(feedback)
        self.predictor.on_feedback(feedback)
