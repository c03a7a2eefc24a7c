"""Paths fail and come back by chance, stores are closed or not: what was acknowledged stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import Runtime
from tests.runtime_bench import keys
from tests.test_paths import PAGES, Striped, advance, read_known

KEYS = 24
"""Few enough for two paths."""


class World:
    """Puts, reads, a path that fails at a time; `acknowledged` must be there whenever all paths
    are."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.striped = Striped(folder)
        self.random = np.random.default_rng(seed)
        self.acknowledged: set[int] = set()
        self.runtime: Runtime = self.striped.open()
        self.lost = 0

    def act(self) -> None:
        what = self.random.random()
        if what < 0.35:
            self.put(int(self.random.integers(KEYS)))
        elif what < 0.85:
            if self.acknowledged:
                number = int(self.random.choice(sorted(self.acknowledged)))
                self.lost += not read_known(self.runtime, number)
        elif what < 0.9:
            self.striped.device.broken = {int(self.random.integers(3))}
        elif what < 0.95:
            self.striped.device.broken = set()
            advance(self.runtime, 5)
        else:
            advance(self.runtime, float(self.random.choice([0.1, 1, 10])))

    def put(self, number: int) -> None:
        durability = "durable" if self.random.random() < 0.7 else "fast"
        ticket = self.runtime.put(
            keys(1, number), PAGES[number : number + 1], durability=durability
        )
        ticket.wait()
        if durability == "durable" and not ticket.failures:
            self.acknowledged.add(number)

    def reopen(self) -> None:
        self.striped.device.broken = set()
        assert self.runtime.stats().store_writes.blocks_evicted == 0
        if self.random.random() < 0.5:
            self.runtime.engine.stop()
            self.runtime._parts.close(clean=False)
        else:
            self.runtime.close()
        scan = bool(self.random.random() < 0.5)
        self.striped.options = replace(self.striped.options, scan=scan)
        self.runtime = self.striped.open()
        for number in sorted(self.acknowledged):
            assert read_known(self.runtime, number), f"{number} was acknowledged and is gone"
        stats = self.runtime.stats()
        assert stats.blocks_visible == stats.store_writes.blocks_used, "an extent has leaked"
        catalog: Any = self.runtime._parts.catalog
        assert len(catalog.index.block_of) == stats.blocks_visible, "a key is there twice"


@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_is_there_when_the_paths_are(seed: int, tmp_path: Path) -> None:
    world = World(tmp_path, seed)
    for _ in range(6):
        for _ in range(60):
            world.act()
        world.reopen()
    assert world.acknowledged
    assert world.lost, "no path was ever missed"
    world.runtime.close()
