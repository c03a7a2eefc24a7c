"""What `none`, `sliding_window` and `oracle` guess; what all keep to is in test_check_predictor."""

from __future__ import annotations

import numpy as np

from prefetchd.model import (
    Access,
    ChainHint,
    DoneHint,
    Geometry,
    Ids,
)
from prefetchd.predictors.none import NoPrefetch
from prefetchd.predictors.oracle import Oracle
from prefetchd.predictors.sliding_window import SlidingWindow


def access(pages: list[int] | Ids, request: int = 0) -> Access:
    return Access(np.array(pages, np.int64), np.zeros(len(pages), np.uint8), request)


def test_none_guesses_nothing() -> None:
    predictor = NoPrefetch(Geometry(1, 10), 4)
    predictor.on_access(access([1, 2]))
    guess = predictor.predict(0, 9)
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
