"""Eviction policies: the contract, over all of them, and LRU against a plain model.

ARC is compared with libCacheSim in test_caches.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.eviction import EVICTIONS, Cycle, Eviction, Lru
from prefetchd.lab.belady import belady_misses
from prefetchd.model import NO_IDS, Geometry, Ids, Scores

GEOMETRY = Geometry(layers=3, blocks=14)


@dataclass
class Stage:
    """The least staging there can be: slots, pages, and a policy told of everything."""

    policy: Eviction
    slots: int
    log: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page_of = np.full(self.slots, -1, np.int64)

    def slot_of(self, pages: Ids) -> Ids:
        return np.array([int(np.flatnonzero(self.page_of == page)[0]) for page in pages], np.int64)

    def place(self, pages: Ids, pinned: Ids, *, prefetched: bool) -> None:
        free = np.flatnonzero(self.page_of < 0)[: len(pages)]
        allowed = self.page_of >= 0
        allowed[self.slot_of(pinned)] = False
        lacking = len(pages) - len(free)
        if lacking:
            victims = self.policy.victims(lacking, allowed.copy())
            assert victims.dtype == np.int64
            assert len(victims) == min(lacking, np.count_nonzero(allowed))
            assert len(np.unique(victims)) == len(victims)
            assert allowed[victims].all()
            self.log.append(self.page_of[victims].tolist())
            self.policy.removed(victims, self.page_of[victims])
            self.page_of[victims] = -1
            free = np.concatenate([free, victims])
        self.page_of[free] = pages[: len(free)]
        self.policy.inserted(free, pages[: len(free)], prefetched=prefetched)

    def demand(self, pages: Ids, scores: Scores | None = None) -> int:
        """Serve a demand; returns how many of its pages were absent."""
        self.policy.demanded(pages, scores)
        here = np.isin(pages, self.page_of)
        absent = pages[~here]
        if len(absent):
            self.place(absent, pages[here], prefetched=False)
        self.policy.touched(self.slot_of(pages), pages, scores)
        return len(absent)

    def prefetch(self, pages: Ids) -> None:
        absent = pages[~np.isin(pages, self.page_of)]
        if len(absent):
            self.place(absent, NO_IDS, prefetched=True)


def ids(*pages: int) -> Ids:
    return np.array(pages, np.int64)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[str, Ids]]:
    """Demands, prefetches and hints, each of one layer."""
    found = []
    for _ in range(draw(st.integers(1, 40))):
        layer = draw(st.integers(0, GEOMETRY.layers - 1))
        blocks = draw(st.lists(st.integers(0, 13), min_size=1, max_size=5, unique=True))
        kind = draw(st.sampled_from(["demand", "demand", "demand", "prefetch", "hint"]))
        found.append((kind, GEOMETRY.page_ids(np.array(blocks, np.int64), layer)))
    return found


def run(policy: Eviction, slots: int, sequence: list[tuple[str, Ids]]) -> Stage:
    stage = Stage(policy, slots)
    for kind, pages in sequence:
        scores = ((pages % 5) / 5).astype(np.float32)
        if kind == "demand":
            stage.demand(pages, scores)
        elif kind == "prefetch":
            stage.prefetch(pages)
        else:
            policy.expected(pages, scores)
    return stage


@pytest.mark.parametrize("name", sorted(EVICTIONS))
class TestContract:
    @given(sequence=batches(), slots=st.integers(5, 20))
    @settings(max_examples=60, deadline=None)
    def test_victims_are_distinct_allowed_and_as_many_as_asked_for(
        self, name: str, sequence: list[tuple[str, Ids]], slots: int
    ) -> None:
        run(EVICTIONS[name](slots, GEOMETRY), slots, sequence)

    @given(sequence=batches())
    @settings(max_examples=20, deadline=None)
    def test_same_events_give_same_victims(
        self, name: str, sequence: list[tuple[str, Ids]]
    ) -> None:
        logs = [run(EVICTIONS[name](6, GEOMETRY), 6, sequence).log for _ in range(2)]
        assert logs[0] == logs[1]

    def test_more_victims_than_allowed(self, name: str) -> None:
        stage = Stage(EVICTIONS[name](8, GEOMETRY), 8)
        stage.demand(ids(0, 3, 6, 9, 12))
        allowed = np.zeros(8, np.bool_)
        assert len(stage.policy.victims(3, allowed)) == 0
        allowed[:2] = True
        assert sorted(stage.policy.victims(5, allowed).tolist()) == [0, 1]
        assert len(stage.policy.victims(0, np.ones(8, np.bool_))) == 0

    def test_demand_of_several_layers_in_one_batch(self, name: str) -> None:
        stage = Stage(EVICTIONS[name](6, GEOMETRY), 6)
        for step in range(6):
            stage.demand(ids(0, 1, 2, 3 + step, 9 + 2 * step))
        assert np.isin(ids(0, 1, 2), stage.page_of).all()

    def test_worth_has_one_entry_a_slot_or_none(self, name: str) -> None:
        stage = Stage(EVICTIONS[name](6, GEOMETRY), 6)
        stage.demand(ids(0, 3, 6), np.ones(3, np.float32))
        worth = stage.policy.worth(np.arange(3))
        if worth is not None:
            assert worth.shape == (3,)
            assert ((worth >= 0) & (worth <= 1)).all()


@given(sequence=batches(), slots=st.integers(5, 20))
@settings(max_examples=80, deadline=None)
def test_lru_equals_an_ordered_dict(sequence: list[tuple[str, Ids]], slots: int) -> None:
    stage, model = Stage(Lru(slots, GEOMETRY), slots), OrderedDict[int, None]()
    for kind, pages in sequence:
        if kind == "hint":
            continue
        demanded = kind == "demand"
        absent = [page for page in pages.tolist() if page not in model]
        pinned = set(pages.tolist()) - set(absent) if demanded else set()
        for page in absent:
            if len(model) == slots:
                del model[next(old for old in model if old not in pinned | set(absent))]
            model[page] = None
        if demanded:
            for page in pages.tolist():
                model.move_to_end(page)
            stage.demand(pages)
        else:
            stage.prefetch(pages)
        assert set(model) == set(stage.page_of[stage.page_of >= 0].tolist())


def test_arc_outlasts_a_scan_and_lru_does_not() -> None:
    misses = {}
    for name in ("lru", "arc"):
        stage = Stage(EVICTIONS[name](8, Geometry(1, 200)), 8)
        stage.demand(ids(0, 1, 2, 3))
        stage.demand(ids(0, 1, 2, 3))
        for start in range(10, 60, 4):
            stage.demand(np.arange(start, start + 4))
        misses[name] = stage.demand(ids(0, 1, 2, 3))
    assert misses == {"lru": 4, "arc": 0}


def cyclic_misses(policy: type[Eviction], slots: int, steps: int = 30) -> int:
    """Layers in turn; each wants four blocks always and two that it never wanted before."""
    geometry = Geometry(layers=6, blocks=4 + 2 * steps)
    stage, misses = Stage(policy(slots, geometry), slots), 0
    for step in range(steps):
        for layer in range(geometry.layers):
            blocks = ids(0, 1, 2, 3, 4 + 2 * step, 5 + 2 * step)
            misses += stage.demand(geometry.page_ids(blocks, layer))
    return misses


def test_cycle_keeps_what_returns_where_lru_keeps_what_is_recent() -> None:
    new = 6 * 4 + 6 * 2 * 30
    assert cyclic_misses(Cycle, slots=30) <= 1.05 * new
    assert cyclic_misses(Lru, slots=30) == 6 * 6 * 30


def test_cycle_protects_expected_pages_until_their_turn() -> None:
    geometry = Geometry(layers=3, blocks=40)
    policy = Cycle(12, geometry)
    stage = Stage(policy, 12)
    stage.demand(geometry.page_ids(np.arange(4), 1))
    for step in range(6):
        # Layer 1 never wants blocks 0 to 3 again: in time they are the least worth of all.
        stage.demand(geometry.page_ids(ids(10, 11, 12, 13 + step), 1))
    wanted = geometry.page_ids(np.arange(4), 1)
    here = wanted[np.isin(wanted, stage.page_of)]
    assert len(here) == 3
    slots = stage.slot_of(here)
    policy.victims(1, np.ones(12, np.bool_))  # brings the worths up to date
    before = policy.worth(slots)
    policy.expected(here, np.full(len(here), 0.9, np.float32))
    policy.victims(1, np.ones(12, np.bool_))
    assert (policy.worth(slots) > before).all()
    stage.demand(geometry.page_ids(ids(20, 21, 22), 0))
    assert np.isin(here, stage.page_of).all()
    stage.demand(geometry.page_ids(ids(10, 11, 12, 30), 1))
    policy.victims(1, np.ones(12, np.bool_))
    assert (policy.worth(slots[np.isin(here, stage.page_of)]) < 0.2).all()


@given(
    st.lists(
        st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True), min_size=1, max_size=30
    ),
    st.integers(3, 8),
)
@settings(max_examples=80, deadline=None)
def test_no_policy_beats_belady(demands: list[list[int]], slots: int) -> None:
    arrays = [np.array(demand, np.int64) for demand in demands]
    optimum = belady_misses(arrays, slots).sum()
    for policy in EVICTIONS.values():
        stage = Stage(policy(slots, Geometry(3, 4)), slots)
        assert sum(stage.demand(demand) for demand in arrays) >= optimum


def test_belady_on_a_known_case_and_a_demand_that_cannot_fit() -> None:
    demands = [ids(page) for page in (0, 1, 2, 0, 1, 3, 0, 1, 2, 3)]
    assert belady_misses(demands, 3).tolist() == [1, 1, 1, 0, 0, 1, 0, 0, 1, 0]
    with pytest.raises(ValueError, match="3 pages of 2 slots"):
        belady_misses([ids(0, 1, 2)], 2)
