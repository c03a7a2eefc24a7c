"""The bound on late pages: never above what a search of all schedules finds, and near it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.lab.belady import belady_misses
from prefetchd.lab.bounds import fewest_late

Contents = frozenset[int]


def subsets(pages: Contents, most: int) -> list[Contents]:
    sizes = range(min(most, len(pages)) + 1)
    return [frozenset(some) for size in sizes for some in combinations(sorted(pages), size)]


def best_schedule(demands: list[list[int]], times: list[int], slots: int, put: bool) -> int:
    """The fewest late pages there can be, by trying everything: one read a tick, and a late page is
    there right after its demand, as if read at no cost."""
    states: dict[Contents, int] = {frozenset(): 0}
    seen: set[int] = set()
    for tick in range(times[0], times[-1] + 1):
        for demand in [d for d, at in zip(demands, times, strict=True) if at == tick]:
            new = {page for page in demand if put and page not in seen}
            asked = frozenset(demand) - new
            after: dict[Contents, int] = {}
            for here, late in states.items():
                total = late + len(asked - here)
                for others in subsets(here - asked, slots - len(asked)):
                    for brought in subsets(frozenset(new), slots - len(asked) - len(others)):
                        held = others | brought | asked
                        after[held] = min(after.get(held, total), total)
            states = after
            seen |= set(demand)
        due = [at for at in times if at > tick]
        known = {p for d, at in zip(demands, times, strict=True) if at in due for p in d}
        after = dict(states)
        for here, late in states.items():
            for page in known - here - ({*()} if not put else known - seen):
                for others in subsets(here, slots - 1):
                    held = others | {page}
                    after[held] = min(after.get(held, late), late)
        states = after
    return min(states.values())


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    pages = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True)
    demands = draw(st.lists(pages, min_size=1, max_size=7))
    gaps = [draw(st.integers(0, 2)) for _ in demands]
    return demands, np.cumsum(gaps).tolist()


@given(cases(), st.integers(2, 3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_schedule_has_fewer(
    case: tuple[list[list[int]], list[int]], slots: int, put: bool
) -> None:
    demands, times = case
    arrays = [np.array(demand, np.int64) for demand in demands]
    bound = fewest_late(arrays, np.array(times) * 10, slots, 10.0, first_is_put=put)
    assert bound <= best_schedule(demands, times, slots, put)


def test_it_is_reached_where_only_bandwidth_lacks() -> None:
    demands = [np.arange(8) + 8 * number for number in range(4)]
    times = np.arange(4) * 50  # five reads' time for eight pages
    assert fewest_late(demands, times, 100, 10.0) == 17


def test_without_time_to_read_it_is_belady_and_with_room_for_all_nothing() -> None:
    random = np.random.default_rng(3)
    pages = random.integers(0, 60, 3000)
    times = np.sort(random.integers(0, 10**6, 3000))
    for put in (False, True):
        missed = int(belady_misses(pages, 20, first_is_put=put).sum())
        late = fewest_late(pages, times, 20, 1e12, first_is_put=put)
        assert late == missed > 0
    assert fewest_late(pages, times, 60, 1e12, first_is_put=True) == 0


def test_more_bandwidth_or_more_slots_never_hurt() -> None:
    random = np.random.default_rng(4)
    pages = random.zipf(1.3, 4000) % 500
    times = np.sort(random.integers(0, 400_000, 4000))

    def late(slots: int = 40, page_ns: float = 800.0) -> int:
        return fewest_late(pages, times, slots, page_ns)

    assert late() > late(slots=80) > 0
    assert late() > late(page_ns=600.0)


def test_times_that_fall_are_refused() -> None:
    with pytest.raises(ValueError, match="times fall at demand 2"):
        fewest_late(np.arange(3), np.array([0, 5, 4]), 4, 1.0)
