"""Power fails at any moment: what was promised is found again, and nothing that is found is wrong.

`python -m tests.test_powerloss 1000` runs as many seeds as it is told.
"""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefetchd.device import OP, SYNC, WRITE
from prefetchd.devices.powerloss import PowerLoss
from prefetchd.pipeline import FlushLimits
from prefetchd.store import of_memory
from prefetchd.testing import aligned_arena
from tests.tier_bench import SECOND_NS, Tier, World, campaign, key_of, new_image, pages_of, read


def test_fifty_power_failures() -> None:
    assert campaign(range(50), steps=25) > 100


class Sequences(RuleBasedStateMachine):
    """The same, found by hypothesis: any order of puts, evictions, expiries, ends and failures."""

    @initialize(stripes=st.integers(1, 3))
    def start(self, stripes: int) -> None:
        self.world = World(stripes, 0, blocks=5)

    @rule(number=st.integers(0, 9), durable=st.booleans(), ttl_s=st.sampled_from([0, 0, 0, 2]))
    def put(self, number: int, durable: bool, ttl_s: int) -> None:
        self.world.put(number, durable, ttl_s)

    @rule(times=st.integers(1, 5))
    def reap(self, times: int) -> None:
        for _ in range(times):
            self.world.reap()

    @rule()
    def evict(self) -> None:
        self.world.evict()

    @rule(milliseconds=st.sampled_from([10, 1200]))
    def pass_time(self, milliseconds: int) -> None:
        self.world.pass_time(milliseconds)

    @rule(seed=st.integers(0, 2**32 - 1))
    def crash(self, seed: int) -> None:
        self.world.check_crash(seed)

    @rule(seed=st.integers(0, 2**32 - 1))
    def go_on(self, seed: int) -> None:
        self.world.go_on(seed)

    @invariant()
    def books(self) -> None:
        if hasattr(self, "world"):
            World.check_books(self.world.tier)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_after_a_clean_close_everything_is_found_by_journal_and_by_headers() -> None:
    tier = Tier(new_image(2))
    for number in range(3):
        tier.put(number, durable=number == 1)
        tier.settle()
    image = tier.close()
    for scan in (False, True):
        again = Tier([file.copy() for file in image], scan=scan)
        assert set(again.stored()) == {key_of(number) for number in range(3)}
        for number in range(3):
            block = again.stored()[key_of(number)]
            assert (read(image, again, block) == pages_of(number)).all()


def test_a_full_journal_area_is_followed_by_a_snapshot_in_the_other() -> None:
    world = World(1, seed=1, blocks=3)
    journal = world.tier.commit.journal
    generations = set()
    for number in range(200):
        world.put(number % 7, durable=True)
        while not world.tier.writer.idle:
            world.reap()
        generations.add(journal.generation)
        if number % 20 == 0:
            world.check_crash(number)
    assert len(generations) > 2


def test_after_a_power_failure_the_journal_goes_on_where_it_ended() -> None:
    world = World(1, seed=1)
    for number in range(6):
        world.put(number % 3, durable=True)
        while not world.tier.writer.idle:
            world.reap()
        before = world.tier.commit.journal.state
        world.go_on(number)
        assert world.tier.commit.journal.state == before
        world.check_crash(number)


def test_a_flush_for_others_is_one_for_what_is_not_due_yet() -> None:
    tier = Tier(new_image(1), limits=FlushLimits(100, 100 * SECOND_NS))
    tier.put(1, durable=True)
    tier.settle()
    tier.put(2, durable=False)
    tier.reap()
    assert tier.commit.at_risk == 1
    tier.room._evict(mine=False)  # whose record is flushed at once
    for _ in range(6):
        tier.reap()
    assert tier.writer.idle
    assert set(tier.stored()) == {key_of(2)}


def test_only_a_flush_saves_a_write_and_only_one_that_came_before_it() -> None:
    shape = Tier(new_image(1)).store.superblock
    store = of_memory([shape])
    arena = aligned_arena(8192)
    arena[:] = 1
    device = PowerLoss(store.files, arena, 4)

    def do(*ops: tuple[int, int]) -> None:
        batch = np.zeros(len(ops), OP)
        batch["kind"], batch["offset"] = np.array(ops).T
        batch["length"], batch["tag"] = 4096, np.arange(len(ops))
        assert device.submit(batch) == len(ops)

    def survivors() -> set[int]:
        images = [device.crash(seed)[0] for seed in range(20)]
        return {int(image[:4096].sum()) for image in images}

    do((WRITE, 0), (SYNC, 0))
    device.reap()
    assert 0 in survivors(), "the flush was submitted before the write had ended"
    assert any(0 < count < 4096 for count in survivors()), "torn"
    do((SYNC, 0))
    device.reap()
    assert survivors() == {4096}
    device.close()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"{campaign(range(count), steps=25)} blocks found again, nothing lost, nothing wrong")
