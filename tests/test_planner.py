"""The planner: which guesses are worth fetching, measured on a device of known speed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.model import Feedback, Ids, Verdict
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.predictor import Guess, in_range

BASE_NS, SERVICE_NS = 80_000, 10_000
PAGES = 2_000
EMPTY = np.full(PAGES, -1, np.int32)


def measured(burst_pages: int = 16, depths: tuple[int, ...] = (1, 4, 8, 2, 6)) -> Planner:
    """A planner that has seen reads of a device with a base latency and a time per page."""
    planner = Planner(PlannerLimits(burst_pages=burst_pages))
    planner.advance(0)
    for depth in depths * 4:
        ahead = np.arange(1, depth + 1, dtype=np.int32)
        planner.observe_reads(ahead, BASE_NS + ahead.astype(np.int64) * SERVICE_NS)
    return planner


def plan(planner: Planner, guessed: object, now_ns: int = 10**9, **rest: object) -> list[int]:
    guess = Guess(np.array(guessed, np.int64), **rest)  # type: ignore[arg-type]
    pages: list[int] = planner.plan(guess, EMPTY, now_ns).pages.tolist()
    return pages


@pytest.mark.parametrize(("left_ns", "pages"), [(-5, 1), (0, 1), (130_000, 5), (10**9, 16)])
def test_no_more_is_read_than_can_come_before_the_deadline(left_ns: int, pages: int) -> None:
    planner = measured()
    planner.observe_lead(100_000)  # what hints give otherwise: two pages
    now_ns = 10**9
    assert len(plan(planner, range(50), now_ns)) == 2
    planner.advance(2 * now_ns)
    assert len(plan(planner, range(50), 2 * now_ns, deadline_ns=2 * now_ns + left_ns)) == pages


# --- the filter ---


@given(st.lists(st.integers(-5, 60), min_size=1, max_size=80), st.sets(st.integers(0, 49)))
def test_absent_pages_in_range_are_chosen_once_in_order(
    guessed: list[int], resident: set[int]
) -> None:
    slot_of = np.full(50, -1, np.int32)
    slot_of[sorted(resident)] = 3
    planner = Planner(PlannerLimits(burst_pages=1000))
    good = [page for page in guessed if 0 <= page < 50 and page not in resident]
    chosen = planner.plan(in_range(Guess(np.array(guessed, np.int64)), 50), slot_of, 0)
    assert chosen.pages.tolist() == list(dict.fromkeys(good))
    again = planner.plan(in_range(Guess(np.array(guessed[::-1], np.int64)), 50), slot_of, 0)
    assert again.pages.tolist() == list(dict.fromkeys(good[::-1])), "nothing is left of the last"


def test_a_page_keeps_its_source_and_its_confidence() -> None:
    pages = np.array([7, -1, 9, 7, 11], np.int64)
    confidence = np.array([0.9, 0.8, 0.7, 0.6, 0.5], np.float32)
    guess = Guess(
        pages,
        confidence=confidence,
        sources=np.array([1, 2, 3, 4, 5], np.uint8),
    )
    chosen = Planner(PlannerLimits()).plan(in_range(guess, PAGES), EMPTY, 0)
    assert chosen.pages.tolist() == [7, 9, 11]
    assert chosen.sources.tolist() == [1, 3, 5]
    assert chosen.confidence.tolist() == confidence[[0, 2, 4]].tolist()


def test_a_thousand_candidates_are_filtered_and_cut_to_the_best() -> None:
    random = np.random.default_rng(1)
    guessed = random.permutation(PAGES)[:1000]
    slot_of = EMPTY.copy()
    slot_of[guessed[::2]] = 1
    planner = measured()
    chosen = planner.plan(Guess(guessed), slot_of, 10**9)
    assert chosen.pages.tolist() == guessed[1::2][: planner.limits.burst_pages].tolist()


def test_nothing_guessed_is_nothing_planned() -> None:
    assert plan(measured(), []) == []


# --- the budget ---


def test_device_times_are_those_of_the_device() -> None:
    assert Planner(PlannerLimits()).device_times_ns() == (0, 0)
    assert measured().device_times_ns() == pytest.approx((BASE_NS, SERVICE_NS), rel=1e-6)
    base, service = measured(depths=(1,)).device_times_ns()
    assert service == 0, "one depth only"
    assert base == pytest.approx(BASE_NS + SERVICE_NS)


def test_a_plan_is_no_larger_than_what_arrives_within_the_lead() -> None:
    planner = measured()
    assert len(plan(planner, range(100))) == 16
    planner.observe_lead(BASE_NS + 5 * SERVICE_NS)
    assert len(plan(planner, range(100), 2 * 10**9)) == 5
    hurried = measured()
    hurried.observe_lead(BASE_NS // 2)
    assert len(plan(hurried, range(100))) == 1, "a late prefetch still comes before a miss would"


def test_when_demand_alone_fills_the_device_prefetch_is_shed() -> None:
    planner = measured()
    now_ns, budgets = 0, []
    for _ in range(20):  # demand takes all the time there is, and a little more
        now_ns += 10 * SERVICE_NS
        planner.advance(now_ns)
        budgets.append(planner.budget())
        planner.spend(12)
    assert budgets[-1] <= 1
    assert budgets == sorted(budgets, reverse=True)


def test_the_allowance_comes_back_with_the_clock_but_is_not_hoarded() -> None:
    planner = measured()
    planner.advance(10**9)
    planner.spend(1000)
    planner.advance(10**9)
    assert planner.budget() <= 1
    planner.advance(10**9 + 25 * SERVICE_NS)
    assert 1 < planner.budget() <= 16
    planner.advance(10**12)
    assert planner.budget() == 16
    planner.spend(17)
    planner.advance(10**12)
    assert planner.budget() <= 1, "an hour of idling buys one burst"


# --- feedback ---


def tell(planner: Planner, source: int, verdict: Verdict, count: int) -> None:
    for start in range(0, count, 16):  # as many are told at a time
        pages = np.arange(start, min(count, start + 16))
        codes, verdicts = np.full((2, len(pages)), [[source], [verdict]], np.uint8)
        planner.observe_feedback(Feedback(pages, codes, verdicts))


def two_sources(planner: Planner, now_ns: int) -> tuple[Ids, Ids]:
    pages = np.arange(6)
    sources = np.array([1, 2] * 3, np.uint8)
    chosen = planner.plan(Guess(pages, sources=sources), EMPTY, now_ns).pages
    return chosen[chosen % 2 == 0], chosen[chosen % 2 == 1]


def test_a_useless_source_is_cut_to_a_probe_now_and_then() -> None:
    planner = Planner(PlannerLimits())
    tell(planner, 1, Verdict.USEFUL, 50)
    tell(planner, 2, Verdict.WASTED, 640)
    assert planner.precision()[2] < planner.limits.precision_floor < planner.precision()[1]
    rounds = [two_sources(planner, now_ns) for now_ns in range(64)]
    assert all(good.tolist() == [0, 2, 4] for good, _ in rounds)
    probes = [bad.tolist() for _, bad in rounds if len(bad)]
    assert probes == [[1]] * 4, "one page in sixteen plans, so that it can prove itself again"


def test_a_source_that_proves_itself_is_heard_again() -> None:
    planner = Planner(PlannerLimits())
    tell(planner, 2, Verdict.WASTED, 640)
    for _ in range(60):
        tell(planner, 2, Verdict.LATE, 2)
    assert two_sources(planner, 0)[1].tolist() == [1, 3, 5], "late is wanted, too"


def test_sources_are_judged_apart_and_optimistically_at_first() -> None:
    planner = Planner(PlannerLimits())
    assert (planner.precision() == 1).all()
    tell(planner, 255, Verdict.WASTED, 40)
    precision = planner.precision()
    assert precision[255] < 0.2
    assert (precision[:255] == 1).all()
