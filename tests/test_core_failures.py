"""The core when reads fail, are late or never end: these events in, exactly these commands out."""

from __future__ import annotations

from prefetchd.core import CoreLimits
from prefetchd.model import Outcome, Verdict
from prefetchd.staging import ABANDONED, FREE, READING, READY
from tests.core_bench import Bench

RETAINED, TIMELY, LATE, MISS = (int(outcome) for outcome in Outcome)


def verdicts(bench: Bench) -> dict[str, int]:
    return {v.name: int(n) for v, n in zip(Verdict, bench.counters.verdicts, strict=True) if n}


def test_a_failed_demand_read_is_tried_again_and_then_a_miss() -> None:
    bench = Bench()
    bench.demand(1, 5, 6)
    first = bench.reads[0]
    assert bench.end(first, [True, False]) == [("demand read", [6], [1])]
    assert bench.reads[0].generations[0] != first.generations[1]
    assert bench.end(verified=False) == [("ready", 1, [0, -1], [MISS, MISS])]
    assert (bench.counters.retried, bench.counters.failed) == (1, 1)
    assert (bench.resident(), bench.staging.state[1]) == ([5], FREE)
    bench.release(1)
    assert bench.pinned() == 0
    assert bench.demand(2, 6) == [("demand read", [6], [1])], "a failure leaves no trace"


def test_a_failed_prefetch_is_dropped_unless_somebody_waits_for_it() -> None:
    bench = Bench()
    bench.guess(4, 6)
    bench.demand(1, 6)
    assert bench.end(verified=False) == [("demand read", [6], [1])]
    assert bench.resident() == [6]
    assert bench.end() == [("ready", 1, [1], [LATE])]
    assert verdicts(bench) == {"LATE": 1, "WASTED": 1}
    assert bench.guess(8) == [("prefetch read", [8], [0])], "its depth came back"


def test_a_demand_is_answered_at_its_deadline_with_what_is_there() -> None:
    bench = Bench()
    bench.stage(9)
    bench.demand(1, 9, 5, deadline_ns=5_000)
    assert bench.idle(4_999) == []
    assert bench.idle(5_000) == [("ready", 1, [0, -1], [RETAINED, MISS])]
    assert (bench.counters.expired, bench.pinned()) == (1, 1)
    assert bench.end() == [], "late, but good"
    assert bench.demand(2, 5) == [("ready", 2, [1], [RETAINED])]
    bench.release(1)
    assert bench.pinned() == 1


def test_a_demand_without_room_is_answered_at_its_deadline() -> None:
    bench = Bench(slots=2)
    bench.demand(1, 0, 1)
    bench.end()
    bench.demand(2, 4, deadline_ns=5_000)
    assert bench.idle(5_000) == [("ready", 2, [-1], [MISS])]
    bench.release(2)
    assert bench.release(1) == []


def test_a_lost_completion_is_a_miss_and_its_slot_stays_the_devices() -> None:
    bench = Bench(slots=2, limits=CoreLimits(read_timeout_ns=1_000))
    bench.demand(1, 5)
    lost = bench.reads.pop()
    assert bench.idle(2_000) == [("cancel", [0]), ("ready", 1, [-1], [MISS])]
    assert (bench.staging.state[0], bench.counters.abandoned) == (ABANDONED, 1)
    bench.release(1)
    assert bench.demand(2, 5) == [("demand read", [5], [1])]
    bench.end()
    bench.release(2)
    assert bench.demand(3, 6) == [("demand read", [6], [1])], "slot 0 is not there to be had"
    assert bench.demand(4, 7) == []
    assert bench.end(lost) == [("demand read", [7], [0])], "now it has come"
    assert bench.counters.stale == 1
    assert bench.staging.state.tolist() == [READING, READING]


def test_a_read_given_up_is_no_read_in_flight() -> None:
    bench = Bench(limits=CoreLimits(read_timeout_ns=1_000))
    bench.demand(1, 5)
    bench.guess(6)
    lost = bench.reads.pop()
    bench.idle(3_000)
    assert (bench.core.reading, bench.core.reads.given_up) == (0, 1)
    bench.demand(2, 7)
    assert bench.staging.ahead[bench.reads[0].slots].tolist() == [1], "the device is not that busy"
    bench.end()
    assert (bench.core.reading, bench.core.reads.given_up) == (0, 1)
    bench.end(lost)
    assert (bench.core.reading, bench.core.reads.given_up) == (0, 0)


def test_a_completion_seen_twice_or_of_an_older_read_changes_nothing() -> None:
    bench = Bench()
    bench.demand(1, 5)
    first = bench.reads[0]
    bench.end(first, verified=False)
    assert bench.end(first) == [], "the first try ends again while the second one is on its way"
    assert bench.staging.state[0] == READING
    second = bench.reads[0]
    bench.end(second)
    assert bench.end(second, verified=False) == []
    assert (bench.staging.state[0], bench.core.reading) == (READY, 0)
    assert bench.counters.stale == 2
