"""The core: these events in, exactly these commands out."""

from __future__ import annotations

import numpy as np
import pytest

from prefetchd.core import CoreLimits
from prefetchd.demands import Demand, Demands
from prefetchd.model import (
    Completed,
    Demanded,
    Geometry,
    Hinted,
    Ids,
    Outcome,
    PageHint,
    Ready,
    Verdict,
)
from prefetchd.predictors.none import NoPrefetch
from tests.core_bench import FAR_NS, Bench, Scripted, ids

RETAINED, TIMELY, LATE, MISS = (int(outcome) for outcome in Outcome)


def outcomes(bench: Bench) -> dict[str, int]:
    return {o.name: int(n) for o, n in zip(Outcome, bench.counters.outcomes, strict=True) if n}


def verdicts(bench: Bench) -> dict[str, int]:
    return {v.name: int(n) for v, n in zip(Verdict, bench.counters.verdicts, strict=True) if n}


# --- demand ---


def test_a_miss_is_read_and_pinned_and_answered_when_it_has_come() -> None:
    bench = Bench()
    assert bench.demand(1, 7, 3) == [("demand read", [7, 3], [0, 1])]
    assert bench.pinned() == 2
    bench.now_ns += 500
    read = bench.reads[0]
    (ready,) = bench.handle(Completed(read.slots, read.generations, np.ones(2, np.bool_)))
    assert isinstance(ready, Ready)
    assert (ready.slots.tolist(), ready.outcomes.tolist()) == ([0, 1], [MISS, MISS])
    assert ready.waits_ns.tolist() == [500, 500]
    assert bench.release(1) == []
    assert (bench.pinned(), bench.core.reading, len(bench.core.demands)) == (0, 0, 0)


def test_resident_pages_are_answered_at_once_without_a_read() -> None:
    bench = Bench()
    bench.stage(7, 3)
    assert bench.demand(1, 3, 7) == [("ready", 1, [1, 0], [RETAINED, RETAINED])]
    assert bench.demand(2, 3) == [("ready", 2, [1], [RETAINED])], "pins do not exclude readers"
    assert bench.demand(3) == [("ready", 3, [], [])], "nothing asked, nothing to wait for"
    assert bench.counters.demand_reads == 2


def test_one_read_serves_all_who_wait_for_its_page() -> None:
    bench = Bench()
    bench.demand(1, 5)
    assert bench.demand(2, 5, 6) == [("demand read", [6], [1])]
    assert bench.demand(3, 5) == []
    first, second = bench.reads
    assert bench.end(first) == [("ready", 1, [0], [MISS]), ("ready", 3, [0], [LATE])]
    assert bench.end(second) == [("ready", 2, [0, 1], [LATE, MISS])]
    assert (bench.staging.pins[0], bench.counters.demand_reads) == (3, 2)
    for ticket in (1, 2, 3):
        bench.release(ticket)
    assert bench.pinned() == 0


def test_a_pass_given_up_while_it_reads_leaves_nothing_behind() -> None:
    bench = Bench()
    for ticket, pages in ((1, (4, 5)), (2, (6, 7))):
        bench.tell(Demanded(ticket, ids(*pages), FAR_NS, once=True))
        bench.release(ticket)
    bench.demand(3, 7)
    first, second = bench.reads
    assert bench.end(first) == []
    assert bench.end(second) == [("ready", 3, [3], [LATE])]
    assert bench.staging.slot_of[[4, 5, 6]].tolist() == [-1] * 3
    assert bench.release(3) == []
    assert bench.demand(4, 7) == [("ready", 4, [3], [RETAINED])], "another had asked for it"


def test_pages_next_to_each_other_come_into_slots_next_to_each_other() -> None:
    bench = Bench()
    bench.stage(10, 20, 30, 40)
    for ticket, page in ((1, 30), (2, 10), (3, 20)):
        bench.tell(Demanded(ticket, ids(page + 1), FAR_NS, once=True))
        bench.end(bench.reads[-1])
    for ticket in (2, 3, 1):  # so come free slots 5, 6, 4
        bench.release(ticket)
    assert bench.demand(4, 50, 51, 52, 53) == [("demand read", [50, 51, 52, 53], [4, 5, 6, 7])]


def test_a_completion_concerns_only_those_who_wait_for_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[tuple[int, list[int]]] = []
    of = Demands._of

    def noted(demands: Demands, order: int, orders: Ids, places: Ids) -> list[tuple[Demand, Ids]]:
        pairs = of(demands, order, orders, places)
        looked.extend((demand.number, mine.tolist()) for demand, mine in pairs)
        return pairs

    monkeypatch.setattr(Demands, "_of", noted)
    bench = Bench(64, geometry=Geometry(1, 64))
    for number in range(50):
        bench.demand(number, number)
    bench.demand(50, 3, 0)
    looked.clear()
    bench.end()
    assert looked == [(0, [0]), (50, [1])], "those who waited for page 0, alone and beside another"
    assert bench.core.unanswered == 50


def test_a_waiting_demand_can_be_given_back() -> None:
    bench = Bench()
    bench.demand(1, 5)
    assert bench.release(1) == [("ready", 1, [-1], [MISS])], "so that nobody waits for ever"
    assert bench.pinned() == 0
    assert bench.end() == []
    assert bench.demand(2, 5) == [("ready", 2, [0], [RETAINED])]


def test_room_comes_when_pins_go() -> None:
    bench = Bench(slots=4)
    bench.demand(1, 0, 1, 2, 3)
    bench.end()
    assert bench.demand(2, 4, 5) == [], "nothing may be thrown out"
    assert bench.demand(3, 5) == [], "behind the one that came first"
    ((kind, pages, slots),) = bench.release(1)
    assert (kind, pages, len(slots)) == ("demand read", [4, 5], 2)
    assert bench.end() == [("ready", 2, slots, [MISS, MISS]), ("ready", 3, slots[1:], [MISS])]
    assert bench.resident() == [2, 3, 4, 5]


def test_a_demand_larger_than_what_is_left_takes_what_there_is_and_then_the_rest() -> None:
    bench = Bench(slots=4)
    bench.demand(1, 0, 1)
    bench.end()
    assert bench.demand(2, 4, 5, 6, 1) == [("demand read", [4, 5], [2, 3])]
    assert bench.end() == []
    assert bench.release(1) == [("demand read", [6], [0])]
    assert bench.end() == [("ready", 2, [2, 3, 0, 1], [MISS, MISS, MISS, RETAINED])]


def test_the_older_of_two_demands_that_exceed_the_room_has_it_all() -> None:
    bench = Bench(slots=4)
    bench.stage(0, 1)
    bench.demand(1, 2, 3)
    bench.end()
    assert bench.demand(2, 4, 5, 6) == [("demand read", [4, 5], [0, 1])]
    bench.end()
    assert bench.demand(3, 4, 7, 8) == [], "and it pins nothing that is here"
    assert bench.staging.pins.tolist() == [1, 1, 1, 1]
    assert bench.release(1) == [("demand read", [6], [2]), ("demand read", [7], [3])]
    assert bench.end() == [("ready", 2, [0, 1, 2], [MISS] * 3)]
    assert bench.end() == []
    assert bench.release(2) == [("demand read", [8], [1])]
    assert bench.end() == [("ready", 3, [0, 3, 1], [MISS] * 3)]
    bench.release(3)
    assert (bench.pinned(), len(bench.core.demands)) == (0, 0)


def test_what_an_older_demand_had_no_room_for_goes_to_the_next_when_its_time_is_over() -> None:
    bench = Bench(slots=4)
    bench.demand(1, 0, 1)
    bench.end()
    bench.demand(2, 4, 5, 6, deadline_ns=5_000)
    bench.end()
    assert bench.demand(3, 7) == []
    assert bench.idle(5_000) == [("ready", 2, [2, 3, -1], [MISS] * 3)]
    assert bench.release(2) == [("demand read", [7], [2])]


@pytest.mark.parametrize("event", [Demanded(1, ids(9), FAR_NS), Demanded(9, ids(9), FAR_NS)])
def test_a_reused_ticket_and_one_too_many_change_nothing(event: Demanded) -> None:
    bench = Bench(limits=CoreLimits(tickets_max=2))
    bench.demand(1, 0)
    bench.demand(2, 1)
    with pytest.raises(ValueError, match=r"ticket 1 is already open|2 demands are open"):
        bench.handle(event)
    assert (len(bench.core.demands), bench.pinned(), bench.resident()) == (2, 2, [0, 1])
    assert outcomes(bench) == {"MISS": 2}
    bench.release(1)
    bench.demand(9, 9)


def test_an_unknown_ticket_cannot_be_released() -> None:
    bench = Bench()
    bench.demand(1, 0)
    bench.release(1)
    with pytest.raises(ValueError, match="ticket 1 is not open"):
        bench.release(1)
    assert bench.pinned() == 0


# --- prefetch ---


def test_a_prefetch_is_timely_once_and_retained_from_then_on() -> None:
    bench = Bench()
    assert bench.guess(4, 6) == [("prefetch read", [4, 6], [0, 1])]
    assert bench.pinned() == 0
    bench.end()
    assert bench.demand(1, 4) == [("ready", 1, [0], [TIMELY])]
    assert bench.demand(2, 4) == [("ready", 2, [0], [RETAINED])]
    assert outcomes(bench) == {"TIMELY": 1, "RETAINED": 1}
    assert verdicts(bench) == {"USEFUL": 1}
    assert (bench.counters.prefetch_reads, bench.counters.demand_reads) == (2, 0)


def test_a_prefetch_on_its_way_is_late_and_is_not_read_again() -> None:
    bench = Bench()
    bench.guess(4)
    assert bench.demand(1, 4) == []
    assert bench.end() == [("ready", 1, [0], [LATE])]
    assert (outcomes(bench), verdicts(bench)) == ({"LATE": 1}, {"LATE": 1})
    assert bench.counters.demand_reads == 0


def test_a_prefetch_thrown_out_unused_is_wasted_and_its_source_hears_of_it() -> None:
    bench = Bench(slots=2)
    bench.guess(4, 6, sources=np.array([3, 5], np.uint8))
    bench.end()
    bench.demand(1, 6)
    bench.demand(2, 8)
    bench.end()
    for page in range(20, 38):  # learning waits for time, and for enough to learn
        bench.release(1)
        bench.guess(page)
        bench.end()
        bench.demand(1, page)
    bench.guess()
    assert isinstance(bench.predictor, Scripted)
    heard = np.concatenate(
        [np.stack([f.pages, f.sources, f.verdicts], axis=1) for f in bench.predictor.feedback]
    )
    assert heard[:2].tolist() == [[6, 5, Verdict.USEFUL], [4, 3, Verdict.WASTED]]


def test_no_prefetch_is_issued_while_a_demand_waits() -> None:
    bench = Bench()
    bench.demand(1, 0)
    assert bench.guess(4, 6) == []
    assert bench.hint(4, 6) == []
    assert bench.end() == [("ready", 1, [0], [MISS]), ("prefetch read", [4, 6], [1, 2])]


def test_a_newer_plan_replaces_what_is_left_of_the_old_one() -> None:
    bench = Bench(limits=CoreLimits(prefetch_depth=2))
    assert bench.guess(10, 11, 12, 13) == [("prefetch read", [10, 11], [0, 1])]
    assert bench.guess(20, 21, 22) == [], "the depth is used up"
    assert bench.end() == [("prefetch read", [20, 21], [2, 3])]
    bench.demand(1, 22)  # which is now no prefetch any more
    bench.end(bench.reads[0])
    bench.end()
    assert bench.reads == []
    assert bench.resident() == [10, 11, 20, 21, 22]


def test_what_is_here_or_on_its_way_is_not_prefetched() -> None:
    bench = Bench()
    bench.stage(1)
    bench.guess(2)
    assert bench.guess(1, 2, 2, 3, 3, -1, 10**9) == [("prefetch read", [3], [2])]


def test_a_prefetch_takes_no_pinned_slot() -> None:
    bench = Bench(slots=2)
    bench.demand(1, 0, 1)
    bench.end()
    assert bench.guess(4) == []


def test_held_pages_give_way_to_a_demand_but_not_to_a_prefetch() -> None:
    bench = Bench(slots=4)
    bench.stage(0, 1, 2, 3)
    bench.guess(keep=ids(0, 1))
    (read,) = bench.guess(10, 11, 12, keep=ids(0, 1))
    assert read[1] == [10, 11]
    bench.end()
    assert bench.resident() == [0, 1, 10, 11]
    bench.demand(1, 20, 21, 22)
    bench.end()
    assert len(bench.resident()) == 4
    assert {20, 21, 22} <= set(bench.resident())


def test_nonsense_in_what_is_to_be_held_is_dropped() -> None:
    bench = Bench(slots=4)
    bench.stage(0, 1, 2, 99)
    bench.guess(keep=ids(-1, 10**9, 0))
    assert bench.staging.kept.tolist() == [True, False, False, False]


def test_pollution_counts_demands_for_what_a_prefetch_pushed_out() -> None:
    bench = Bench(slots=2)
    bench.stage(0)
    bench.stage(1)
    bench.guess(10)
    bench.end()
    assert bench.resident() == [1, 10]
    bench.demand(1, 0)
    bench.end(verified=False)
    bench.end(verified=False)
    bench.release(1)
    assert bench.counters.pollution == 1
    bench.demand(2, 0)
    bench.end()
    bench.release(2)
    assert bench.counters.pollution == 1, "one push, one page of pollution"
    bench.stage(20, 21)
    bench.demand(3, 0)
    assert bench.counters.pollution == 1, "a demand that makes room pollutes nothing"


def test_a_predictor_that_never_guesses_wants_no_turn_after_a_hit() -> None:
    bench = Bench(predictor=NoPrefetch)
    bench.stage(0)
    wanted = bench.plans_wanted
    bench.demand(1, 0)
    assert bench.plans_wanted == wanted
    guessing = Bench()
    guessing.demand(1)
    assert guessing.plans_wanted == 1


def test_without_retention_a_page_goes_when_its_last_reader_does() -> None:
    bench = Bench(limits=CoreLimits(retain=False))
    bench.demand(1, 0, 1)
    bench.end()
    bench.demand(2, 1)
    bench.release(1)
    assert bench.resident() == [1], "somebody still reads it"
    bench.release(2)
    assert bench.resident() == []


def test_hints_do_not_change_what_a_staging_without_prefetch_learns() -> None:
    """The baseline of every comparison: its order of eviction is the demands' alone."""
    left = []
    for hinted in (False, True):
        bench = Bench(slots=4, predictor=NoPrefetch)
        for ticket, page in enumerate([0, 2, 4, 6, 0, 8, 10], start=1):
            if hinted:
                bench.tell(Hinted(PageHint(ids(page), np.ones(1, np.float32))))
            bench.demand(ticket, page)
            if bench.reads:
                bench.end()
            bench.release(ticket)
            bench.settle()
        left.append(bench.resident())
    assert left == [[0, 6, 8, 10]] * 2


def test_an_answer_cannot_be_written_and_nobody_is_kept_in_mind_who_has_gone() -> None:
    bench = Bench()
    for ticket in (1, 2):
        bench.demand(ticket, 3)
    for ticket in (1, 2):
        bench.release(ticket)
    bench.end()
    assert not bench.core.demands._others
    [ready] = bench.handle(Demanded(3, ids(3), FAR_NS))[:1]
    assert isinstance(ready, Ready)
    with pytest.raises(ValueError, match="read-only"):
        ready.slots[0] = 5
