"""The attention predictor: hints by rank, silence without them and where they prove useless."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.model import NO_IDS, Access, Feedback, Geometry, Ids, Outcome, PageHint, Verdict
from prefetchd.predictor import Guess
from prefetchd.predictors.attention import Attention

GEOMETRY = Geometry(layers=4, blocks=200)
LIMIT = 1024


def access(blocks: list[int], layer: int) -> Access:
    pages = GEOMETRY.page_ids(np.array(blocks, np.int64), layer)
    return Access(pages, np.full(len(pages), Outcome.RETAINED, np.uint8))


def hint(blocks: list[int], layer: int) -> PageHint:
    """Blocks of one layer, the most important first."""
    pages = GEOMETRY.page_ids(np.array(blocks, np.int64), layer)
    return PageHint(pages, np.arange(len(blocks), 0, -1, dtype=np.float32))


def warm(steps: int = 12) -> Attention:
    """Every layer wants blocks 0 to 3 at every step, and 10 + step once."""
    predictor = Attention(GEOMETRY, 100)
    for step in range(steps):
        for layer in range(GEOMETRY.layers):
            predictor.on_access(access([0, 1, 2, 3, 10 + step], layer))
    return predictor


def verdicts(pages: Ids, source: int, verdict: Verdict) -> Feedback:
    count = len(pages)
    return Feedback(pages, np.full(count, source, np.uint8), np.full(count, verdict, np.uint8))


def confidence(guess: Guess) -> list[float]:
    assert guess.confidence is not None
    return [float(chance) for chance in guess.confidence]


def blocks_of(pages: Ids) -> list[int]:
    found: list[int] = GEOMETRY.block_of(pages).tolist()
    return found


def test_nothing_known_nothing_said() -> None:
    predictor = Attention(GEOMETRY, 100)
    assert len(predictor.predict(0, LIMIT).pages) == 0
    predictor.on_access(Access(NO_IDS, np.empty(0, np.uint8)))
    predictor.on_page_hint(PageHint(NO_IDS, np.empty(0, np.float32)))
    assert len(predictor.predict(0, LIMIT).pages) == 0


def test_hinted_pages_come_in_the_order_of_their_scores() -> None:
    predictor = Attention(GEOMETRY, 100)
    predictor.on_page_hint(hint([90, 40, 70, 55], 0))
    guess = predictor.predict(0, LIMIT)
    assert blocks_of(guess.pages) == [90, 40, 70, 55]
    assert confidence(guess) == sorted(confidence(guess), reverse=True)


def test_a_hint_holds_until_its_layers_turn() -> None:
    predictor = warm()
    predictor.on_page_hint(hint([90, 91], 1))
    predictor.on_access(access([0, 1, 2, 3, 50], 0))
    assert {90, 91} <= set(blocks_of(predictor.predict(0, LIMIT).pages))
    predictor.on_access(access([0, 1, 2, 3, 90], 1))
    assert not {90, 91} & set(blocks_of(predictor.predict(0, LIMIT).pages))


def test_without_a_hint_nothing_is_said() -> None:
    """What was used before is held by the eviction policy; to read it again costs more bytes than
    it spares misses."""
    assert len(warm().predict(0, LIMIT).pages) == 0


def test_hints_that_prove_wrong_lose_their_confidence() -> None:
    predictor = warm()
    before = after = 0.0
    for step in range(60):
        for layer in range(4):
            predictor.on_page_hint(hint([100 + step, 120 + step, 140], layer))
            guess = predictor.predict(0, LIMIT)
            after = max(confidence(guess), default=0.0)
            before = before or after
            predictor.on_feedback(verdicts(guess.pages, 0, Verdict.WASTED))
            predictor.on_access(access([0, 1, 2, 3], layer))
    assert before > 0.3
    assert after < 0.1


def test_guesses_are_bounded_by_the_limit_and_by_what_exists() -> None:
    predictor = warm()
    assert len(predictor.predict(0, 3).pages) <= 3
    predictor.on_page_hint(PageHint(np.array([4, 8], np.int64), np.ones(2, np.float32)))
    guess = predictor.predict(0, LIMIT)
    assert sorted(guess.pages.tolist()) == [4, 8]
    assert len(predictor.predict(0, 1).pages) == 1
    assert len(predictor.predict(0, 0).pages) == 0


step_lists = st.lists(
    st.tuples(
        st.sampled_from(["access", "hint", "useful", "wasted"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 199), max_size=8, unique=True),
    ),
    max_size=30,
)


def feed(predictor: Attention, kind: str, layer: int, blocks: list[int]) -> None:
    if kind == "access":
        predictor.on_access(access(blocks, layer))
    elif kind == "hint":
        predictor.on_page_hint(hint(blocks, layer))
    else:
        verdict = Verdict.USEFUL if kind == "useful" else Verdict.WASTED
        predictor.on_feedback(verdicts(access(blocks, layer).pages, 0, verdict))


@given(step_lists)
@settings(max_examples=60, deadline=None)
def test_same_calls_give_same_guesses_and_asking_changes_nothing(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    often, once = Attention(GEOMETRY, 100), Attention(GEOMETRY, 100)
    for step in steps:
        feed(often, *step)
        feed(once, *step)
        often.predict(0, LIMIT)
        guess = often.predict(0, LIMIT)
        inside = (guess.pages >= 0) & (guess.pages < GEOMETRY.pages)
        assert inside.all()
        assert len(np.unique(guess.pages)) == len(guess.pages)
    first, second = often.predict(0, LIMIT), once.predict(0, LIMIT)
    assert first.pages.tolist() == second.pages.tolist()
    if first.confidence is not None:
        assert confidence(first) == confidence(second)
