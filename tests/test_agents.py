"""Sessions laid side by side: when each begins, what is live, and blocks taken together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefetchd.lab.agents import coarser, interleaved, live_contexts
from tests.test_simulate_restore import traffic

SECOND = 1_000_000_000


def test_sessions_begin_apart_and_then_as_others_end() -> None:
    load = replace(
        traffic((0, [0]), (9, [0, 1]), (30, [2]), (33, [2, 3]), (60, [4]), (62, [4, 5])),
        session=np.array([0, 0, 1, 1, 2, 2]),
        stops=tuple("abcdef"),
    )
    # The first lasts until 9 s, the second from 2 to 5 s; the third begins at 5 s.
    both = interleaved(load, 2, gap_s=2)
    assert (both.arrival_ns / SECOND).tolist() == [0, 2, 5, 5, 7, 9]
    assert both.stops == ("a", "c", "d", "e", "f", "b")
    assert [both.chain(n).tolist() for n in range(6)] == [[0], [1], [1, 2], [3], [3, 4], [0, 5]]
    assert live_contexts(both).tolist() == [1, 2, 3, 2, 3, 2]
    assert len(interleaved(load, 2, limit=3)) == 3
    with pytest.raises(ValueError, match="3 sessions cannot be 4"):
        interleaved(load, 4)


def test_a_long_block_is_told_by_its_last_short_one() -> None:
    load = coarser(traffic((0, range(5)), (1, [0]), (2, [0, 1, 2, 5, 6])), 2)
    assert [load.chain(n).tolist() for n in range(2)] == [[0, 1], [0, 2]]
    assert load.arrival_ns.tolist() == [0, 2 * SECOND]
