"""auto: sources are weighed by what became of their guesses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefetchd.model import Access, Codes, Feedback, Geometry, Ids, Outcome, PageHint, Verdict
from prefetchd.predictors.attention import Attention
from prefetchd.predictors.auto import PROBE_ACCESSES, Auto
from prefetchd.registry import RegistryError

GEOMETRY = Geometry(layers=20, blocks=50)
SLOTS = 300

FIXED = """
import numpy as np
from prefetchd.predictor import Guess, Predictor

class Fixed(Predictor):
    told = ()
    def on_feedback(self, feedback):
        self.told = (feedback.pages.tolist(), feedback.sources.tolist())
    def predict(self, now_ns, limit):
        pages = np.array({pages})[:limit]
        return Guess(
            pages, np.full(len(pages), {sure}, np.float32), {deadline},
            np.full(len(pages), {code}, np.uint8), np.array({keep}, np.int64),
        )
"""


def fixed(
    folder: Path,
    name: str,
    pages: list[int],
    sure: float = 1,
    *,
    code: int = 0,
    deadline: int | None = None,
    keep: tuple[int, ...] = (),
) -> str:
    """The file of a predictor that always guesses the same."""
    path = folder / f"{name}.py"
    path.write_text(
        FIXED.format(pages=pages, sure=sure, code=code, deadline=deadline, keep=list(keep))
    )
    return str(path)


def feed(auto: Auto, source: int, verdict: Verdict, count: int) -> None:
    """Prefetches of a source end; the good ones spare a miss, as their pages are new each time."""
    for _ in range(count):
        page = np.array([auto._accesses % GEOMETRY.pages])
        auto.on_feedback(
            Feedback(page, np.array([source], np.uint8), np.array([verdict], np.uint8))
        )
        if verdict != Verdict.WASTED:
            auto.on_access(met(page, Outcome.LATE if verdict == Verdict.LATE else Outcome.TIMELY))


def met(pages: Ids | list[int] | range, outcome: Outcome = Outcome.RETAINED) -> Access:
    return Access(np.array(pages, np.int64), np.full(len(pages), outcome, np.uint8))


def test_guesses_are_merged_best_first_each_once_with_their_source(tmp_path: Path) -> None:
    sure = fixed(tmp_path, "sure", [5, 6, 7], 0.9)
    unsure = fixed(tmp_path, "unsure", [8, 6, 9], 0.3, code=2)
    auto = Auto(GEOMETRY, SLOTS, sources=[unsure, sure])
    guess = auto.predict(0, 100)
    assert guess.sources is not None
    assert guess.pages.tolist() == [5, 6, 7, 8, 9]
    assert (guess.sources % 16).tolist() == [1, 1, 1, 0, 0]
    assert (guess.sources // 16).tolist() == [0, 0, 0, 2, 2]


def test_measured_precision_outweighs_claimed_confidence(tmp_path: Path) -> None:
    boaster = fixed(tmp_path, "boaster", list(range(10)), 1.0)
    modest = fixed(tmp_path, "modest", [21, 22, 23, 24], 0.9)
    auto = Auto(GEOMETRY, SLOTS, sources=[boaster, modest])
    for _ in range(40):  # the one is right four times in five, the other always
        feed(auto, 0, Verdict.WASTED, 1)
        feed(auto, 0, Verdict.USEFUL, 4)
        feed(auto, 1, Verdict.USEFUL, 2)
        feed(auto, 1, Verdict.LATE, 1)
    assert auto.predict(0, 10).pages.tolist() == [21, 22, 23, 24, 0, 1, 2, 3, 4, 5]
    assert len(auto.predict(0, 5).pages) == 5


def test_a_source_far_behind_the_main_one_is_left_out(tmp_path: Path) -> None:
    good = fixed(tmp_path, "good", [1, 2, 3])
    poor = fixed(tmp_path, "poor", [21, 22, 23])
    auto = Auto(GEOMETRY, SLOTS, sources=[good, poor])
    feed(auto, 1, Verdict.USEFUL, 40)
    feed(auto, 1, Verdict.WASTED, 60)
    assert auto.predict(0, 10).pages.tolist() == [1, 2, 21, 22, 23]
    feed(auto, 0, Verdict.USEFUL, 41)
    assert auto.predict(0, 10).pages.tolist() == [1, 2, 3]


def test_a_few_safe_pages_do_not_push_out_the_source_that_gains_most(tmp_path: Path) -> None:
    broad = fixed(tmp_path, "broad", [1, 2, 3])
    safe = fixed(tmp_path, "safe", [21, 22, 23])
    auto = Auto(GEOMETRY, SLOTS, sources=[broad, safe])
    for _ in range(40):
        feed(auto, 0, Verdict.USEFUL, 3)
        feed(auto, 0, Verdict.WASTED, 6)
        feed(auto, 1, Verdict.USEFUL, 1)
    assert auto.predict(0, 10).pages.tolist() == [21, 22, 23, 1, 2, 3]


def test_a_page_that_would_have_stayed_without_prefetch_is_no_gain(tmp_path: Path) -> None:
    def precision(*, verdict_first: bool, new_pages: bool) -> float:
        auto = Auto(GEOMETRY, SLOTS, sources=[fixed(tmp_path, "one", [1])])
        auto.on_access(met(range(100), Outcome.MISS))
        for number in range(100):
            page = np.array([number + 100 * new_pages])
            verdict = Feedback(page, np.zeros(1, np.uint8), np.zeros(1, np.uint8))
            if verdict_first:
                auto.on_feedback(verdict)
            auto.on_access(met(page, Outcome.TIMELY))
            if not verdict_first:
                auto.on_feedback(verdict)
        return auto._sources[0].precision

    for verdict_first in (True, False):
        assert precision(verdict_first=verdict_first, new_pages=True) > 0.95
        assert precision(verdict_first=verdict_first, new_pages=False) < 0.05


def test_an_untried_source_gets_a_quarter_of_the_limit(tmp_path: Path) -> None:
    auto = Auto(GEOMETRY, SLOTS, sources=[fixed(tmp_path, "new", list(range(100)))])
    assert len(auto.predict(0, 40).pages) == 10
    feed(auto, 0, Verdict.USEFUL, 50)
    assert len(auto.predict(0, 40).pages) == 40


def test_a_useless_source_is_left_a_rare_probe_and_recovers_by_it(tmp_path: Path) -> None:
    auto = Auto(GEOMETRY, SLOTS, sources=[fixed(tmp_path, "bad", list(range(100)))])
    feed(auto, 0, Verdict.WASTED, 500)
    counts = []
    for _ in range(2 * PROBE_ACCESSES):
        auto.on_access(met([1]))
        counts.append(len(auto.predict(0, 40).pages))
    assert sum(counts) == 2
    feed(auto, 0, Verdict.USEFUL, 60)
    assert len(auto.predict(0, 40).pages) == 40


def test_feedback_reaches_the_source_it_is_about(tmp_path: Path) -> None:
    files = [fixed(tmp_path, name, [1]) for name in ("one", "two")]
    auto = Auto(GEOMETRY, SLOTS, sources=files)
    codes: Codes = np.array([1, 0, 1 + 16 * 3, 15], np.uint8)
    auto.on_feedback(Feedback(np.array([10, 11, 12, 13]), codes, np.zeros(4, np.uint8)))
    told = [vars(source.predictor)["told"] for source in auto._sources]
    assert told == [([11], [0]), ([10, 12], [0, 3])]


def test_a_deadline_is_passed_on_only_if_it_holds_for_all(tmp_path: Path) -> None:
    soon = fixed(tmp_path, "soon", [1], deadline=700)
    later = fixed(tmp_path, "later", [2], deadline=900)
    whenever = fixed(tmp_path, "whenever", [3])
    assert Auto(GEOMETRY, SLOTS, sources=[later, soon]).predict(0, 9).deadline_ns == 700
    assert Auto(GEOMETRY, SLOTS, sources=[soon, whenever]).predict(0, 9).deadline_ns is None


def test_a_source_that_does_not_exist_is_named() -> None:
    with pytest.raises(RegistryError, match="attentoin"):
        Auto(GEOMETRY, SLOTS, sources=["attentoin"])
    with pytest.raises(ValueError, match="1 to 16"):
        Auto(GEOMETRY, SLOTS, sources=[])


def test_however_long_all_guesses_are_useless_there_is_a_rare_probe_and_a_way_back() -> None:
    auto, attention = Auto(GEOMETRY, SLOTS), Attention(GEOMETRY, SLOTS)
    many = np.arange(1000)
    hint = PageHint(np.array([5, 25]), np.ones(2, np.float32))
    for predictor, sources in (auto, range(3)), (attention, range(1)):
        for source in [*sources] * 500:  # by then the shares have come to nothing
            codes = np.full(len(many), source, np.uint8)
            wasted = np.full(len(many), Verdict.WASTED, np.uint8)
            predictor.on_feedback(Feedback(many, codes, wasted))
        predictor.on_page_hint(hint)
        assert len(predictor.predict(0, 40).pages) <= 2
    attention.on_feedback(Feedback(many[:100], *np.zeros((2, 100), np.uint8)))
    fresh = Attention(GEOMETRY, SLOTS)
    fresh.on_page_hint(hint)
    again, at_first = attention.predict(0, 40).confidence, fresh.predict(0, 40).confidence
    assert again is not None
    assert at_first is not None
    assert again.tolist() == at_first.tolist()
