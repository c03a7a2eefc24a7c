"""A daemon killed again and again under a client's load.

`python -m tests.sidecar_campaign [kills]` says what was acknowledged, read and missed. What was
acknowledged as durable must be found after every kill, no byte may be wrong, and no call may take
longer than a bound.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd import Client, connect
from tests.runtime_bench import LAYERS, keys, layout
from tests.sidecar_bench import PATIENCE_S, Process

BLOCKS, PAGE_BYTES, BATCH = 512, 4096, 4
CALL_S_MAX = 20.0
"""Generous: a loaded machine may take seconds; a hang would take for ever."""


@dataclass
class Tally:
    kills: int = 0
    acknowledged: int = 0
    read: int = 0
    missing: int = 0
    slowest_s: float = 0.0


def content(number: int) -> NDArray[np.uint8]:
    """The pages of a block: all that can be told from its key, and nothing else fits."""
    random = np.random.default_rng(number)
    return random.integers(0, 256, (1, LAYERS, PAGE_BYTES), np.uint8)


class Load:
    """Puts new blocks, and demands those that were acknowledged, one after another."""

    def __init__(self, kv: Client, tally: Tally) -> None:
        self._kv = kv
        self._tally = tally
        self._random = np.random.default_rng(7)
        self._next = 0
        self.durable: list[int] = []

    def step(self) -> None:
        start_s = time.monotonic()
        if self._next < BLOCKS and self._random.random() < 0.4:
            self._put()
        elif self.durable:
            count = min(BATCH, len(self.durable))
            self.read(self._random.choice(self.durable, count, replace=False).tolist())
        spent_s = time.monotonic() - start_s
        self._tally.slowest_s = max(self._tally.slowest_s, spent_s)
        assert spent_s < CALL_S_MAX, f"a call took {spent_s:.1f} s"

    def _put(self) -> None:
        number = self._next
        self._next += 1
        put = self._kv.put(keys(1, number), content(number)).wait()
        if not put.failures:
            self.durable.append(number)
            self._tally.acknowledged += 1

    def read(self, numbers: list[int]) -> int:
        """Demand blocks by their keys; how many could be had. No byte may be wrong."""
        blocks = np.concatenate([self._kv.lookup(keys(1, number)) for number in numbers])
        if len(blocks) < len(numbers):
            self._tally.missing += len(numbers)
            return 0
        with self._kv.demand(self._kv.pages(blocks, 1)) as ticket:
            had = np.flatnonzero(~ticket.missing).tolist()
            for place in had:
                page = ticket._staged[ticket.slots[place]]
                right = np.array_equal(page, content(numbers[place])[0, 1])
                valid = ticket.valid  # type: ignore[attr-defined]
                assert right or not valid, f"wrong bytes of block {numbers[place]}"
        self._tally.read += len(had)
        self._tally.missing += len(numbers) - len(had)
        return len(had)


def campaign(folder: Path, kills: int, seed: int = 1) -> Tally:
    """Raises AssertionError where something was lost, wrong or late."""
    tally, random = Tally(), np.random.default_rng(seed)
    stores = str(folder / "stores")
    process = Process(folder, "--store", stores)
    with connect(process.address, layout=layout(PAGE_BYTES), blocks=BLOCKS + 8) as kv:
        load = Load(kv, tally)
        for _ in range(kills):
            for _ in range(int(random.integers(5, 40))):
                load.step()
            killer = threading.Thread(target=process.kill)
            killer.start()  # in the middle of what comes next
            while not kv.away:
                load.step()
            killer.join()
            tally.kills += 1
            load.step()
            process = Process(folder, "--store", stores)
            assert kv.wait_until_back(PATIENCE_S), kv.away
            for first in range(0, len(load.durable), BATCH):
                wanted = load.durable[first : first + BATCH]
                assert load.read(wanted) == len(wanted), "what was acknowledged is gone"
    code, said = process.terminate()
    assert code == 0, said
    return tally


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(campaign(Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else 100))
