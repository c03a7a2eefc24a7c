"""auto and requests that come back: what they need is read, whatever else is being weighed."""

from __future__ import annotations

import numpy as np

from prefetchd.model import NO_IDS, ChainHint, DoneHint, Geometry, Ids, PageHint
from prefetchd.predictors.auto import Auto

GEOMETRY = Geometry(layers=2, blocks=200)
SLOTS = 80


def coming(*blocks: int, request: int = 1) -> ChainHint:
    return ChainHint(request, np.array(blocks, np.int64), None)


def guessed(auto: Auto) -> Ids:
    return np.sort(auto.predict(0, 100).pages)


def test_all_that_a_returning_request_needs_is_guessed_even_while_auto_is_silent() -> None:
    auto = Auto(GEOMETRY, SLOTS)
    auto._pace.guessing = False  # silence, to compare times with
    assert guessed(auto).tolist() == []
    auto.on_chain_hint(coming(3, 5, 8))
    guess = auto.predict(0, 100)
    assert guess.restores
    assert np.sort(guess.pages).tolist() == [6, 7, 10, 11, 16, 17]
    auto.on_done_hint(DoneHint(1))
    assert guessed(auto).tolist() == []


def test_a_request_that_would_fill_the_staging_is_weighed_like_any_other_guess() -> None:
    auto = Auto(GEOMETRY, SLOTS)
    auto.on_chain_hint(coming(*range(SLOTS // 4 + 1)))
    assert not auto.predict(0, 100).restores
    auto.on_chain_hint(coming(*range(SLOTS // 4)))
    assert auto.predict(0, 100).restores


def test_page_hints_say_that_a_decode_goes_on() -> None:
    auto = Auto(GEOMETRY, SLOTS)
    auto.on_chain_hint(coming(3, 5))
    auto.on_page_hint(PageHint(np.array([40], np.int64), np.ones(1, np.float32)))
    assert not auto.predict(0, 100).restores


def test_a_done_hint_for_nobody_and_an_empty_chain_change_nothing() -> None:
    auto = Auto(GEOMETRY, SLOTS)
    auto.on_done_hint(DoneHint(9))
    auto.on_chain_hint(ChainHint(1, NO_IDS, None))
    assert not auto._restores.any
