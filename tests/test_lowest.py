"""Victims that are sought among few slots are those that a look at all slots would find."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from prefetchd.cycle import Cycle
from prefetchd.model import Geometry, Ids, Slots
from prefetchd.odds import Odds

LAYERS, BLOCKS = 6, 4000


@dataclass
class Full:
    """A policy over slots that are all full, and what of it is used again and again."""

    policy: Cycle
    random: np.random.Generator
    pages: Ids

    def turn(self, layer: int, hot: int, *, spread: bool) -> None:
        """Demand some pages of a layer that are here: always the same, or now and then others."""
        mine = self.pages[self.pages % LAYERS == layer]
        some = mine[:hot]
        if spread:
            some = np.concatenate([some, self.random.choice(mine[hot:], hot // 2, replace=False)])
        self.policy.demanded(np.unique(some), None)


def full(slots: int, seed: int) -> Full:
    geometry = Geometry(LAYERS, BLOCKS)
    policy, random = Cycle(slots, geometry), np.random.default_rng(seed)
    pages = random.choice(geometry.pages, slots, replace=False).astype(np.int64)
    policy.inserted(np.arange(slots), pages, prefetched=False)
    return Full(policy, random, pages)


def worth(policy: Cycle) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    policy._look_at_all()
    policy._stale[:] = True
    policy._reckon()
    return {"all": policy._discounted(np.arange(policy.slots))}


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("slots", [1500, 9000])
def test_victims_are_the_worst_of_all(slots: int, spread: bool) -> None:
    """`spread` False: most pages are never used again, and all have the same chance."""
    kit = full(slots, 3)
    for turn in range(40):
        kit.turn(turn % LAYERS, 40, spread=spread)
        count = int(kit.random.integers(1, 80))
        allowed = kit.random.random(slots) < 0.9
        chosen: Slots = kit.policy.victims(count, allowed)
        assert len(np.unique(chosen)) == count
        assert allowed[chosen].all()
        every = worth(kit.policy)["all"]
        best_left = np.sort(every[allowed])[:count]
        assert np.array_equal(np.sort(every[chosen]), best_left)


def test_where_chances_are_the_same_no_list_is_kept() -> None:
    kit = full(9000, 4)
    for turn in range(3 * LAYERS):
        kit.turn(turn % LAYERS, 40, spread=False)
        kit.policy.victims(32, np.ones(9000, np.bool_))
    assert len(kit.policy._lowest._below) < 3000


def test_what_is_always_right_leaves_odds_that_can_be_surprised() -> None:
    odds = Odds((4.0, -1.0), prior=200.0)
    features = np.stack([np.ones(8), np.linspace(0, 1, 8)], axis=1)
    odds._curvature *= 1e-150  # as after a million of them, if nothing but they counted
    for _ in range(100):
        odds.learn(features, np.ones(8, np.bool_))
    sure = odds.chance(features)
    assert np.isfinite(sure).all()
    for _ in range(200):
        odds.learn(features, np.zeros(8, np.bool_))
    assert (odds.chance(features) < sure).all()
