"""Blocks put in a simulated restore: each write ends for its own blocks, in whatever order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.assembly import build_core
from prefetchd.drive_model import DriveModel, Times
from prefetchd.drive_profile import DEFAULT, load_profile
from prefetchd.lab.restore_puts import SimulatedPuts
from prefetchd.lab.virtual import VirtualEngine
from prefetchd.model import Geometry
from prefetchd.options import Options


class Told(DriveModel):
    """Operations end when they are told to, in the order in which they are given."""

    def __init__(self, *ends_ns: int) -> None:
        super().__init__(load_profile(DEFAULT))
        self._ends = list(ends_ns)

    def submit(self, lengths: NDArray[np.int64], *, write: bool, now_ns: int) -> Times:
        return np.array([self._ends.pop(0) for _ in lengths], np.int64)


def test_a_write_that_overtakes_others_ends_for_its_own_blocks() -> None:
    visible = np.zeros(20, np.bool_)
    core, _ = build_core(Geometry(1, 20), 8, Options(predictor="none"), lambda ids: visible[ids])
    engine = VirtualEngine(core, Told(900, 500, 300), lambda ready: None, page_bytes=4096)
    found: list[tuple[int, int, int]] = []
    puts = SimulatedPuts(engine, visible, 4096, lambda *told: found.append((engine.now_ns, *told)))
    for request, first, count in ((1, 0, 4), (2, 4, 3), (3, 7, 2)):
        puts.put(request, np.arange(first, first + count))
    puts.move()
    assert found == [(0, 1, 4)]  # staging has room for these and keeps them
    engine.run_until(300)
    assert found[1:] == [(300, 3, 2)]
    assert np.flatnonzero(visible).tolist() == [0, 1, 2, 3, 7, 8]
    engine.run_until(500)
    assert found[2:] == [(500, 2, 3)]
    puts.put(4, np.arange(10, 12))  # what is kept is not written yet: still no room for more
    engine.drive = Told(1000)
    puts.move()
    assert len(found) == 3
    engine.run_until(1000)
    assert found[3:] == [(1000, 4, 2)]
