"""The core against a plain model: any order of events, a device that is late, wrong or lost.

The model keeps what each slot's bytes are and who may touch them, and checks after every event
that nobody was ever shown bytes of another page, or bytes that a device could still change.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefetchd.core import CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.exchanging import exchange
from prefetchd.model import (
    ChainHint,
    Cleaned,
    Completed,
    Demanded,
    DoneHint,
    Event,
    Fill,
    Filled,
    Forgotten,
    Geometry,
    Hinted,
    Idle,
    Ids,
    Offered,
    Outcome,
    PageHint,
    Read,
    Ready,
    Released,
)
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors.auto import Auto
from prefetchd.staging import ABANDONED, READING, READY
from tests.core_bench import Bench, Scripted, told

GEOMETRY = Geometry(layers=2, blocks=7)
LIMITS = CoreLimits(prefetch_depth=3, read_timeout_ns=200, tickets_max=6)
UNREADABLE = -1
Flight = tuple[int, int, int]  # slot, generation, page


class World:
    """A core, the bytes of its slots (the page that they are), a device, and the readers."""

    def __init__(self, evict: str, slots: int = 6, predictor: type[Predictor] = Scripted) -> None:
        self.bench = Bench(
            slots, limits=LIMITS, evict=evict, predictor=predictor, geometry=GEOMETRY
        )
        self.bytes = np.full(slots, UNREADABLE)
        self.flying: list[Flight] = []
        self.landed: list[Flight] = []
        self.waiting: dict[int, Demanded] = {}
        self.reading: dict[int, tuple[Ids, Ids]] = {}  # ticket: pages, slots
        self.filling: list[tuple[Ids, Ids]] = []  # pages, slots: a caller copies
        self.kept: list[Ids] = []  # pages that the store does not have yet
        self.tickets = 0
        self.demanded_pages = 0
        self.log: list[Any] = []

    def give(self, event: Event) -> None:
        commands = self.bench.handle(event)
        self.log.append([told(command) for command in commands])
        for command in commands:
            if isinstance(command, Read):
                self._start(command)
            elif isinstance(command, Ready):
                self._answer(command)
            elif isinstance(command, Fill):
                self._own(command.pages, command.slots)
                self.filling.append((command.pages, command.slots))

    def _start(self, read: Read) -> None:
        slots, pages = read.slots.tolist(), read.pages.tolist()
        self._own(read.pages, read.slots)
        living = {p for slot, _, p in self.flying if self.bench.staging.slot_of[p] == slot}
        assert not living & set(pages), "this page is on its way already"
        assert read.deadline_ns == self.bench.now_ns + LIMITS.read_timeout_ns
        self.flying += zip(slots, read.generations.tolist(), pages, strict=True)

    def _own(self, pages: Ids, slots: Ids) -> None:
        """Slots are given to somebody who writes into them: nobody else may have them."""
        busy = {slot for slot, _, _ in self.flying}
        busy |= {slot for _, filled in self.filling for slot in filled.tolist()}
        held = {slot for _, read in self.reading.values() for slot in read.tolist()}
        held |= set(self.bench.staging.slot_of[self.kept_pages()].tolist())
        given = set(slots.tolist())
        assert not busy & given, "the device still owns this slot"
        assert not held & given, "a reader still owns this slot, or the store has not its page"
        assert len(given) == len(slots) == len(set(pages.tolist()))
        self.bytes[slots] = UNREADABLE

    def kept_pages(self) -> Ids:
        return np.concatenate([np.empty(0, np.int64), *self.kept])

    def _answer(self, ready: Ready) -> None:
        pages = self.waiting.pop(ready.ticket).pages
        assert len(ready.slots) == len(ready.outcomes) == len(ready.waits_ns) == len(pages)
        assert (ready.waits_ns >= 0).all()
        assert (ready.waits_ns[ready.outcomes < Outcome.LATE] == 0).all()
        had = ready.slots >= 0
        self.reading[ready.ticket] = pages[had], ready.slots[had]

    # --- what can happen ---

    def demand(self, pages: Ids, patience_ns: int) -> None:
        self.tickets += 1
        event = Demanded(self.tickets, pages, self.bench.now_ns + patience_ns)
        if len(self.bench.core.demands) == LIMITS.tickets_max:
            with pytest.raises(ValueError, match="most allowed"):
                self.bench.handle(event)
            return
        self.demanded_pages += len(pages)
        self.waiting[event.ticket] = event
        self.give(event)

    def release(self, ticket: int) -> None:
        self.reading.pop(ticket, None)
        self.give(Released(ticket))
        self.reading.pop(ticket, None)  # one that still waited was answered with nothing

    def land(self, flights: list[Flight], verified: list[bool]) -> None:
        """Reads end; those that go wrong leave rubbish behind."""
        for flight, good in zip(flights, verified, strict=True):
            self.bytes[flight[0]] = flight[2] if good else UNREADABLE
            self.flying.remove(flight)
            self.landed.append(flight)
        self.tell_ended(flights, verified)

    def offer(self, pages: Ids) -> None:
        """Slots for all of them or for none, and never more than their share."""
        core = self.bench.core
        if (self.bench.staging.slot_of[pages] >= 0).any():
            with pytest.raises(ValueError, match="here already"):
                self.bench.handle(Offered(pages))
            return
        before = len(self.filling)
        lacked = core.demands.lacking() is not None
        self.give(Offered(pages))
        if len(self.filling) > before:
            assert self.filling[-1][0].tolist() == pages.tolist()
            assert not lacked, "a demand goes first"
        assert core.fills.kept <= core.fills.slots_max

    def fill(self, number: int) -> None:
        pages, slots = self.filling.pop(number)
        self.bytes[slots] = pages
        self.kept.append(pages)
        self.give(Filled(pages))

    def clean(self, number: int) -> None:
        self.give(Cleaned(self.kept.pop(number)))

    def forget(self, pages: Ids) -> None:
        """Those that nobody has anything to do with."""
        asked = [event.pages for event in self.waiting.values()]
        busy = np.concatenate([self.kept_pages(), *(pages for pages, _ in self.filling), *asked])
        staging = self.bench.staging
        slots = staging.slot_of[pages]
        idle = (slots < 0) | ((staging.state[slots] == READY) & (staging.pins[slots] == 0))
        self.give(Forgotten(pages[idle & ~np.isin(pages, busy)]))

    def tell_ended(self, flights: list[Flight], verified: list[bool]) -> None:
        slots, generations, _ = np.array(flights, np.int64).reshape(-1, 3).T
        self.give(Completed(slots.copy(), generations.copy(), np.array(verified, np.bool_)))

    def wait(self, time_ns: int) -> None:
        self.bench.now_ns += time_ns
        self.give(Idle())

    def exchange(self, evict: str, *, predictor: bool) -> None:
        """Another policy, and maybe another predictor, while everything goes on."""
        bench = self.bench
        policy = EVICTIONS[evict](bench.staging.slots, GEOMETRY)
        if predictor:
            bench.predictor = Scripted(GEOMETRY, bench.staging.slots)
        exchange(bench.core, bench.predictor if predictor else None, policy)

    # --- what must hold ---

    def check(self) -> None:
        staging = self.bench.staging
        owned = np.zeros(staging.slots, np.bool_)
        owned[[slot for slot, _, _ in self.flying]] = True
        for _, slots in self.filling:
            owned[slots] = True
        readable = staging.state == READY
        assert not (owned & readable).any(), "read by the device and readable"
        assert (self.bytes[readable] == staging.page_of[readable]).all()
        assert owned[staging.state == READING].all()
        pins = np.zeros(staging.slots, np.int64)
        for pages, slots in self.reading.values():
            assert (self.bytes[slots] == pages).all(), "a reader's bytes have changed"
            assert not owned[slots].any()
            np.add.at(pins, slots, 1)
        kept = staging.slot_of[self.kept_pages()]
        assert (kept >= 0).all(), "a page that the store does not have is gone"
        filling = [slots for _, slots in self.filling]
        np.add.at(pins, np.concatenate([kept, *filling]), 1)
        assert self.bench.core.fills.kept == len(kept) + sum(map(len, filling))
        assert (staging.pins >= pins).all()
        if not self.waiting:
            assert (staging.pins == pins).all()
        overdue = [e for e in self.waiting.values() if e.deadline_ns <= self.bench.now_ns]
        assert not overdue, "not answered at its deadline"
        patience_ns = LIMITS.read_timeout_ns + LIMITS.read_timeout_ns // 4
        reads = staging.state == READING
        reads[np.concatenate([np.empty(0, np.int64), *filling])] = False
        ages = self.bench.now_ns - staging.issued_ns[reads]
        assert (ages < patience_ns).all(), "a read is waited for without an end"
        self._check_counts()

    def _check_counts(self) -> None:
        counters, staging = self.bench.counters, self.bench.staging
        assert counters.outcomes.sum() == self.demanded_pages
        assert counters.prefetch_reads == counters.verdicts.sum() + np.count_nonzero(staging.fresh)
        issued = counters.prefetch_reads + counters.demand_reads + counters.retried
        assert issued == len(self.flying) + len(self.landed)
        core, staging = self.bench.core, self.bench.staging
        assert core.reading + core.reads.given_up == len(self.flying)
        assert core.reads.given_up == np.count_nonzero(staging.state == ABANDONED)

    def finish(self) -> None:
        """Everything comes to its end, and nothing is left."""
        while self.filling:
            self.fill(0)
        while self.kept:
            self.clean(0)
        while self.flying:
            self.land(self.flying[:], [True] * len(self.flying))
        while self.reading or self.waiting:
            self.release(next(iter({**self.reading, **self.waiting})))
        while self.flying:
            self.land(self.flying[:], [True] * len(self.flying))
        assert not self.waiting
        self.check()
        core, staging = self.bench.core, self.bench.staging
        assert (core.reading, core.reads.given_up, len(core.demands)) == (0, 0, 0)
        assert self.bench.pinned() == 0
        assert not np.isin(staging.state, (READING, 3)).any()


pages_of = st.lists(st.integers(0, GEOMETRY.pages - 1), unique=True, max_size=5)


class CoreMachine(RuleBasedStateMachine):
    @initialize(evict=st.sampled_from(sorted(EVICTIONS)))
    def begin(self, evict: str) -> None:
        self.world = World(evict)

    @rule(pages=pages_of, patience_ns=st.integers(1, 500))
    def demand(self, pages: list[int], patience_ns: int) -> None:
        self.world.demand(np.array(pages, np.int64), patience_ns)

    @precondition(lambda self: self.world.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(data.draw(st.sampled_from(sorted(self.world.reading))))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.world.release(data.draw(st.sampled_from(sorted(self.world.waiting))))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        flights = data.draw(st.lists(st.sampled_from(self.world.flying), unique=True, min_size=1))
        verified = [data.draw(st.integers(0, 3)) > 0 for _ in flights]
        self.world.land(flights, verified)

    @precondition(lambda self: self.world.landed)
    @rule(data=st.data(), verified=st.booleans())
    def repeat(self, data: st.DataObject, verified: bool) -> None:
        self.world.tell_ended([data.draw(st.sampled_from(self.world.landed))], [verified])

    @rule(pages=pages_of, keep=pages_of, confidence=st.floats(0, 1, width=32))
    def guess(self, pages: list[int], keep: list[int], confidence: float) -> None:
        predictor = self.world.bench.predictor
        assert isinstance(predictor, Scripted)
        surely = np.full(len(pages), confidence, np.float32)
        sources = np.arange(len(pages)).astype(np.uint8)
        ids = np.array(pages, np.int64)
        predictor.guess = Guess(ids, surely, None, sources, np.array(keep, np.int64))
        self.world.give(Idle())

    @rule(pages=st.lists(st.integers(0, GEOMETRY.pages - 1), unique=True, min_size=1, max_size=4))
    def offer(self, pages: list[int]) -> None:
        self.world.offer(np.array(pages, np.int64))

    @precondition(lambda self: self.world.filling)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        self.world.fill(data.draw(st.integers(0, len(self.world.filling) - 1)))

    @precondition(lambda self: self.world.kept)
    @rule(data=st.data())
    def clean(self, data: st.DataObject) -> None:
        self.world.clean(data.draw(st.integers(0, len(self.world.kept) - 1)))

    @rule(pages=pages_of)
    def forget(self, pages: list[int]) -> None:
        self.world.forget(np.array(pages, np.int64))

    @rule(pages=pages_of)
    def hint(self, pages: list[int]) -> None:
        scores = np.arange(len(pages)).astype(np.float32)
        self.world.give(Hinted(PageHint(np.array(pages, np.int64), scores)))

    @rule(evict=st.sampled_from(sorted(EVICTIONS)), predictor=st.booleans())
    def exchange(self, evict: str, predictor: bool) -> None:
        self.world.exchange(evict, predictor=predictor)

    @rule(time_ns=st.integers(0, 150))
    def wait(self, time_ns: int) -> None:
        self.world.wait(time_ns)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def long_run(seed: int, steps: int, evict: str) -> World:
    """A decode-like load on a core with the default predictor, on a device that often fails."""
    random = np.random.default_rng(seed)
    world = World(evict, slots=8, predictor=Auto)
    for step in range(steps):
        layer = step % GEOMETRY.layers
        blocks = random.choice(GEOMETRY.blocks, 3, replace=False)
        pages = GEOMETRY.page_ids(blocks, layer)
        if random.random() < 0.5:
            scores = random.random(3).astype(np.float32)
            world.give(Hinted(PageHint(pages, scores)))
        if step % 50 == 10:
            world.give(Hinted(ChainHint(step, blocks)))
            world.give(Hinted(DoneHint(step - 50)))
        world.wait(int(random.integers(0, 40)) if step % 20 else 300)
        world.demand(pages, int(random.integers(1, 400)))
        world.check()
        if world.flying:
            count = int(random.integers(1, len(world.flying) + 1))
            chosen = [world.flying[i] for i in random.permutation(len(world.flying))[:count]]
            world.land(chosen, (random.random(count) < 0.9).tolist())
            world.check()
        for ticket in [t for t in world.reading if random.random() < 0.7]:
            world.release(ticket)
    world.finish()
    return world


def digest(seed: int, steps: int, evict: str) -> str:
    return hashlib.sha256(repr(long_run(seed, steps, evict).log).encode()).hexdigest()


@pytest.mark.parametrize("evict", sorted(EVICTIONS))
def test_the_same_events_give_the_same_commands_in_any_process(evict: str) -> None:
    here = digest(3, 250, evict)
    assert digest(3, 250, evict) == here
    code = f"from tests.test_core_model import digest; print(digest(3, 250, {evict!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == here


@pytest.mark.parametrize("seed", range(3))
def test_a_long_run_on_a_bad_device_keeps_its_books(seed: int) -> None:
    world = long_run(seed, 400, ["lru", "arc", "cycle"][seed])
    counters = world.bench.counters
    assert counters.prefetch_reads > 0
    assert min(counters.retried, counters.failed, counters.abandoned, counters.expired) > 0
