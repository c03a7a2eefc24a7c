"""auto and requests that come back: what they need is read, whatever else is being weighed."""

from __future__ import annotations

import numpy as np
import pytest

from prefetchd.model import NO_IDS, Access, ChainHint, DoneHint, Geometry, Ids, PageHint
from prefetchd.predictor import Predictor
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


def test_a_hint_for_one_request_does_not_vouch_for_the_chains_of_another() -> None:
    auto = Auto(GEOMETRY, SLOTS)
    for request in range(10, 20):  # teach a chain
        auto.on_done_hint(DoneHint(request, blocks=np.arange(100, 140)))
    for block in (100, 101):
        pages = np.array([2 * block, 2 * block + 1])
        auto.on_access(Access(pages, np.zeros(2, np.uint8), 5))
    auto.on_chain_hint(coming(3, 5))  # never said to be done
    guess = auto.predict(0, 40)
    assert guess.restores
    assert guess.pages.tolist()[:4] == [6, 7, 10, 11]
    assert len(guess.pages) == 4 + 40 // 4, "untried, chains have a quarter of the limit"
    assert guess.confidence is not None
    assert guess.confidence[:4].tolist() == [1] * 4
    assert guess.confidence[4:].max() <= 0.5
    auto._sources[2].gains, auto._sources[2].ended = 0.0, 1e6
    auto.on_access(Access(np.array([204]), np.zeros(1, np.uint8), 5))
    assert auto.predict(0, 40).pages.tolist() == [6, 7, 10, 11], "they have proved useless"


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


@pytest.mark.parametrize("layers", [1, 4])
def test_a_restore_is_never_a_reason_for_silence_and_a_decode_may_be(layers: int) -> None:
    def silent(*, whole_blocks: bool) -> int:
        auto, now_ns, count = Auto(Geometry(layers, 400), 300), 0, 0
        for number in range(2000):
            now_ns += 1_000_000 + 9_000_000 * auto._pace.guessing  # guessing never pays
            block = number // (1 if whole_blocks else layers) % 400
            pages = np.arange(block * layers, (block + 1) * layers)
            pages = pages if whole_blocks else pages[number % layers :][:1]
            auto.on_access(Access(pages, np.zeros(len(pages), np.uint8), 1, None, now_ns))
            count += not auto._pace.guessing
        return count

    assert silent(whole_blocks=True) == 0
    assert (silent(whole_blocks=False) > 0) == (layers > 1)


@pytest.mark.parametrize("why", ["silence", "uselessness"])
def test_a_source_that_follows_chains_is_shown_every_demand(why: str) -> None:
    auto, shown = Auto(GEOMETRY, SLOTS), [0, 0]
    for count, source in enumerate((auto._sources[0], auto._sources[2])):
        source.gains, source.ended = (0.0, 1e6) if why == "uselessness" else (2.0, 4.0)
        source.predictor = Counting(GEOMETRY, SLOTS, shown, count)
    auto._pace.guessing = why != "silence"
    for block in range(64):
        auto.on_access(Access(np.array([2 * block]), np.zeros(1, np.uint8), 1))
    assert shown[0] < 64
    assert shown[1] == 64


class Counting(Predictor):
    def __init__(self, geometry: Geometry, slots: int, shown: list[int], place: int) -> None:
        super().__init__(geometry, slots)
        self.shown, self.place = shown, place

    def on_access(self, access: Access) -> None:
        self.shown[self.place] += 1
