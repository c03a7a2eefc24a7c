"""Restores in the core: read whole, beside waiting demands, few at a time; who goes later."""

from __future__ import annotations

import numpy as np
import pytest

from prefetchd.core import CoreLimits
from prefetchd.model import (
    NO_IDS,
    Access,
    ChainHint,
    DoneHint,
    Feedback,
    Forgotten,
    Geometry,
    Hinted,
    Ids,
    PageHint,
)
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors.cross_request import CrossRequest
from tests.core_bench import Bench, Scripted, Told, ids

ONE_LAYER = Geometry(layers=1, blocks=200)
FOUR_LAYERS = Geometry(layers=4, blocks=50)


def pages(commands: list[Told]) -> list[int]:
    return [page for name, numbers, _ in commands if "read" in name for page in numbers]


def test_a_restore_is_planned_whole_and_read_on_as_reads_end() -> None:
    bench = Bench(64, limits=CoreLimits(prefetch_depth=4))
    assert pages(bench.guess(*range(20), restores=True)) == [0, 1, 2, 3]
    assert pages(bench.end()) == [4, 5, 6, 7]
    bench = Bench(64, limits=CoreLimits(prefetch_depth=4))
    assert pages(bench.guess(*range(20))) == [0, 1, 2, 3]
    assert pages(bench.end()) == [4, 5, 6, 7]
    assert pages(bench.end()) == [], "other guesses end with their burst of eight"


def test_a_restore_goes_on_beside_a_waiting_demand_and_other_guesses_do_not() -> None:
    for restores in (True, False):
        bench = Bench(64)
        bench.demand(1, 90)
        assert (pages(bench.guess(1, 2, restores=restores)) == [1, 2]) == restores


def test_a_restore_never_takes_the_room_that_a_demand_lacks() -> None:
    bench = Bench(4)
    bench.demand(1, 90, 91, 92)
    bench.demand(2, 93, 94)
    assert bench.guess(1, 2, restores=True) == []


def test_a_guess_cut_by_the_limit_of_candidates_is_followed_by_another() -> None:
    bench = Bench(64, limits=CoreLimits(candidates=2))
    bench.guess(1, 2, restores=True)
    before = bench.plans_wanted
    bench.end()
    assert bench.plans_wanted == before + 1


class Listed(Predictor):
    """Names all of a hinted request, from its first page on."""

    blocks = NO_IDS

    def on_chain_hint(self, hint: ChainHint) -> None:
        self.blocks = hint.blocks

    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.geometry.all_pages(self.blocks)[:limit], restores=True)


@pytest.mark.parametrize("resident", [0, 1, 5, 20])
@pytest.mark.parametrize("candidates_max", [3, 4096])
def test_a_restore_is_read_to_its_end_behind_what_is_here(
    resident: int, candidates_max: int
) -> None:
    few = CoreLimits(candidates=8)
    bench = Bench(200, geometry=FOUR_LAYERS, limits=few, predictor=Listed)
    bench.core.planner.limits = PlannerLimits(candidates_max=candidates_max)
    for block in range(resident):
        bench.stage(*range(4 * block, 4 * block + 4))
    bench.settle()
    bench.handle(Hinted(ChainHint(1, np.arange(22))))
    while bench.reads:
        bench.end()
        bench.settle()
    assert bench.resident() == list(range(4 * 22))
    assert bench.core.counters.prefetch_reads == 4 * (22 - resident), "each read once"


def test_the_depth_that_keeps_a_device_busy_follows_from_what_was_measured() -> None:
    ahead = np.arange(1, 9, dtype=np.int32)
    serial, parallel = Planner(PlannerLimits()), Planner(PlannerLimits())
    assert serial.busy_depth(waiting=False) == PlannerLimits().candidates_max
    serial.observe_reads(ahead, ahead.astype(np.int64) * 9_000_000)
    parallel.observe_reads(ahead, 120_000 + ahead.astype(np.int64) * 20_000)
    assert [serial.busy_depth(waiting=waiting) for waiting in (True, False)] == [1, 1]
    assert [parallel.busy_depth(waiting=waiting) for waiting in (True, False)] == [13, 14]


def test_the_tail_of_a_request_that_returns_goes_first_and_a_resting_one_before_it() -> None:
    def left(reason: str, new: int) -> list[int]:
        bench = Bench(38, geometry=ONE_LAYER)
        bench.stage(*range(100, 132))  # as many victims as are chosen ahead of time
        bench.stage(0, 1, 2)
        bench.stage(10, 11, 12)
        bench.settle()
        bench.handle(Hinted(DoneHint(1, reason, blocks=ids(0, 1, 2, 999))))
        bench.stage(*range(140, 140 + 32 + new))
        return [page for page in bench.resident() if page < 100]

    assert left("tool_use", 3) == [0, 1, 2]
    assert left("tool_use", 4) == [0, 1]
    assert left("end_turn", 3) == [10, 11, 12]


def test_a_resting_request_goes_before_what_was_used_longest_ago() -> None:
    bench = Bench(38, geometry=ONE_LAYER)
    bench.stage(*range(100, 135))
    bench.stage(0, 1, 2)
    bench.settle()
    bench.handle(Hinted(DoneHint(1, "end_turn", blocks=ids(0, 1, 2))))
    bench.stage(*range(140, 140 + 34))
    assert not [page for page in bench.resident() if page < 100]
    assert 134 in bench.resident()


def demand(predictor: CrossRequest, blocks: Ids | list[int], request: int) -> None:
    predictor.on_access(Access(np.array(blocks), np.zeros(len(blocks), np.uint8), request))


def test_blocks_that_a_request_made_itself_are_learned_from_its_done_hint() -> None:
    predictor = CrossRequest(ONE_LAYER, 50)
    predictor.on_done_hint(DoneHint(1, blocks=ids(0, 10, 11, 12, 13)))
    demand(predictor, [0, 10], 2)
    guess = predictor.predict(0, 100)
    assert guess.pages.tolist() == [11, 12, 13]
    assert guess.restores
    demand(predictor, [11, 12], 2)
    predictor.on_done_hint(DoneHint(2, blocks=ids(0, 10, 11, 12, 20, 21)))
    demand(predictor, [0, 10], 3)
    assert predictor.predict(0, 100).pages.tolist()[:4] == [11, 12, 20, 21]


def test_requests_are_restored_in_the_order_of_their_starts() -> None:
    predictor = CrossRequest(ONE_LAYER, 50)
    predictor.on_chain_hint(ChainHint(1, ids(1, 2), start_ns=500))
    predictor.on_chain_hint(ChainHint(2, ids(3, 4), start_ns=100))
    assert predictor.predict(0, 100).pages.tolist() == [3, 4, 1, 2]


def test_a_restore_goes_on_when_other_blocks_are_forgotten() -> None:
    bench = Bench(64, limits=CoreLimits(prefetch_depth=4))
    bench.guess(*range(20), restores=True)
    bench.tell(Forgotten(ids()))
    assert pages(bench.end()) == [4, 5, 6, 7]
    bench.tell(Forgotten(ids(9, 10)))
    assert pages(bench.end()) == [8, 11, 12, 13], "what is gone is not asked for"


class Listening(Predictor):
    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.told: list[list[int]] = []

    def on_page_hint(self, hint: PageHint) -> None:
        self.told.append(hint.pages.tolist())

    def on_chain_hint(self, hint: ChainHint) -> None:
        self.told.append(hint.blocks.tolist())

    def on_done_hint(self, hint: DoneHint) -> None:
        self.told.append(hint.blocks.tolist())


def test_a_predictor_is_told_of_no_block_or_page_that_is_not_there() -> None:
    bench = Bench(8, predictor=Listening, geometry=ONE_LAYER)
    there, wrong = ids(3, 199), ids(3, -1, 200, 199)
    for some in (there, wrong):
        bench.handle(Hinted(PageHint(some, np.ones(len(some), np.float32))))
        bench.handle(Hinted(ChainHint(1, some)))
        bench.handle(Hinted(DoneHint(1, "tool_use", None, some)))
    assert isinstance(bench.predictor, Listening)
    assert bench.predictor.told == [[3, 199]] * 6


def test_a_guess_of_all_that_is_needed_stands_until_something_else_is_demanded_or_it_goes() -> None:
    bench = Bench(4, limits=CoreLimits(prefetch_depth=4))
    assert pages(bench.guess(0, 1, 2, 3, restores=True)) == [0, 1, 2, 3]
    bench.end()
    bench.demand(1, 0, 1)
    assert bench.guess(8, 9, restores=True) == [], "nobody asked: what was named is what is needed"
    bench.demand(2, 8)  # takes the place of one of those that were named
    assert bench.core.foresight.planned == 0
    assert isinstance(bench.predictor, Scripted)
    bench.predictor.guess = Guess(ids(*range(4)), restores=True)
    gone = [page for page in range(4) if page not in bench.resident()]
    bench.end()
    bench.release(2)
    assert set(pages(bench.settle())) & set(gone), "what has gone out is fetched again"


def test_a_guess_made_before_all_demands_were_shown_does_not_stand() -> None:
    bench = Bench(120, geometry=ONE_LAYER, predictor=CrossRequest)
    for request in range(10, 20):  # teach the chain
        bench.handle(Hinted(DoneHint(request, blocks=np.arange(40))))
    bench.demand(1, 0)
    bench.demand(2, 1)
    bench.handle(Hinted(ChainHint(2, ids(150, 151))))  # planned at once, the demands not yet shown
    bench.settle()
    while bench.reads:
        bench.end()
        bench.settle()
    assert bench.resident() == [*range(40), 150, 151]


def test_what_a_distrusted_source_said_of_a_restore_is_asked_for_again() -> None:
    bench = Bench(64)
    planner, nothing = bench.core.planner, Feedback(NO_IDS, *[np.empty(0, np.uint8)] * 2)
    planner.limits = PlannerLimits(precision_floor=2.0)  # whatever it guesses
    planner.observe_feedback(nothing)
    assert bench.guess(1, 2, restores=True) == []
    planner.limits = PlannerLimits()
    planner.observe_feedback(nothing)
    assert pages(bench.settle()) == [1, 2]
