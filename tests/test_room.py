"""Room made ahead of time: neither a demand nor a prefetch waits for the choice of a victim."""

from __future__ import annotations

import numpy as np

from prefetchd.eviction import Lru
from prefetchd.model import Geometry, Ids, IoClass, Scores, Slots
from prefetchd.policy import Eviction
from prefetchd.staging import READY, Staging

SLOTS = 1024
RESERVE = 4
GEOMETRY = Geometry(layers=2, blocks=1024)


class Valued(Lru):
    """LRU, with an opinion on what a page is worth."""

    value = 0.5

    def worth(self, slots: Slots) -> Scores:
        return np.full(len(slots), self.value, np.float32)


def full(eviction: type[Eviction]) -> Staging:
    staging = Staging(SLOTS, GEOMETRY, eviction(SLOTS, GEOMETRY))
    assert staging.reserve == RESERVE
    slots, _ = staging.place(np.arange(SLOTS), IoClass.DEMAND)
    staging.state[slots] = READY
    return staging


def prefetch(staging: Staging, pages: Ids, confidence: float) -> tuple[int, int]:
    """How many were given slots, and how many others had to go for them at that moment."""
    slots, evicted = staging.place(
        pages,
        IoClass.PREFETCH,
        np.zeros(len(pages), np.uint8),
        np.full(len(pages), confidence, np.float32),
    )
    staging.check()
    return len(slots), len(evicted.pages)


def made(staging: Staging) -> tuple[int, int]:
    """How many pages go out for demands, and for prefetches."""
    evicted, for_prefetches = staging.replenish()
    assert len(evicted.pages) == len(for_prefetches)
    return int(np.count_nonzero(~for_prefetches)), int(np.count_nonzero(for_prefetches))


def test_room_is_made_for_demands_and_after_the_first_prefetch_for_those_too() -> None:
    staging = full(Valued)
    assert made(staging) == (RESERVE, 0)
    assert prefetch(staging, np.arange(1100, 1103), 0.9) == (3, 3)
    assert made(staging) == (0, RESERVE)
    assert prefetch(staging, np.arange(1200, 1204), 0.9) == (4, 0), "nothing to choose any more"
    staging.check()


def test_a_prefetch_worth_less_than_what_will_go_for_it_is_not_made() -> None:
    staging = full(Valued)
    staging.replenish()
    prefetch(staging, np.arange(1100, 1101), 0.9)
    staging.replenish()
    assert prefetch(staging, np.arange(1200, 1203), 0.4) == (0, 0)
    assert prefetch(staging, np.arange(1200, 1203), 0.6) == (3, 0)


def test_a_policy_without_an_opinion_lets_all_in() -> None:
    staging = full(Lru)
    staging.replenish()
    prefetch(staging, np.arange(1100, 1101), 0.1)
    staging.replenish()
    assert prefetch(staging, np.arange(1200, 1203), 0.1) == (3, 0)


def test_empty_slots_ask_for_no_victims() -> None:
    staging = Staging(SLOTS, GEOMETRY, Lru(SLOTS, GEOMETRY))
    staging.place(np.arange(8), IoClass.PREFETCH)
    assert made(staging) == (0, 0)
