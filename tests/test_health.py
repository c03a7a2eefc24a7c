"""When a path is given up and when it is tried again, for any order of what can happen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.health import Health, State

SECOND_NS = 10**9


def test_a_few_bad_sectors_are_not_held_against_a_path() -> None:
    health = Health()
    for _ in range(1000):
        assert not health.failed(1, 0)
        health.succeeded(10)
    assert (health.state, health.errors) == (State.HEALTHY, 1000)


@pytest.mark.parametrize(("share", "given_up"), [(0.1, False), (0.5, True), (1.0, True)])
def test_a_path_that_loses_much_is_given_up(share: float, given_up: bool) -> None:
    health, random = Health(), np.random.default_rng(1)
    ended = False
    for _ in range(2000):
        if random.random() < share:
            ended |= health.failed(1, 0)
        else:
            health.succeeded(1)
    assert ended == given_up
    assert (health.state == State.FAILED) == given_up


def test_a_path_comes_back_on_probation_and_each_relapse_lasts_longer() -> None:
    health, now_ns = Health(), 0
    pauses = []
    for _ in range(5):
        health.failed(8, now_ns)
        assert health.is_due(10**18)
        start_ns = now_ns
        while not health.is_due(now_ns):
            now_ns += SECOND_NS
        pauses.append((now_ns - start_ns) // SECOND_NS)
        assert not health.probed(well=True, now_ns=now_ns)
        assert not health.probed(well=True, now_ns=now_ns)
        assert health.probed(well=True, now_ns=now_ns)
        assert health.state == State.SUSPECT
    assert pauses == [1, 2, 4, 8, 16]
    assert health.failed(1, now_ns), "one failure on probation is enough"


def test_a_path_that_was_never_there_is_never_tried() -> None:
    health = Health()
    health.lost()
    assert not health.is_due(10**18)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("failed"), st.integers(1, 9)),
        st.tuples(st.just("succeeded"), st.integers(1, 50)),
        st.tuples(st.just("probed"), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 600)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_only_failures_give_up_and_only_probes_bring_back(
    steps: list[tuple[str, int | bool]],
) -> None:
    health, now_ns, errors = Health(), 0, 0
    for what, value in steps:
        before = health.state
        if what == "failed":
            turned = health.failed(int(value), now_ns)
            errors += int(value)
            assert turned == (before != State.FAILED and health.state == State.FAILED)
        elif what == "succeeded":
            health.succeeded(int(value))
            assert (before == State.FAILED) == (health.state == State.FAILED)
        elif what == "probed":
            back = health.probed(well=bool(value), now_ns=now_ns)
            errors += before == State.FAILED and not value
            assert back == (before == State.FAILED and health.state == State.SUSPECT)
            assert not back or value
        else:
            now_ns += int(value) * SECOND_NS
            assert health.is_due(now_ns) <= (health.state == State.FAILED)
    assert health.errors == errors
    if health.state == State.FAILED:
        assert health.is_due(now_ns + 600 * SECOND_NS), "nothing is given up for good"
