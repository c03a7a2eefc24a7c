"""Namespaces that share one store: they share its space and its bounds, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefetchd import StoreError
from prefetchd.store import plan_superblock
from tests.runtime_bench import BLOCKS, PLAIN, content, keys, layout, open_plain, read_all

MINE = replace(PLAIN, device="threads", namespace="mine")
THEIRS = replace(PLAIN, device="threads", namespace="theirs")
EXTENT = plan_superblock(layout(), BLOCKS, 4096).extent_bytes
SECOND_NS = 10**9


def fill_with_theirs(path: Path) -> None:
    pages = content(BLOCKS, seed=2)
    with open_plain(path, THEIRS) as runtime:
        for number in range(BLOCKS):
            runtime.put(keys(1, number), pages[number : number + 1]).wait()


@pytest.mark.parametrize("scan", [False, True])
def test_a_store_full_of_anothers_blocks_gives_them_up_oldest_first(
    tmp_path: Path, scan: bool
) -> None:
    theirs, mine = content(BLOCKS, seed=2), content(3)
    fill_with_theirs(tmp_path / "kv")
    with open_plain(tmp_path / "kv", replace(MINE, scan=scan)) as runtime:
        assert runtime.stats().blocks_visible == 0
        put = runtime.put(keys(3), mine).wait()  # the very keys that the other one has
        assert put.failures == []
        assert runtime.stats().store_writes.blocks_used == BLOCKS
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(3))), mine)
    with open_plain(tmp_path / "kv", replace(THEIRS, scan=scan)) as runtime:
        assert runtime.lookup(keys(3)).tolist() == []
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(5, 3))), theirs[3:])
    with open_plain(tmp_path / "kv", replace(MINE, scan=scan)) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(3))), mine)


def test_a_cap_and_a_time_to_live_hold_for_all(tmp_path: Path) -> None:
    with open_plain(tmp_path / "kv", THEIRS) as runtime:
        runtime.put(keys(2), content(2), ttl_s=10.0).wait()
        for number in range(2, 6):  # recorded in this order, whatever the device's
            runtime.put(keys(1, number), content(1)).wait()
        shape = runtime._parts.store.superblock
        start_ns = runtime.room.wall_ns()
    with open_plain(tmp_path / "kv", MINE) as runtime:
        runtime.room.wall_ns = lambda: start_ns + 11 * SECOND_NS
        assert runtime.lookup(keys(1)).tolist() == []
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        writes = runtime.stats().store_writes
        assert (writes.blocks_used, writes.blocks_expired) == (4, 2)
    beside = shape.file_bytes - BLOCKS * shape.extent_bytes
    with open_plain(tmp_path / "kv", replace(MINE, cap_bytes=beside + 3 * EXTENT)) as runtime:
        runtime.put(keys(1), content(1)).wait()
        assert runtime.stats().store_writes.blocks_used <= 3
    with open_plain(tmp_path / "kv", THEIRS) as runtime:
        assert len(runtime.lookup(keys(2, 4))) == 2, "the newest of theirs"


def test_a_quota_bounds_a_namespaces_own_blocks_and_nobody_elses(tmp_path: Path) -> None:
    pages = content(6)
    quota = replace(MINE, quota_bytes=2 * EXTENT)
    with open_plain(tmp_path / "kv", THEIRS) as runtime:
        runtime.put(keys(4), content(4, seed=2)).wait()
    with open_plain(tmp_path / "kv", quota) as runtime:
        for number in range(6):
            runtime.put(keys(1, number), pages[number : number + 1]).wait()
            assert runtime.stats().blocks_visible <= 2
        assert len(runtime.lookup(keys(2, 4))) == 2
        assert runtime.stats().store_writes.blocks_used == 6
    with open_plain(tmp_path / "kv", replace(quota, evict_blocks=False)) as runtime:
        put = runtime.put(keys(1, 9), pages[:1]).wait()
        assert put.failures == [
            "block 0 was not stored: all 2 blocks of the namespace's quota are in use"
        ]
    with open_plain(tmp_path / "kv", replace(MINE, quota_bytes=EXTENT)) as runtime:
        assert runtime.stats().blocks_visible == 1
    with open_plain(tmp_path / "kv", THEIRS) as runtime:
        assert len(runtime.lookup(keys(4))) == 4
    with pytest.raises(StoreError, match="quota of 1 bytes holds no block"):
        open_plain(tmp_path / "kv", replace(MINE, quota_bytes=1))
