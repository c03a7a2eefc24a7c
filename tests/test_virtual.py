"""The virtual engine: who reads first, how much at once, what waits for a core, what ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from prefetchd.core import Core, CoreLimits
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.eviction import EVICTIONS
from prefetchd.lab.virtual import VirtualEngine
from prefetchd.model import (
    Cancel,
    Command,
    Completed,
    Demanded,
    Event,
    Geometry,
    Hinted,
    Idle,
    Ids,
    IoClass,
    Outcome,
    PageHint,
    Read,
    Ready,
    Released,
)
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.registry import predictor_class
from prefetchd.staging import Staging

PAGE_BYTES = 10_000
DRIVE = DriveProfile(name="test", read_gb_s=1.0, write_gb_s=1.0, read_us=100, write_us=100)
ALONE_NS = 110_000
NEVER_NS = 1 << 62
GEOMETRY = Geometry(2, 100)


@dataclass
class Bench:
    """An engine, its answers by ticket, and all that it was told and said."""

    engine: VirtualEngine
    answers: dict[int, tuple[int, Ready]] = field(default_factory=dict)
    log: list[tuple[int, Event, list[Command]]] = field(default_factory=list)

    def demand(self, ticket: int, *pages: int, deadline_ns: int = NEVER_NS) -> None:
        self.engine.handle(Demanded(ticket, np.array(pages, np.int64), deadline_ns))

    def answered(self, ticket: int) -> tuple[int, Ready]:
        assert self.engine.run_until(NEVER_NS, lambda: ticket in self.answers)
        return self.answers[ticket]

    def reads(self, io_class: IoClass) -> list[tuple[int, Ids]]:
        said = [(at, command) for at, _, commands in self.log for command in commands]
        return [(at, c.pages) for at, c in said if isinstance(c, Read) and c.io_class == io_class]

    def told(self, kind: type[Event]) -> list[int]:
        return [at for at, event, _ in self.log if isinstance(event, kind)]


def bench(
    predictor: str = "none",
    *,
    depth: int = 8,
    slots: int = 40,
    decision_ns: int = 0,
    cores: int = 1,
    limits: CoreLimits | None = None,
    drive: DriveProfile = DRIVE,
) -> Bench:
    staging = Staging(slots, GEOMETRY, EVICTIONS["lru"](slots, GEOMETRY))
    guesser = predictor_class(predictor)(GEOMETRY, slots)
    core = Core(staging, guesser, Planner(PlannerLimits()), limits or CoreLimits())
    made: Bench

    def on_ready(ready: Ready) -> None:
        made.answers[ready.ticket] = made.engine.now_ns, ready

    engine = VirtualEngine(
        core,
        DriveModel(drive),
        on_ready,
        page_bytes=PAGE_BYTES,
        depth=depth,
        decision_ns=decision_ns,
        cores=cores,
        record=lambda now_ns, event, commands: made.log.append((now_ns, event, commands)),
    )
    made = Bench(engine)
    return made


def hint(*pages: int) -> PageHint:
    return PageHint(np.array(pages, np.int64), np.linspace(1, 0.5, len(pages), dtype=np.float32))


def test_a_demand_is_answered_when_its_last_page_has_come() -> None:
    made = bench()
    made.demand(1, 2, 4, 6)
    at_ns, ready = made.answered(1)
    assert at_ns == ALONE_NS + 2 * PAGE_BYTES
    assert ready.waits_ns.max() == at_ns
    assert set(ready.outcomes) == {Outcome.MISS}
    made.demand(2, 2, 4)
    assert made.answered(2)[0] == at_ns
    assert made.engine.bytes_read == 3 * PAGE_BYTES
    assert made.engine.depth.mean > 1


def test_completions_of_one_time_are_told_together() -> None:
    made = bench(drive=msgspec.structs.replace(DRIVE, read_gb_s=1e5))
    made.demand(1, 2, 4, 6)
    made.answered(1)
    assert len(made.told(Completed)) == 1


def test_no_more_than_depth_are_on_the_drive() -> None:
    made = bench(depth=2)
    made.demand(1, *range(0, 12, 2))
    at_ns, _ = made.answered(1)
    assert at_ns == 3 * (100_000 + PAGE_BYTES) + PAGE_BYTES
    assert made.engine.depth.mean <= 2


def test_demand_comes_before_prefetch_and_prefetch_before_write_back() -> None:
    """With one operation at a time, and the drive busy, who waits is served by class."""
    made, ended = bench("attention", depth=1), list[int]()
    engine = made.engine
    engine.write(np.full(2, PAGE_BYTES), lambda: ended.append(engine.now_ns))
    engine.hint(hint(3, 5))
    made.demand(1, 8)
    assert engine.now_ns == 0
    assert made.answered(1)[0] == 2 * ALONE_NS  # behind the write that had begun
    engine.run_until(10 * ALONE_NS)
    assert [pages.tolist() for _, pages in made.reads(IoClass.PREFETCH)] == [[3, 5]]
    assert ended == [ALONE_NS, 5 * ALONE_NS]  # the other write behind both prefetches
    made.demand(2, 3, 5)
    assert made.answered(2)[1].outcomes.tolist() == [Outcome.TIMELY] * 2


def test_deciding_takes_its_time_and_hints_wait_for_a_core() -> None:
    for cores, expected in ((1, [50_000, 100_000, 150_000]), (2, [50_000, 50_000, 100_000])):
        made = bench("attention", decision_ns=50_000, cores=cores)
        for page in (2, 4, 6):
            made.engine.hint(hint(page))
        made.engine.run_until(140_000 if cores == 2 else 180_000)
        assert made.told(Hinted) == expected
        assert made.reads(IoClass.PREFETCH)[0][0] == 50_000


def test_an_idle_turn_is_not_put_off_by_completions() -> None:
    made = bench("attention", decision_ns=150_000)
    made.demand(1, *range(0, 20, 2))  # whose reads end 10 us apart, from 110 us on
    made.engine.run_until(155_000)
    assert made.engine.decisions >= 1


def test_without_a_cost_hints_are_acted_on_at_once() -> None:
    made = bench("attention")
    made.engine.hint(hint(2))
    assert made.told(Hinted) == [0]
    assert made.reads(IoClass.PREFETCH)[0][0] == 0


def test_a_deadline_ends_a_demand_that_the_drive_is_too_slow_for() -> None:
    made = bench(drive=msgspec.structs.replace(DRIVE, read_us=1e6))
    made.demand(1, 2, deadline_ns=200_000_000)
    at_ns, ready = made.answered(1)
    assert 200_000_000 <= at_ns <= 300_000_000
    assert ready.slots.tolist() == [-1]
    made.engine.handle(Released(1))
    made.demand(2, 2)  # its read still comes, and serves the next demand
    assert made.answered(2)[0] == 1_000_010_000


def test_reads_that_do_not_end_in_time_are_given_up_and_their_slots_kept_until_they_do() -> None:
    limits = CoreLimits(read_timeout_ns=400_000_000)
    slow = msgspec.structs.replace(DRIVE, read_us=1e6, units=1)
    made = bench(depth=1, limits=limits, drive=slow)
    made.demand(1, 2, 4)
    at_ns, ready = made.answered(1)
    cancels = [c for _, _, commands in made.log for c in commands if isinstance(c, Cancel)]
    assert sum(len(cancel.slots) for cancel in cancels) == 2
    assert 400_000_000 <= at_ns < 1_000_000_000
    assert ready.slots.tolist() == [-1, -1]
    assert made.engine.core.counters.abandoned == 2
    # What waited ends at once, unread; what the drive had ends in its time.
    made.engine.run_until(1_200_000_000)
    ended = [e for _, e, _ in made.log if isinstance(e, Completed)]
    assert [event.verified.tolist() for event in ended] == [[False], [True]]
    assert made.told(Completed) == [at_ns, 1_000_010_000]
    assert made.engine.core.counters.stale == 2


def test_time_stands_where_it_was_told_to() -> None:
    made = bench()
    assert made.engine.run_until(5_000)
    assert made.engine.now_ns == 5_000
    made.demand(1, 2)
    assert not made.engine.run_until(6_000, lambda: 1 in made.answers)
    assert made.engine.now_ns == 6_000


def test_while_anything_is_under_way_there_is_an_idle_turn_every_50_ms() -> None:
    made = bench(drive=msgspec.structs.replace(DRIVE, read_us=120_000, write_us=120_000))
    made.engine.run_until(50_000_000)
    assert made.told(Idle) == []
    made.demand(1, 2)
    made.answered(1)
    began_ns = made.engine.now_ns
    looks = [at_ns for at_ns in made.told(Idle) if at_ns >= 100_000_000]
    assert looks[:2] == [100_000_000, 150_000_000]
    made.engine.run_until(began_ns + 1_000_000_000)
    assert made.told(Idle)[-1] <= began_ns
    made.engine.write(np.array([PAGE_BYTES]), lambda: None)
    made.engine.run_until(made.engine.now_ns + 1_000_000_000)
    assert len([at_ns for at_ns in made.told(Idle) if at_ns > began_ns]) == 3


def test_no_time_is_too_late_to_be_reached() -> None:
    made = bench()
    made.demand(1, 2)
    assert made.engine.run_until(NEVER_NS + 5)
    assert made.told(Completed) == [ALONE_NS]
    assert made.engine.now_ns == NEVER_NS + 5


@pytest.mark.parametrize("depth", [1, 3])
def test_the_same_calls_give_the_same_log(depth: int) -> None:
    logs = []
    for _ in range(2):
        made = bench("attention", depth=depth, decision_ns=7_000)
        for number in range(1, 30):
            made.engine.hint(hint(*range(number % 7, 100, 9)))
            made.demand(number, *range(number % 5, 30, 3))
            made.answered(number)
            made.engine.handle(Released(number))
        logs.append([(at, repr(event), repr(commands)) for at, event, commands in made.log])
    assert logs[0] == logs[1]
