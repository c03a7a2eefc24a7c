"""Hints and eviction together: what a hint leaves behind, and what is done without any."""

from __future__ import annotations

import numpy as np
import pytest

from prefetchd.core import Core, CoreLimits
from prefetchd.counters import Counters
from prefetchd.cycle import Cycle
from prefetchd.eviction import EVICTIONS
from prefetchd.guarded import Guarded
from prefetchd.model import (
    Access,
    Completed,
    Demanded,
    Geometry,
    Idle,
    Ids,
    IoClass,
    PlanSoon,
    Read,
    Released,
)
from prefetchd.observer import Observer
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.predictor import Guess
from prefetchd.registry import predictor_class
from prefetchd.staging import READY, Staging
from tests.decision_bench import PARTS, Shape, measure

GEOMETRY = Geometry(layers=12, blocks=20)


def chances(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


def page(block: int, layer: int) -> Ids:
    return GEOMETRY.page_ids(np.array([block]), layer)


def test_of_two_unused_pages_the_one_that_a_hint_named_is_kept() -> None:
    policy = Cycle(2, GEOMETRY)
    pages = np.concatenate([page(5, 3), page(9, 3)])
    policy.inserted(np.arange(2), pages, prefetched=False)
    policy.expected(page(9, 3), chances(0.4))
    policy.demanded(page(0, 3), None)
    for layer in range(4, 7):
        policy.demanded(page(0, layer), None)
    assert policy.victims(1, np.ones(2, np.bool_)).tolist() == [0]


def test_a_prefetched_page_whose_turn_is_over_is_not_held_for_the_next() -> None:
    """Though it is shown to the policy after the demand that passed it by."""
    slots = 4
    staging = Staging(slots, GEOMETRY, EVICTIONS["cycle"](slots, GEOMETRY))
    predictor = Guarded(predictor_class("none")(GEOMETRY, slots))
    watched = Observer(staging, predictor, Planner(PlannerLimits()))
    used, fetched = page(1, 2), page(7, 2)
    for _ in range(3):
        for layer in (2, 5):
            watched.demanded(np.array([-1]), Access(page(1, layer), np.zeros(1, np.uint8)))
            watched.show_next(at_once=True)
    kept, _ = staging.place(used, IoClass.DEMAND)
    watched.guessed(Guess(fetched, chances(0.3)))
    came, _ = staging.place(fetched, IoClass.PREFETCH, np.zeros(1, np.uint8), chances(0.3))
    staging.state[[kept[0], came[0]]] = READY
    watched.demanded(kept, Access(used, np.zeros(1, np.uint8)))
    while watched.show_next(at_once=False, early=True):
        pass
    assert staging.eviction.victims(1, staging.evictable()).tolist() == came.tolist()
    worth = staging.eviction.worth(came)
    assert worth is not None
    assert worth[0] < 0.05


@pytest.mark.parametrize("name", ["attention", "auto"])
def test_without_hints_nothing_is_read_but_what_is_missed(name: str) -> None:
    """So there are never more bytes, nor more misses, than with the eviction alone."""
    assert decode(name) == decode("none")


def decode(name: str) -> tuple[int, int, list[int]]:
    """Demand reads, prefetch reads and outcomes of a decode whose needs drift."""
    slots, random = 60, np.random.default_rng(4)
    staging = Staging(slots, GEOMETRY, EVICTIONS["cycle"](slots, GEOMETRY))
    predictor = predictor_class(name)(GEOMETRY, slots)
    core = Core(staging, predictor, Planner(PlannerLimits()), CoreLimits())
    for turn in range(80 * GEOMETRY.layers):
        blocks = np.unique(np.concatenate([[0, turn // 80], random.integers(0, 20, 5)]))
        pages = GEOMETRY.page_ids(blocks, turn % GEOMETRY.layers)
        now_ns = 1000 * turn
        commands = core.handle(Demanded(turn, pages, 1 << 60), now_ns)
        for read in [command for command in commands if isinstance(command, Read)]:
            good = np.ones(len(read.slots), np.bool_)
            core.handle(Completed(read.slots, read.generations, good), now_ns)
        core.handle(Released(turn), now_ns)
        while PlanSoon() in core.handle(Idle(), now_ns):
            pass
    counters: Counters = core.counters
    return counters.demand_reads, counters.prefetch_reads, counters.outcomes.tolist()


def test_the_cost_of_decisions_is_told_apart() -> None:
    shape = Shape(requests=2, blocks=600, layers=4, heads=2, top_k=8, warm_blocks=40)
    costs = measure(shape, "auto", hints=True, steps=6, warmup=2, rounds=2)
    assert costs.spent_ns.shape == (4 * 4, len(PARTS))
    assert (costs.spent_ns.sum(axis=0) > 0).all()
    assert costs.pages > len(costs.spent_ns)
