"""Block indices that somebody still holds: kept for a while, and never another block's bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from prefetchd import Found, Runtime
from tests.runtime_bench import BLOCKS, LAYERS, PLAIN, content, keys, open_plain, read_all

SECOND_NS = 10**9
UNLEASED = replace(PLAIN, lease_s=0.0)


def there(runtime: Runtime, count: int) -> list[int]:
    """Which keys are found; asked of the catalog, since a lookup would renew their leases."""
    with runtime.engine.lock:
        return [n for n in range(count) if runtime._parts.catalog.find(keys(1, n)[0]) >= 0]


def test_what_was_looked_up_outlives_what_was_put_later() -> None:
    pages = content(BLOCKS + 8)
    with open_plain(None) as runtime:
        runtime.put(keys(BLOCKS), pages[:BLOCKS]).wait()
        runtime.lookup(keys(3))
        for number in range(BLOCKS, BLOCKS + 8):
            runtime.put(keys(1, number), pages[number : number + 1]).wait()
        assert there(runtime, BLOCKS + 8) == [0, 1, 2, *range(11, 16)]
        assert runtime.stats().store_writes.leases_cut == 0
        runtime.engine.clock = lambda: time.monotonic_ns() + 31 * SECOND_NS
        runtime.put(keys(1, 50), pages[:1]).wait()
        assert there(runtime, 3) == [0, 1], "a lease that is over protects nothing"


def test_a_demand_renews_the_lease() -> None:
    pages = content(BLOCKS + 5)
    with open_plain(None) as runtime:
        runtime.put(keys(BLOCKS), pages[:BLOCKS]).wait()
        blocks = runtime.lookup(keys(1))
        runtime.engine.clock = lambda: time.monotonic_ns() + 31 * SECOND_NS
        runtime.demand(runtime.pages(blocks, 0)).release()
        for number in range(BLOCKS, BLOCKS + 5):
            runtime.put(keys(1, number), pages[number : number + 1]).wait()
        assert there(runtime, 1) == [0]


def test_no_lease_makes_a_put_fail_and_cutting_them_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = content(BLOCKS + 2)
    with open_plain(None) as runtime:
        runtime.put(keys(BLOCKS), pages[:BLOCKS]).wait()
        runtime.lookup(keys(BLOCKS))
        put = runtime.put(keys(2, BLOCKS), pages[BLOCKS:]).wait()
        assert put.failures == []
        assert there(runtime, BLOCKS + 2) == [*range(6), 8, 9], "the end of the chain has gone"
        assert runtime.stats().store_writes.leases_cut == 2
    assert caplog.text.count("looked up a short while ago") == 1


def test_leased_blocks_go_before_a_put_fails_for_want_of_others() -> None:
    with open_plain(None) as runtime:
        blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).blocks
        with runtime.demand(runtime.pages(blocks[4:], 0)):
            runtime.lookup(keys(4))
            assert runtime.put(keys(1, 50), content(1)).wait().failures == []
        assert there(runtime, BLOCKS) == [0, 1, 2, 4, 5, 6, 7]
        assert runtime.stats().store_writes.leases_cut == 1


def test_a_stale_index_is_a_miss_with_stamps_and_another_block_without() -> None:
    pages = content(BLOCKS + 2)
    with open_plain(None, UNLEASED) as runtime:
        put = runtime.put(keys(BLOCKS), pages[:BLOCKS]).wait()
        found = runtime.find(keys(BLOCKS))
        assert isinstance(found, Found)
        assert found.stamps.tolist() == put.stamps.tolist()
        new = runtime.put(keys(1, BLOCKS), pages[BLOCKS : BLOCKS + 1])
        place = int(np.flatnonzero(found.blocks == new.blocks[0])[0])
        wanted = runtime.pages(found.blocks, 1)
        scores = np.linspace(1, 0, BLOCKS, dtype=np.float32)
        with runtime.demand(wanted, stamps=found.stamps, scores=scores) as ticket:
            assert np.flatnonzero(ticket.missing).tolist() == [place]
            kept = [n for n in range(BLOCKS) if n != place]
            assert all(np.array_equal(ticket.view(n), pages[n, 1]) for n in kept)
        with runtime.demand(wanted[place : place + 1]) as ticket:
            assert np.array_equal(ticket.view(0), pages[BLOCKS, 1])
        for outside in (-1, BLOCKS * LAYERS):
            with pytest.raises(ValueError, match="is none of the"):
                runtime.demand(np.array([outside]), stamps=found.stamps[:1])
        with pytest.raises(ValueError, match="one a page"):
            runtime.demand(wanted, stamps=found.stamps[:1])


def test_stamps_of_an_earlier_opening_are_nobodys(tmp_path: Path) -> None:
    options = replace(PLAIN, device="threads")
    pages = content(2)
    with open_plain(tmp_path / "kv", options) as runtime:
        before = runtime.put(keys(2), pages).wait()
    with open_plain(tmp_path / "kv", options) as runtime:
        found = runtime.find(keys(2))
        assert found.blocks.tolist() == before.blocks.tolist()
        wanted = runtime.pages(found.blocks, 0)
        with runtime.demand(wanted, stamps=before.stamps) as ticket:
            assert ticket.missing.all()
        with runtime.demand(wanted, stamps=found.stamps) as ticket:
            assert not ticket.missing.any()
        assert np.array_equal(read_all(runtime, found.blocks), pages)


KEYS = 14
PAGES = content(KEYS)
CHOSEN = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=4, unique=True)


class Stale(RuleBasedStateMachine):
    """Indices of any age are demanded with their stamps: the bytes are their key's, or missing."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = open_plain(None, UNLEASED)
        self.start_ns = self.runtime.room.wall_ns()
        self.passed_s = 0
        self.runtime.room.wall_ns = lambda: self.start_ns + self.passed_s * SECOND_NS
        self.known: list[tuple[int, int, int]] = []  # key, block, stamp

    def teardown(self) -> None:
        self.runtime.close()

    @rule(numbers=CHOSEN, fast=st.booleans(), ttl_s=st.sampled_from([None, 5.0]))
    def put(self, numbers: list[int], fast: bool, ttl_s: float | None) -> None:
        names = [keys(1, number)[0] for number in numbers]
        level = "fast" if fast else "durable"
        put = self.runtime.put(names, PAGES[numbers], durability=level, ttl_s=ttl_s)
        blocks, stamps = put.blocks.tolist(), put.stamps.tolist()
        self.known += [k for k in zip(numbers, blocks, stamps, strict=True) if k[1] >= 0]

    @rule(number=st.integers(0, KEYS - 1))
    def find(self, number: int) -> None:
        found = self.runtime.find(keys(1, number))
        self.known += [
            (number, block, stamp)
            for block, stamp in zip(found.blocks.tolist(), found.stamps.tolist(), strict=True)
        ]

    @rule()
    def evict(self) -> None:
        with self.runtime.engine.lock:
            self.runtime.room._evict(mine=False)

    @rule(seconds=st.integers(1, 6))
    def pass_time(self, seconds: int) -> None:
        self.passed_s += seconds

    @precondition(lambda self: self.known)
    @rule(which=st.lists(st.integers(0, 999), max_size=4), layer=st.integers(0, LAYERS - 1))
    def demand(self, which: list[int], layer: int) -> None:
        # Drawn as numbers: which block a put gets depends on how far the writer is.
        picked = [self.known[number % len(self.known)] for number in which]
        chosen = list({known[1]: known for known in picked}.values())
        blocks = np.array([block for _, block, _ in chosen], np.int64)
        stamps = np.array([stamp for _, _, stamp in chosen], np.int64)
        pages = self.runtime.pages(blocks, layer)
        with self.runtime.demand(pages, stamps=stamps) as ticket:
            for place, (number, block, stamp) in enumerate(chosen):
                current = self.runtime.find(keys(1, number))
                if ticket.missing[place]:
                    assert (block, stamp) not in zip(current.blocks, current.stamps, strict=True)
                else:
                    assert np.array_equal(ticket.view(place), PAGES[number, layer])


TestStale = Stale.TestCase
TestStale.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
