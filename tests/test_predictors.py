"""What every predictor keeps to, whatever it guesses: run over all files in predictors/."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefetchd.model import (
    Access,
    ChainHint,
    DoneHint,
    Feedback,
    Geometry,
    Ids,
    Outcome,
    PageHint,
    Verdict,
)
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors.oracle import Oracle
from prefetchd.predictors.sliding_window import SlidingWindow
from prefetchd.registry import names, predictor_class

GEOMETRY = Geometry(layers=6, blocks=90)
SLOTS = 120
LIMIT = 70


def demands(seed: int, count: int) -> list[Ids]:
    """Layer after layer, sinks, a window that moves on, and a few far blocks."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        frontier = min(20 + number // 12, GEOMETRY.blocks)
        far = random.choice(frontier, 4, replace=False)
        blocks = np.unique(np.concatenate([[0], far, np.arange(frontier - 3, frontier)]))
        found.append(GEOMETRY.page_ids(random.permutation(blocks), number % GEOMETRY.layers))
    return found


def build(name: str) -> Predictor:
    made = predictor_class(name)
    if issubclass(made, Oracle):
        return made(GEOMETRY, SLOTS, future=demands(7, 400))
    return made(GEOMETRY, SLOTS)


def exercise(
    predictor: Predictor, calls: int, between: Callable[[Predictor], Any] = lambda _: None
) -> None:
    """Every hook in a fixed order; `between` runs after each call."""
    random = np.random.default_rng(3)
    for number, pages in enumerate(demands(7, calls)):
        scores = random.random(len(pages)).astype(np.float32)
        ahead = (pages + 1) % GEOMETRY.pages
        predictor.on_page_hint(PageHint(ahead, scores))
        between(predictor)
        if number % 40 == 5:
            blocks = np.arange(number % 11, 60)
            predictor.on_chain_hint(ChainHint(number % 3, blocks, 10**9 * number))
        outcomes = random.integers(0, len(Outcome), len(pages)).astype(np.uint8)
        predictor.on_access(Access(pages, outcomes, number // 25 % 7, scores))
        between(predictor)
        sources = random.integers(0, 3, len(pages)).astype(np.uint8)
        verdicts = random.integers(0, len(Verdict), len(pages)).astype(np.uint8)
        predictor.on_feedback(Feedback(pages, sources, verdicts))
        if number % 60 == 59:
            predictor.on_done_hint(DoneHint(number // 25 % 7))
        between(predictor)


def flat(guess: Guess) -> tuple[Any, ...]:
    optional = (guess.confidence, guess.sources)
    arrays = [None if array is None else array.tolist() for array in optional]
    return guess.pages.tolist(), *arrays, guess.deadline_ns, guess.keep.tolist()


every_predictor = pytest.mark.parametrize("name", names("predictor"))


@every_predictor
def test_guesses_are_ids_in_range_of_the_right_type_and_bounded(name: str) -> None:
    def check(predictor: Predictor) -> None:
        guess = predictor.predict(0, LIMIT)
        for pages in (guess.pages, guess.keep):
            assert pages.dtype == np.int64
            assert pages.ndim == 1
            assert ((pages >= 0) & (pages < GEOMETRY.pages)).all()
        assert len(guess.pages) <= LIMIT
        assert len(guess.keep) <= SLOTS
        if guess.confidence is not None:
            assert guess.confidence.dtype == np.float32
            assert guess.confidence.shape == guess.pages.shape
            assert ((guess.confidence >= 0) & (guess.confidence <= 1)).all()
        if guess.sources is not None:
            assert guess.sources.dtype == np.uint8
            assert guess.sources.shape == guess.pages.shape
        assert len(predictor.predict(0, 0).pages) == 0

    predictor = build(name)
    check(predictor)  # before anything has happened
    exercise(predictor, 200, check)


@every_predictor
def test_to_predict_changes_nothing(name: str) -> None:
    asked, silent = build(name), build(name)

    def ask(predictor: Predictor) -> None:
        first = flat(predictor.predict(5, LIMIT))
        predictor.predict(9, 3)
        assert flat(predictor.predict(5, LIMIT)) == first

    exercise(asked, 200, ask)
    exercise(silent, 200)
    assert flat(asked.predict(5, LIMIT)) == flat(silent.predict(5, LIMIT))


@every_predictor
def test_arrays_of_others_are_never_written_to(name: str) -> None:
    predictor = build(name)
    pages = np.arange(0, 60, 6)
    pages.setflags(write=False)
    scores = np.linspace(0, 1, len(pages), dtype=np.float32)
    codes = np.zeros(len(pages), np.uint8)
    scores.setflags(write=False)
    codes.setflags(write=False)
    predictor.on_page_hint(PageHint(pages, scores))
    predictor.on_chain_hint(ChainHint(1, pages, 100))
    predictor.on_access(Access(pages, codes, 1, scores))
    predictor.on_feedback(Feedback(pages, codes, codes))
    predictor.on_done_hint(DoneHint(1))


@every_predictor
def test_empty_batches_and_unknown_requests_are_harmless(name: str) -> None:
    predictor = build(name)
    none, no_codes = np.empty(0, np.int64), np.empty(0, np.uint8)
    for _ in range(20):
        predictor.on_page_hint(PageHint(none, np.empty(0, np.float32)))
        predictor.on_chain_hint(ChainHint(4, none))
        predictor.on_access(Access(none, no_codes))
        predictor.on_feedback(Feedback(none, no_codes, no_codes))
        predictor.on_done_hint(DoneHint(12345))
        predictor.predict(0, LIMIT)


def footprint(thing: object, seen: set[int]) -> int:
    """Bytes of arrays plus entries of containers that hang on an object."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        return len(thing) + sum(footprint(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple):
        return len(thing) + sum(footprint(value, seen) for value in thing)
    slots = getattr(type(thing), "__slots__", ())
    parts = [getattr(thing, slot) for slot in slots if hasattr(thing, slot)]
    return footprint([*parts, *getattr(thing, "__dict__", {}).values()], seen)


@every_predictor
def test_memory_does_not_grow_with_the_number_of_requests(name: str) -> None:
    def after(requests: int) -> int:
        predictor = build(name)
        for request in range(requests):
            blocks = np.arange(request % 50, request % 50 + 30)
            predictor.on_chain_hint(ChainHint(request, blocks))
            pages = GEOMETRY.page_ids(blocks, request % GEOMETRY.layers)
            predictor.on_access(Access(pages, np.zeros(30, np.uint8), request))
        predictor.predict(0, LIMIT)
        return footprint(predictor, set())

    assert after(400) <= after(200) * 1.02 + 64


def digest(name: str) -> str:
    told = hashlib.sha256()
    predictor = build(name)
    exercise(predictor, 120, lambda one: told.update(repr(flat(one.predict(0, LIMIT))).encode()))
    return told.hexdigest()


def test_guesses_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tests.test_predictors import digest, names\n"
        "print([(name, digest(name)) for name in names('predictor')])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(told) == 1
    assert len(told.pop()) > 100


# --- none, sliding_window and oracle --------------------------------------------------------------


def access(pages: list[int] | Ids, request: int = 0) -> Access:
    return Access(np.array(pages, np.int64), np.zeros(len(pages), np.uint8), request)


def test_none_guesses_nothing() -> None:
    predictor = build("none")
    exercise(predictor, 50)
    guess = predictor.predict(0, LIMIT)
    assert (len(guess.pages), len(guess.keep)) == (0, 0)


def test_window_names_the_next_layer_from_the_frontier_backwards() -> None:
    predictor = SlidingWindow(Geometry(4, 100), 400, window_blocks=3)
    predictor.on_access(access([4 * 50 + 3, 4 * 20 + 3]))  # the last layer: next comes layer 0
    blocks, layers = np.divmod(predictor.predict(0, 8).pages, 4)
    assert blocks.tolist() == [50, 50, 0, 49, 48, 0, 49, 48]  # what was just demanded is likelier
    assert layers.tolist() == [0, 1, 0, 0, 0, 1, 1, 1]  # and of what is as likely, what is sooner
    assert predictor.predict(0, 2).pages.tolist() == [200, 201]


def test_window_is_held_in_every_layer_within_half_of_the_staging() -> None:
    predictor = SlidingWindow(Geometry(4, 100), 48)  # room for 6 blocks: the sink and 5
    predictor.on_access(access([4 * 50]))
    keep = predictor.predict(0, 0).keep
    assert len(keep) == 24
    assert np.unique(keep // 4).tolist() == [0, 46, 47, 48, 49, 50]
    predictor.on_access(access([4 * 90], request=1))
    shared = predictor.predict(0, 0).keep
    assert np.unique(shared // 4).tolist() == [0, 49, 50, 89, 90]
    predictor.on_done_hint(DoneHint(0))
    assert np.unique(predictor.predict(0, 0).keep // 4).tolist() == [0, 86, 87, 88, 89, 90]


def test_window_has_no_room_in_a_staging_of_less_than_two_blocks() -> None:
    predictor = SlidingWindow(Geometry(30, 100), 40)
    predictor.on_access(access([30 * 50]))
    guess = predictor.predict(0, 10)
    assert (len(guess.pages), len(guess.keep)) == (0, 0)


def test_window_takes_the_frontier_from_a_chain_hint_and_learns_chances() -> None:
    predictor = SlidingWindow(Geometry(1, 100), 400, window_blocks=4)
    predictor.on_chain_hint(ChainHint(0, np.arange(60)))
    for _ in range(500):
        predictor.on_access(access([59, 57]))
    guess = predictor.predict(0, 5)
    assert guess.pages.tolist() == [59, 57, 0, 58, 56]
    assert guess.confidence is not None
    assert np.round(guess.confidence, 2).tolist() == [1, 1, 0, 0, 0]


def test_oracle_names_the_coming_demands_each_page_once() -> None:
    future = [np.array(pages) for pages in ([1, 2], [2, 3], [1, 4], [5])]
    predictor = Oracle(Geometry(1, 10), 100, future=future, horizon_demands=3)
    assert predictor.predict(0, 9).pages.tolist() == [1, 2, 3, 4]
    predictor.on_access(access([1, 2]))
    assert predictor.predict(0, 9).pages.tolist() == [2, 3, 1, 4, 5]
    assert predictor.predict(0, 2).pages.tolist() == [2, 3]
    predictor.on_access(access([1, 4]))  # the one before was never shown
    assert predictor.predict(0, 9).pages.tolist() == [5]
    for _ in range(3):
        predictor.on_access(access([5]))
    assert predictor.predict(0, 9).pages.tolist() == []
