"""auto's pace: passes with and without guessing are compared by their durations."""

from __future__ import annotations

import pytest

from prefetchd.predictors._pace import START_PASSES, STAY_PASSES_MIN, TRIAL_PASSES, Pace


def passes(pace: Pace, count: int, with_ns: int, without_ns: int) -> list[bool]:
    """Let passes of two kinds take their times; which kind each was."""
    kinds, now_ns = [], pace._since_ns
    for _ in range(count):
        kinds.append(pace.guessing)
        now_ns += with_ns if pace.guessing else without_ns
        pace.passed(now_ns)
    return kinds


def test_both_kinds_are_tried_at_the_start() -> None:
    kinds = passes(Pace(), START_PASSES + 4 * TRIAL_PASSES, 100, 100)[START_PASSES:]
    assert kinds.count(True) >= TRIAL_PASSES
    assert kinds.count(False) >= TRIAL_PASSES


@pytest.mark.parametrize(("with_ns", "without_ns"), [(90, 100), (110, 100)])
def test_the_quicker_kind_gets_nearly_all_passes(with_ns: int, without_ns: int) -> None:
    late = passes(Pace(), 600, with_ns, without_ns)[100:]
    quicker = with_ns < without_ns
    assert late.count(quicker) > 0.9 * len(late)
    assert (not quicker) in late, "the other is tried again now and then"


def test_it_changes_its_mind_when_times_change() -> None:
    pace = Pace()
    assert passes(pace, 200, 120, 100)[-STAY_PASSES_MIN:].count(False) > STAY_PASSES_MIN / 2
    late = passes(pace, 400, 80, 100)[200:]
    assert late.count(True) > 0.9 * len(late)


def test_one_long_pass_does_not_decide() -> None:
    pace = Pace()
    passes(pace, 200, 90, 100)
    kinds = [*passes(pace, 1, 10_000, 10_000), *passes(pace, 100, 90, 100)]
    assert kinds.count(True) > 0.8 * len(kinds)


def test_without_times_it_goes_on_guessing() -> None:
    pace = Pace()
    for _ in range(100):
        pace.passed(0)
    assert pace.guessing
