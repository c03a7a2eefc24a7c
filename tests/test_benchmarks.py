"""What the hot paths cost: plain tests by default, timed with `scripts/test --benchmark-enable`."""

from __future__ import annotations

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

import prefetchd
from prefetchd.core import Core, CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.model import Demanded, Geometry, Hinted, Idle, PageHint, PlanSoon, Read, Released
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.registry import predictor_class
from prefetchd.staging import Staging


def test_demand_of_64_resident_pages(benchmark: BenchmarkFixture) -> None:
    """From the call to a ticket that is done; releasing it is part of the round, as in use."""
    layout = prefetchd.uniform(30, 4096)
    options = prefetchd.Options(device="memory", predictor="none", evict="lru")
    with prefetchd.open(None, layout, blocks=64, options=options) as kv:
        keys = [bytes([block]) * 16 for block in range(64)]
        kv.put(keys, np.zeros((64, 30, 4096), np.uint8)).wait()
        pages = kv.pages(kv.lookup(keys), layer=3)
        kv.demand(pages).wait().release()

        def round_trip() -> bool:
            ticket = kv.demand(pages)
            done = ticket.done
            ticket.release()
            return done

        assert benchmark(round_trip)


def test_decision_over_1000_candidates(benchmark: BenchmarkFixture) -> None:
    """From a hint of 1,000 pages to the reads it asks for, at a full staging of 2,790 slots."""
    geometry = Geometry(layers=30, blocks=1200)
    slots = 2790
    staging = Staging(slots, geometry, EVICTIONS["cycle"](slots, geometry))
    predictor = predictor_class("attention")(geometry, slots)
    core = Core(staging, predictor, Planner(PlannerLimits()), CoreLimits(prefetch_depth=1 << 20))
    scores = np.linspace(1, 0, 1000, dtype=np.float32)
    random = np.random.default_rng(1)
    for layer in range(30):
        pages = geometry.page_ids(random.choice(1200, 93, replace=False), layer)
        core.handle(Demanded(layer, pages, 1 << 60), layer)
        core.handle(Released(layer), layer)
        while PlanSoon() in core.handle(Idle(), layer):
            pass
    hints = [
        PageHint(geometry.page_ids(random.permutation(1200)[:1000], layer), scores)
        for layer in range(30)
    ]
    turns = iter(range(1 << 40))

    def decide() -> int:
        turn = next(turns)
        commands = core.handle(Hinted(hints[turn % 30]), 1000 * turn)
        return sum(len(command.pages) for command in commands if isinstance(command, Read))

    assert benchmark(decide) >= 0
