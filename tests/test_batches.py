"""Demands told together leave the policies as they would be, had they been told one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.cycle import Cycle
from prefetchd.guarded import Guarded, PredictorError
from prefetchd.history import UseHistory
from prefetchd.layer_turns import one_turn, turns_of
from prefetchd.model import Access, Geometry, Ids, Mask, Outcome, PageHint, Scores, Slots
from prefetchd.observer import Observer
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.policy import Eviction
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors.attention import Attention
from prefetchd.ranks import rank_shares, rank_shares_of
from prefetchd.registry import names, predictor_class
from prefetchd.staging import Staging
from prefetchd.unseen import BATCH_DEMANDS, CROWDED, UNSEEN_MAX, Unseen

GEOMETRY = Geometry(layers=12, blocks=20)
SLOTS = 60
Demand = tuple[Ids, Scores | None]

blocks_of_a_demand = st.lists(st.integers(0, 19), min_size=1, max_size=6, unique=True)


@st.composite
def batches(draw: st.DrawFn) -> list[Demand]:
    """One demand of any layers, or several of one layer each and no layer twice."""
    if draw(st.integers(0, 4)) == 0:
        some = st.lists(st.integers(0, GEOMETRY.pages - 1), min_size=1, max_size=9, unique=True)
        return [(np.array(draw(some), np.int64), None)]
    found: list[Demand] = []
    scored = draw(st.booleans())
    for layer in draw(st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)):
        pages = GEOMETRY.page_ids(np.array(draw(blocks_of_a_demand), np.int64), layer)
        scores = [draw(st.sampled_from([-2.5, -1.0, 0.0, 0.25, 8.0])) for _ in pages]
        found.append((pages, np.array(scores, np.float32) if scored else None))
    return found


def joined(batch: list[Demand]) -> Demand:
    scores = [some for _, some in batch if some is not None]
    return np.concatenate([p for p, _ in batch]), np.concatenate(scores) if scores else None


def state(history: UseHistory) -> Iterator[Any]:
    yield history.layer
    pages = np.arange(GEOMETRY.pages)
    rank = np.zeros(GEOMETRY.layers * history.columns, np.uint8)
    yield history.chance(*history.locate(pages), rank)
    yield history.turns_since(*history.locate(pages))
    for layer in range(GEOMETRY.layers):
        yield history.turns(layer)
        yield history.demand(layer)


def assert_alike(one: Iterator[Any], other: Iterator[Any]) -> None:
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)


@given(st.lists(batches(), max_size=25))
@settings(max_examples=60, deadline=None)
def test_a_history_does_not_depend_on_batches(sequence: list[list[Demand]]) -> None:
    together, apart, plain = (UseHistory(GEOMETRY) for _ in range(3))
    for batch in sequence:
        for turns, _ in turns_of(joined(batch)[0], GEOMETRY):
            together.demanded(turns)
        for pages, _ in batch:
            one = one_turn(pages, GEOMETRY)
            for turns, _ in turns_of(pages, GEOMETRY):
                apart.demanded(turns)
                if one is None:
                    plain.demanded(turns)
            if one is not None:
                plain.demanded_one(*one)
        assert_alike(state(together), state(apart))
        assert_alike(state(together), state(plain))


@given(batches())
@settings(max_examples=60, deadline=None)
def test_ranks_are_shares_of_their_own_turn(batch: list[Demand]) -> None:
    pages, scores = joined(batch)
    if scores is None:
        return
    [(turns, _)] = turns_of(pages, GEOMETRY)
    given_scores = [some for _, some in batch if some is not None]
    expected = [(some[:, None] > some[None, :]).mean(axis=1) for some in given_scores]
    ranks = rank_shares_of(scores, turns)
    np.testing.assert_allclose(ranks / 255, np.concatenate(expected), atol=0.6 / 255)
    assert ranks.tolist() == np.concatenate([rank_shares(some) for some in given_scores]).tolist()


@given(st.lists(st.tuples(batches(), st.booleans(), blocks_of_a_demand), max_size=15))
@settings(max_examples=60, deadline=None)
def test_cycle_does_not_depend_on_batches(
    sequence: list[tuple[list[Demand], bool, list[int]]],
) -> None:
    together, apart = Cycle(SLOTS, GEOMETRY), Cycle(SLOTS, GEOMETRY)
    slots = np.arange(SLOTS)
    for policy in (together, apart):
        policy.inserted(slots, slots * 4, prefetched=False)
    for number, (batch, prefetched, blocks) in enumerate(sequence):
        together.demanded(*joined(batch))
        for demand in batch:
            apart.demanded(*demand)
        guess = GEOMETRY.page_ids(np.array(blocks, np.int64), number % GEOMETRY.layers)
        worths = []
        for policy in (together, apart):
            some = slots[number % 7 :: 7]
            policy.removed(some, some * 4)
            policy.inserted(some, some * 4, prefetched=prefetched)
            policy.expected(guess, np.linspace(0.9, 0.2, len(guess)).astype(np.float32))
            victims = policy.victims(SLOTS, np.ones(SLOTS, np.bool_))
            worths.append(policy.worth(slots))
            assert (np.diff(worths[-1][victims]) >= 0).all()
        np.testing.assert_allclose(worths[0], worths[1], rtol=1e-4, atol=1e-6)


class Told(Eviction, Predictor):
    """Remembers what it is told, as far as order matters."""

    def __init__(self, slots: int, geometry: Geometry) -> None:
        Eviction.__init__(self, slots, geometry)
        self.demands: list[list[int]] = []
        self.accesses: list[list[int]] = []
        self.promises: dict[int, list[int]] = {}
        self.sizes: list[int] = []

    def demanded(self, pages: Ids, scores: Scores | None) -> None:
        assert scores is None or len(scores) == len(pages)
        for turns, _ in turns_of(pages, self.geometry):
            for layer, blocks in turns.each():
                self.promises.pop(layer, None)
                self.demands.append(self.geometry.page_ids(blocks, layer).tolist())

    def expected(self, pages: Ids, chances: Scores) -> None:
        assert len(pages) == len(chances)
        for turns, _ in turns_of(pages, self.geometry):
            for layer, blocks in turns.each():
                self.promises[layer] = blocks.tolist()

    def touched(self, slots: Slots, pages: Ids, scores: Scores | None) -> None:
        raise AssertionError("nothing is here")

    def victims(self, count: int, allowed: Mask) -> Slots:
        raise AssertionError("nothing is here")

    def on_access(self, access: Access) -> None:
        self.accesses.append(access.pages.tolist())

    def on_accesses(self, accesses: Sequence[Access]) -> None:
        self.sizes.append(len(accesses))
        for access in accesses:
            self.on_access(access)


def observer() -> tuple[Observer, Told]:
    told = Told(4, GEOMETRY)
    staging = Staging(4, GEOMETRY, told)
    return Observer(staging, Guarded(told), Planner(PlannerLimits())), told


def access_of(pages: Ids, scores: Scores | None) -> Access:
    return Access(pages, np.full(len(pages), Outcome.MISS, np.uint8), 0, scores)


pages_of = st.lists(st.integers(0, GEOMETRY.pages - 1), max_size=4, unique=True)
events = st.lists(
    st.one_of(
        st.tuples(st.just("demand"), st.integers(0, 11), blocks_of_a_demand),
        st.tuples(st.just("guess"), st.integers(0, 11), blocks_of_a_demand),
        st.tuples(st.sampled_from(["any demand", "any guess"]), st.booleans(), pages_of),
    ),
    max_size=60,
)


@given(events)
@settings(max_examples=100, deadline=None)
def test_an_observer_tells_the_same_at_once_and_in_batches(sequence: list[Any]) -> None:
    (late, told_late), (soon, told_soon) = observer(), observer()
    for kind, where, numbers in sequence:
        pages = np.array(numbers, np.int64)
        scores = np.ones(len(pages), np.float32)
        if kind in ("demand", "guess"):
            pages = GEOMETRY.page_ids(pages, where)
        for each in (late, soon):
            if "demand" in kind:
                scored = scores if where is True else None
                each.demanded(np.full(len(pages), -1), access_of(pages, scored))
            else:
                each.guessed(Guess(pages, scores))
        while soon.show_next(at_once=True):
            pass
        while late.show_next(at_once=False):
            pass
        assert told_late.accesses == told_soon.accesses[: len(told_late.accesses)]
    while late.show_next(at_once=True):
        pass
    assert told_late.accesses == told_soon.accesses
    assert told_late.demands == told_soon.demands
    assert told_late.promises == told_soon.promises


def test_a_pass_over_the_layers_is_told_in_full_batches() -> None:
    watched, told = observer()
    for layer in range(GEOMETRY.layers):
        pages = GEOMETRY.page_ids(np.arange(3), layer)
        watched.guessed(Guess(pages, np.ones(3, np.float32)))
        watched.demanded(np.full(3, -1), access_of(pages, None))
        watched.show_next(at_once=False)
    assert told.sizes == [BATCH_DEMANDS] * (GEOMETRY.layers // BATCH_DEMANDS)
    assert told.promises == {}


def test_without_hints_the_predictor_sees_each_demand_and_the_eviction_learns_in_batches() -> None:
    watched, told = observer()
    demands = [GEOMETRY.page_ids(np.arange(3), layer) for layer in range(BATCH_DEMANDS)]
    for number, pages in enumerate(demands[:-1], 1):
        watched.demanded(np.full(3, -1), access_of(pages, None))
        assert not watched.show_next(at_once=True)
        assert (len(told.accesses), told.demands) == (number, [])
    watched.demanded(np.full(3, -1), access_of(demands[-1], None))
    watched.show_next(at_once=True)
    assert told.sizes == [1] * BATCH_DEMANDS
    assert told.demands == told.accesses == [pages.tolist() for pages in demands]


def test_the_oldest_that_is_unseen_is_dropped_and_crowds_before() -> None:
    unseen = Unseen(GEOMETRY)
    for number in range(UNSEEN_MAX + 5):
        assert unseen.crowded == (number >= CROWDED)
        unseen.add((np.array([-1]), access_of(np.array([number]), None)))
    assert len(unseen) == UNSEEN_MAX
    assert unseen.batch().accesses[0].pages.tolist() == [5]


@pytest.mark.parametrize("name", names("predictor"))
@pytest.mark.parametrize("hinted", [False, True])
def test_a_predictor_guesses_the_same_after_batches(name: str, hinted: bool) -> None:
    random = np.random.default_rng(5)
    together, apart = (predictor_class(name)(GEOMETRY, SLOTS) for _ in range(2))
    for start in range(0, 40 * GEOMETRY.layers, 8):
        layers = np.arange(start, start + 8 - start % 3) % GEOMETRY.layers
        batch = []
        for layer in layers.tolist():
            blocks = np.unique(np.concatenate([[0, start // 30], random.integers(0, 20, 4)]))
            batch.append(access_of(GEOMETRY.page_ids(blocks, layer), None))
        for predictor in (together, apart):
            for access in batch if hinted else []:
                pages = access.pages[:4]
                predictor.on_page_hint(PageHint(pages, np.ones(len(pages), np.float32)))
        together.on_accesses(batch)
        for access in batch:
            apart.on_access(access)
        said, expected = together.predict(0, 50), apart.predict(0, 50)
        assert said.pages.tolist() == expected.pages.tolist()
        assert said.keep.tolist() == expected.keep.tolist()
        if expected.confidence is not None:
            assert said.confidence is not None
            np.testing.assert_allclose(said.confidence, expected.confidence, rtol=1e-3)


def test_attention_guesses_the_same_from_a_shared_history() -> None:
    random = np.random.default_rng(7)
    sharing, apart = Attention(GEOMETRY, SLOTS), Attention(GEOMETRY, SLOTS)
    kept = Cycle(SLOTS, GEOMETRY)
    sharing.share(kept.history)
    for turn in range(40 * GEOMETRY.layers):
        blocks = np.unique(np.concatenate([[0, turn // 30], random.integers(0, 20, 4)]))
        access = access_of(GEOMETRY.page_ids(blocks, turn % GEOMETRY.layers), None)
        hint = PageHint(access.pages, np.ones(len(blocks), np.float32))
        sharing.on_page_hint(hint)
        apart.on_page_hint(hint)
        said, expected = sharing.predict(0, 50), apart.predict(0, 50)
        assert said.pages.tolist() == expected.pages.tolist()
        assert said.confidence is not None
        assert expected.confidence is not None
        assert said.confidence.tolist() == expected.confidence.tolist()
        sharing.on_access(access)
        apart.on_access(access)
        kept.demanded(access.pages, None)


def test_a_page_never_looks_younger_than_it_is() -> None:
    geometry = Geometry(layers=1, blocks=4)
    history, plain = UseHistory(geometry), UseHistory(geometry)
    history.demanded_one(0, np.array([1]))
    often, all_places = np.array([2]), history.places(np.arange(4), 0)
    for _ in range((1 << 16) + 2):
        history.demanded_one(0, often)
    ages = history.turns_since(0, all_places).tolist()
    assert ages[2] == 0
    assert min(ages[0], ages[1], ages[3]) >= 1 << 15
    for _ in range(2000):
        plain.demanded_one(0, often)
    rank = np.zeros(history.columns, np.uint8)
    np.testing.assert_allclose(
        history.chance(0, all_places, rank), plain.chance(0, all_places, rank), rtol=1e-4
    )


def test_who_inherits_a_short_cut_is_still_told_of_every_demand() -> None:
    class Mine(Attention):
        seen = 0

        def on_access(self, access: Access) -> None:
            self.seen += 1
            super().on_access(access)

    mine = Mine(GEOMETRY, SLOTS)
    mine.on_accesses([access_of(np.array([layer]), None) for layer in range(5)])
    assert mine.seen == 5


def test_a_fault_is_told_by_the_hook_that_its_author_wrote() -> None:
    class Single(Predictor):
        def on_access(self, access: Access) -> None:
            raise KeyError(1)

    class Several(Predictor):
        def on_accesses(self, accesses: Sequence[Access]) -> None:
            raise KeyError(2)

    some = [access_of(np.array([layer]), None) for layer in range(2)]
    for kind, hook in ((Single, "on_access"), (Several, "on_accesses")):
        with pytest.raises(PredictorError, match=rf", {hook}: {__file__}, line \d+: KeyError"):
            Guarded(kind(GEOMETRY, SLOTS)).on_accesses(some)
