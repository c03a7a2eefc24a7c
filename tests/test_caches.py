"""Hit rates: ours are libCacheSim's, use by use, and no policy falls behind LRU in restore.

PREFETCHD_CACHES_TRACE=path checks another request trace at the sizes that are published for it;
the conversation trace takes some minutes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import libcachesim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prefetchd.data
from prefetchd.eviction import EVICTIONS
from prefetchd.lab.belady import NEVER, belady_misses, next_uses
from prefetchd.lab.caches import BlockCache, restore_hits, single_hits
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.model import Ids, Mask
from prefetchd.policy import smallest

TRACE = os.environ.get("PREFETCHD_CACHES_TRACE", "")
SIZES = [1000, 2000, 5000, 10_000, 20_000] if TRACE else [30, 300, 1000]


@cache
def requests() -> Requests:
    demo = Path(prefetchd.data.__file__).parent / "conversation_demo.jsonl.gz"
    return read_requests(Path(TRACE)) if TRACE else read_requests(demo, limit=300)


def their_hits(policy: str, blocks: Ids, slots: int) -> Mask:
    peer = getattr(libcachesim, policy)(cache_size=slots, hashpower=16)
    ask, found = libcachesim.Request(), np.zeros(len(blocks), np.bool_)
    ask.obj_size = 1
    due = np.minimum(next_uses(blocks), 2**62).tolist()
    for use, block in enumerate(blocks.tolist()):
        ask.obj_id, ask.clock_time, ask.next_access_vtime = block + 1, use, due[use]
        found[use] = peer.get(ask)
    return found


@pytest.mark.timeout(3600 if TRACE else 300)
@pytest.mark.parametrize("slots", SIZES)
class TestLibCacheSim:
    @pytest.mark.parametrize(("ours", "theirs"), [("lru", "LRU"), ("arc", "ARC")])
    def test_every_use_is_a_hit_for_both_or_for_neither(
        self, ours: str, theirs: str, slots: int
    ) -> None:
        blocks = requests().blocks
        expected = their_hits(theirs, blocks, slots)
        assert np.array_equal(single_hits(ours, blocks, slots), expected)

    def test_belady(self, slots: int) -> None:
        blocks = requests().blocks
        ours = belady_misses(blocks, slots) == 0
        assert np.array_equal(ours, their_hits("Belady", blocks, slots))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=80),
    st.integers(1, 6),
    st.sampled_from([("lru", "LRU"), ("arc", "ARC")]),
)
@settings(max_examples=150, deadline=None)
def test_any_short_stream(blocks: list[int], slots: int, names: tuple[str, str]) -> None:
    stream = np.array(blocks, np.int64)
    expected = their_hits(names[1], stream, slots)
    assert np.array_equal(single_hits(names[0], stream, slots), expected)


@pytest.mark.timeout(3600 if TRACE else 300)
@pytest.mark.parametrize("slots", SIZES[1:] if not TRACE else SIZES)
def test_no_policy_falls_behind_lru_in_restore(slots: int) -> None:
    hits = {name: int(restore_hits(name, requests(), slots).sum()) for name in EVICTIONS}
    floor = hits["lru"] - 0.015 * len(requests().blocks)
    assert min(hits.values()) >= floor, hits


def test_of_a_request_that_ended_the_deepest_block_goes_first() -> None:
    for name in EVICTIONS:
        cache = BlockCache(name, 4, 8)
        cache.bring(np.arange(4))
        cache.ended(np.arange(4))
        cache.demand(np.array([7]))
        assert cache.demand(np.array([0, 1, 2])).all(), name


@pytest.mark.parametrize("name", ["lru", "cycle"])
def test_what_rests_goes_first_the_longest_at_rest_before_the_others_and_tails_before_heads(
    name: str,
) -> None:
    cache = BlockCache(name, 8, 20)
    cache.bring(np.arange(8))
    for first, rests in ((0, False), (2, True), (4, True), (6, False)):
        cache.ended(np.arange(first, first + 2), rests=rests)
    assert cache.demand(np.array([4])).all(), "somebody is back from a rest"
    gone = []
    for new in range(10, 17):
        before = cache.here(np.arange(8))
        cache.demand(np.array([new]))
        gone += np.flatnonzero(before & ~cache.here(np.arange(8))).tolist()
    assert gone == [3, 2, 5, 1, 0, 7, 6]


@pytest.mark.timeout(3600 if TRACE else 300)
@pytest.mark.parametrize("slots", SIZES[1:] if not TRACE else SIZES)
def test_where_all_requests_rest_it_is_as_if_none_did(slots: int) -> None:
    load = requests()
    found = [
        int(restore_hits("lru", replace(load, stops=(stop,) * len(load)), slots).sum())
        for stop in ("", "end_turn")
    ]
    assert abs(found[0] - found[1]) <= 0.001 * len(load.blocks)


def test_a_demand_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks demanded of 2 slots"):
        BlockCache("lru", 2, 9).demand(np.arange(3))


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 30_000),
    st.sampled_from([1, 3, 1000, 10**9]),
    st.integers(-1, 400),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_a_few_smallest_are_those_of_a_stable_sort(
    seed: int, count: int, distinct: int, wanted: int, rising: bool
) -> None:
    values = np.random.default_rng(seed).integers(0, distinct, count)
    values = np.sort(values) if rising else values
    expected = np.argsort(values, kind="stable")[: max(wanted, 0)]
    assert np.array_equal(smallest(values, wanted), expected)


def test_next_uses() -> None:
    assert next_uses(np.array([3, 1, 3, 3])).tolist() == [2, NEVER, 3, NEVER]
