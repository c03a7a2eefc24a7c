"""Pages that are sure to be no victims are not reckoned at every turn: victims are the same."""

from __future__ import annotations

import numpy as np
import pytest

from prefetchd import cycle
from prefetchd.cycle import Cycle
from prefetchd.model import Geometry, Ids, Scores

GEOMETRY = Geometry(layers=4, blocks=8000)
SLOTS, EACH, STEPS = 5000, 300, 60


def turns() -> list[tuple[Ids, np.ndarray[tuple[int], np.dtype[np.float32]]]]:
    """Pages and scores of each turn: some stay for long, others come back, some are new."""
    random = np.random.default_rng(3)
    warm = random.integers(0, GEOMETRY.blocks, (GEOMETRY.layers, 4 * EACH))
    made = []
    for turn in range(STEPS * GEOMETRY.layers):
        layer = turn % GEOMETRY.layers
        changed = random.integers(0, warm.shape[1], 60)
        warm[layer, changed] = random.integers(0, GEOMETRY.blocks, len(changed))
        near = (random.exponential(EACH / 2, EACH).astype(int) + turn) % warm.shape[1]
        blocks = np.unique(warm[layer, near])
        made.append((GEOMETRY.page_ids(blocks, layer), random.random(len(blocks), np.float32)))
    return made


def played(policy: Cycle) -> tuple[list[Ids], list[int]]:
    """The victims of every turn, and how many pages were reckoned for them."""
    slot_of = np.full(GEOMETRY.pages, -1)
    page_of = np.full(SLOTS, -1)
    free = list(range(SLOTS))
    victims, reckoned = [], []
    chance = policy.history.whole_chance

    def counted(odds: Scores, *rest: object) -> Scores:
        reckoned.append(len(odds))
        return chance(odds, *rest)  # type: ignore[arg-type]

    policy.history.whole_chance = counted  # type: ignore[method-assign, assignment]
    for pages, scores in turns():
        new = pages[slot_of[pages] < 0]
        slots = np.array([free.pop() for _ in new], np.int64)
        slot_of[new], page_of[slots] = slots, new
        policy.demanded(pages, scores)
        policy.inserted(slots, new, prefetched=False)
        if len(free) < EACH:
            allowed = page_of >= 0
            allowed[slot_of[pages]] = False
            gone = policy.victims(EACH // 4, allowed)
            victims.append(gone)
            policy.removed(gone, page_of[gone])
            slot_of[page_of[gone]], page_of[gone] = -1, -1
            free += gone.tolist()
    return victims, reckoned


def test_what_is_put_aside_would_not_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    some, reckoned = played(Cycle(SLOTS, GEOMETRY))
    monkeypatch.setattr(cycle, "ASIDE_SLOTS", SLOTS + 1)
    most, all_reckoned = played(Cycle(SLOTS, GEOMETRY))
    assert len(most) > 30
    assert [one.tolist() for one in some] == [one.tolist() for one in most]
    assert sum(reckoned) < 0.75 * sum(all_reckoned)
