"""A store stays within its bounds, and a block that had to go is never met again as another."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import prefetchd
from prefetchd import PageHint, StoreError
from prefetchd.devices.memory import Memory
from prefetchd.store import plan_superblock
from tests.runtime_bench import (
    BLOCKS,
    LAYERS,
    PLAIN,
    FaultyRuntime,
    content,
    harm_next,
    keys,
    layout,
    open_plain,
    read_all,
)

SECOND_NS = 10**9


def test_a_full_store_forgets_what_was_used_least_lately() -> None:
    pages = content(BLOCKS + 3)
    with open_plain(None) as runtime:
        assert runtime.put(keys(BLOCKS), pages[:BLOCKS]).blocks.min() >= 0
        read_all(runtime, runtime.lookup(keys(1)))
        runtime.lookup(keys(1, 1))
        new = runtime.put(keys(3, BLOCKS), pages[BLOCKS:])
        assert new.failures == []
        assert np.array_equal(read_all(runtime, new.blocks), pages[BLOCKS:])
        there = [len(runtime.lookup(keys(1, number))) for number in range(BLOCKS)]
        assert there == [1, 1, 1, 1, 1, 0, 0, 0], "of what was put together the end goes first"
        writes = runtime.stats().store_writes
        assert (writes.blocks_evicted, writes.blocks_used) == (3, BLOCKS)
        assert msgspec.json.decode(msgspec.json.encode(writes))["blocks_admitted"] == BLOCKS + 3


def test_of_a_chain_that_was_touched_together_the_end_goes_first() -> None:
    with open_plain(None) as runtime:
        runtime.put(keys(BLOCKS), content(BLOCKS)).wait()
        runtime.lookup(keys(BLOCKS))
        runtime.put(keys(2, 50), content(2)).wait()
        assert len(runtime.lookup(keys(BLOCKS))) == BLOCKS - 2


def test_staged_bytes_of_an_evicted_block_are_never_those_of_the_next() -> None:
    random = np.random.default_rng(3)
    pages = content(60)
    options = replace(PLAIN, predictor="attention", staging_bytes=12 * 12_288)
    with open_plain(None, options) as runtime:
        for number in range(60):
            block = runtime.put(keys(1, number), pages[number : number + 1]).blocks
            assert np.array_equal(read_all(runtime, block), pages[number : number + 1])
            older = random.integers(max(0, number - BLOCKS), number + 1, 4)
            for chosen in older.tolist():
                found = runtime.lookup(keys(1, chosen))
                if len(found):
                    hinted = runtime.pages(found, int(random.integers(LAYERS)))
                    runtime.hint(PageHint(hinted, np.ones(1, np.float32)))
                    assert np.array_equal(read_all(runtime, found), pages[chosen : chosen + 1])
        runtime._parts.core.staging.check()
        assert runtime.stats().failures == {}


def test_what_somebody_reads_is_not_evicted() -> None:
    pages = content(BLOCKS + 2)
    with open_plain(None, replace(PLAIN, demand_timeout_s=0.2)) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages[:BLOCKS]).blocks
        with runtime.demand(runtime.pages(blocks, 0)) as ticket:
            put = runtime.put(keys(1, 50), pages[-1:]).wait()
            assert put.failures == [
                f"block 0 was not stored: all {BLOCKS} blocks of the store are in use"
            ]
            assert np.array_equal(np.stack(ticket.views()), pages[:BLOCKS, 0])
        assert runtime.put(keys(1, 50), pages[-1:]).failures == []
        assert runtime.put(keys(1, 50), pages[-1:]).blocks.min() >= 0


def test_a_block_whose_read_is_on_the_way_is_not_evicted() -> None:
    pages = content(BLOCKS + 1)
    with FaultyRuntime(options=PLAIN) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages[:BLOCKS]).blocks
        harm_next(runtime, (0, "stall"))
        ticket = runtime.demand(runtime.pages(blocks[:1], 0))
        new = runtime.put(keys(1, 50), pages[-1:]).blocks
        assert new[0] != blocks[0]
        runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
        assert np.array_equal(ticket.wait().view(0), pages[0, 0])


@pytest.mark.parametrize(("ttl_s", "name"), [(None, "long"), (60.0, "short"), (7200.0, "medium")])
def test_the_kernel_is_told_how_long_blocks_live(
    ttl_s: float | None, name: str, tmp_path: Path
) -> None:
    options = replace(PLAIN, device="threads", ttl_s=ttl_s)
    with open_plain(tmp_path / "kv", options) as runtime:
        hint = runtime.stats().store_writes.hint
        assert hint == f"lifetime {name}" or hint.startswith("none, refused")
        runtime.put(keys(1), content(1)).wait()


def test_blocks_expire_by_the_wall_clock_and_stay_so(tmp_path: Path) -> None:
    pages = content(3)
    options = replace(PLAIN, device="threads", ttl_s=100.0)
    with open_plain(tmp_path / "kv", options) as runtime:
        start_ns = runtime.room.wall_ns()
        runtime.put(keys(1), pages[:1], ttl_s=10.0).wait()
        runtime.put(keys(2, 1), pages[1:]).wait()
        blocks = runtime.lookup(keys(3))
        runtime.room.wall_ns = lambda: start_ns + 11 * SECOND_NS
        assert runtime.lookup(keys(3)).tolist() == []
        with runtime.demand(runtime.pages(blocks, 0)) as late:
            assert late.missing.tolist() == [True, False, False]
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(2, 1))), pages[1:])
        assert runtime.stats().store_writes.blocks_expired == 1
        runtime.put(keys(1), pages[:1], ttl_s=1000.0).wait()
    with open_plain(tmp_path / "kv", options) as runtime:
        runtime.room.wall_ns = lambda: start_ns + 200 * SECOND_NS
        assert len(runtime.lookup(keys(1))) == 1
        assert runtime.lookup(keys(2, 1)).tolist() == []
        with pytest.raises(ValueError, match="time to live"):
            runtime.put(keys(1), pages[:1], ttl_s=0.0)


def test_an_expired_block_that_is_read_stays_until_it_is_let_go_of() -> None:
    pages = content(2)
    with open_plain(None) as runtime:
        block = runtime.put(keys(1), pages[:1], ttl_s=10.0).blocks
        ticket = runtime.demand(runtime.pages(block, 0)).wait()
        now_ns = runtime.room.wall_ns()
        runtime.room.wall_ns = lambda: now_ns + 20 * SECOND_NS
        assert runtime.lookup(keys(1)).tolist() == []
        assert runtime.stats().store_writes.blocks_used == 1
        assert np.array_equal(ticket.view(0), pages[0, 0])
        ticket.release()
        runtime.lookup(keys(1))
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        assert runtime.stats().store_writes.blocks_used == 0


def test_a_byte_cap_is_never_exceeded(tmp_path: Path) -> None:
    shape = plan_superblock(layout(), BLOCKS, 4096)
    beside = shape.file_bytes - BLOCKS * shape.extent_bytes
    pages = content(BLOCKS)
    capped = replace(PLAIN, device="threads", cap_bytes=beside + 3 * shape.extent_bytes)
    open_plain(tmp_path / "kv", replace(PLAIN, device="threads")).close()
    with open_plain(tmp_path / "kv", capped) as runtime:
        for number in range(BLOCKS):
            runtime.put(keys(1, number), pages[number : number + 1]).wait()
            assert runtime.stats().store_writes.blocks_used <= 3
        assert len(runtime.lookup(keys(3, BLOCKS - 3))) == 3
    smaller = replace(capped, cap_bytes=beside + 2 * shape.extent_bytes)
    with open_plain(tmp_path / "kv", smaller) as runtime:
        assert runtime.stats().blocks_visible == 2
    with pytest.raises(StoreError, match="holds no block"):
        open_plain(tmp_path / "kv", replace(capped, cap_bytes=beside))


@pytest.mark.parametrize("durability", ["durable", "fast"])
@pytest.mark.parametrize("bound", ["cap", "quota", "blocks"])
def test_of_a_put_larger_than_the_bound_the_longest_prefix_stays(
    tmp_path: Path, bound: str, durability: str
) -> None:
    shape = plan_superblock(layout(), BLOCKS, 4096)
    beside = shape.file_bytes - BLOCKS * shape.extent_bytes
    options, room = {
        "cap": (replace(PLAIN, cap_bytes=beside + 3 * shape.extent_bytes), 3),
        "quota": (replace(PLAIN, quota_bytes=4 * shape.extent_bytes), 4),
        "blocks": (PLAIN, BLOCKS),
    }[bound]
    pages = content(2 * BLOCKS)
    with open_plain(tmp_path / "kv", replace(options, device="threads")) as runtime:
        runtime.put(keys(3, 90), content(3, seed=9)).wait()  # what is older makes room
        ticket = runtime.put(keys(2 * BLOCKS), pages, durability=durability).wait()
        assert (ticket.blocks[:room] >= 0).all()
        assert (ticket.blocks[room:] == -1).all()
        assert len(ticket.failures) == 2 * BLOCKS - room
        assert f"{room} by what this put began with" in ticket.failures[0]
        found = runtime.lookup(keys(2 * BLOCKS))
        assert len(found) == room
        if room <= 4:  # what fits into staging at once
            assert np.array_equal(read_all(runtime, found), pages[:room])
        after = runtime.put(keys(2, 50), content(2, seed=5)).wait()
        assert (after.blocks >= 0).all(), "what has been put is held no longer"


def test_below_the_floor_of_free_space_nothing_is_written_and_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [10**9]
    status = lambda _: SimpleNamespace(f_bavail=free[0], f_frsize=1)  # noqa: E731
    monkeypatch.setattr(os, "statvfs", status)
    options = replace(PLAIN, device="threads", floor_bytes=1000)
    pages = content(4)
    with open_plain(tmp_path / "kv", options) as runtime:
        runtime.put(keys(1), pages[:1]).wait()
        free[0] = 999
        for number in range(1, 3):
            runtime.room._looked_ns = -SECOND_NS
            put = runtime.put(keys(1, number), pages[number : number + 1]).wait()
            assert "999 bytes are free on its file system" in put.failures[0]
        known = runtime.put(keys(1), pages[:1])
        assert np.array_equal(read_all(runtime, known.blocks), pages[:1])
        assert runtime.stats().store_writes.stopped
        free[0] = 10**9
        runtime.room._looked_ns = -SECOND_NS
        assert runtime.put(keys(1, 3), pages[3:]).failures == []
        assert runtime.stats().store_writes.stopped == ""
    assert caplog.text.count("nothing is written") == 1
    assert caplog.text.count("writing goes on") == 1


def test_second_touch_writes_what_comes_twice() -> None:
    pages = content(2)
    with open_plain(None, replace(PLAIN, admission="second-touch")) as runtime:
        first = runtime.put(keys(2), pages).wait()
        assert (first.blocks.tolist(), first.refused, first.failures) == ([-1, -1], [0, 1], [])
        assert runtime.stats().bytes_written == 0
        second = runtime.put(keys(1, 1), pages[1:])
        assert np.array_equal(read_all(runtime, second.blocks), pages[1:])
        writes = runtime.stats().store_writes
        assert (writes.blocks_admitted, writes.blocks_refused) == (1, 2)
        assert writes.written_per_reused is not None


def test_what_was_refused_is_remembered_within_a_bound() -> None:
    from prefetchd.admission import Admission

    admission = Admission("second-touch", 2)
    assert [admission.admits(key) for key in keys(3)] == [False] * 3
    assert [admission.admits(key) for key in keys(3)[::-1]] == [True, True, False]


class Counting(Memory):
    order: list[str]

    def submit(self, ops: Any) -> int:
        kinds = [("read", "write", "sync")[kind] for kind in ops["kind"].tolist()]
        self.order = [*getattr(self, "order", []), *kinds]
        return super().submit(ops)


def test_a_fast_put_waits_for_no_flush_and_is_flushed_within_its_bound() -> None:
    pages = content(3)
    options = replace(PLAIN, device=Counting, flush_after_blocks=3, flush_after_s=3600.0)
    with open_plain(None, options) as runtime:
        device: Any = runtime._parts.device
        device.order.clear()
        for number in range(2):
            block = runtime.put(keys(1, number), pages[number : number + 1], durability="fast")
            assert np.array_equal(read_all(runtime, block.blocks), pages[number : number + 1])
        assert "sync" not in device.order
        assert runtime.stats().store_writes.blocks_at_risk == 2
        runtime.put(keys(1, 2), pages[2:], durability="fast").wait()
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        writes = [kind for kind in device.order if kind != "read"]
        assert writes == [*["write"] * 3, "sync", *["write"] * 4, "sync"]
        assert runtime.stats().store_writes.blocks_at_risk == 0
        with pytest.raises(ValueError, match="durability"):
            runtime.put(keys(1), pages[:1], durability="perhaps")


def test_a_durable_put_of_what_was_put_fast_waits_for_the_flush() -> None:
    options = replace(PLAIN, device=Counting, flush_after_s=3600.0)
    with open_plain(None, options) as runtime:
        fast = runtime.put(keys(1), content(1), durability="fast").blocks
        assert runtime.stats().store_writes.flushes == 0
        assert runtime.put(keys(1), content(1)).blocks.tolist() == fast.tolist()
        writes = runtime.stats().store_writes
        assert (writes.flushes, writes.blocks_admitted, writes.blocks_at_risk) == (2, 1, 0)


def test_a_store_on_several_paths_deals_its_blocks_out(tmp_path: Path) -> None:
    pages = content(BLOCKS)
    folders = [tmp_path / "b", tmp_path / "c"]
    made: dict[str, Any] = {"blocks": BLOCKS, "fill": False, "paths": folders}
    options = replace(PLAIN, device="threads")
    with prefetchd.open(tmp_path / "a", layout(), options=options, **made) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        assert np.array_equal(read_all(runtime, blocks), pages)
    for scan in (False, True):
        with prefetchd.open(tmp_path / "a", options=replace(options, scan=scan)) as runtime:
            assert np.array_equal(read_all(runtime, runtime.lookup(keys(BLOCKS))), pages)
    with pytest.raises(StoreError, match="part 2 of 3 of a store"):
        prefetchd.open(tmp_path / "b", options=options)
    (tmp_path / "b").rename(tmp_path / "x")
    with pytest.raises(StoreError, match="there is no store in"):
        prefetchd.open(tmp_path / "a", options=options)
    (tmp_path / "c").rename(tmp_path / "b")
    (tmp_path / "x").rename(tmp_path / "c")
    with pytest.raises(StoreError, match="should hold its part 2, but holds its part 3"):
        prefetchd.open(tmp_path / "a", options=options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"admission": "some"}, "second-touch"),
        ({"cap_bytes": 0}, "cap_bytes"),
        ({"floor_bytes": -1}, "floor_bytes"),
        ({"flush_after_blocks": 0}, "flush_after_blocks"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(PLAIN, **option)


def test_a_journal_that_cannot_be_written_is_said_once_and_the_headers_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from prefetchd.devices.faulty import Faults, Faulty
    from prefetchd.devices.threads import Threads

    pages = content(3)
    make = lambda *opened: Faulty(Threads(*opened), Faults())  # noqa: E731
    options = replace(PLAIN, device=make)
    with caplog.at_level(logging.INFO), open_plain(tmp_path / "kv", options) as runtime:
        harm_next(runtime, (3, "eio"))  # after payload, flush and header
        for number in range(3):
            runtime.put(keys(1, number), pages[number : number + 1]).wait()
        assert runtime.stats().failures == {"journal: EIO (Input/output error)": 1}
    with caplog.at_level(logging.INFO), open_plain(tmp_path / "kv", options) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(3))), pages)
    assert f"{BLOCKS} headers were read" in caplog.text


def test_a_damaged_journal_is_said_and_the_headers_take_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = content(2)
    options = replace(PLAIN, device="threads")
    with open_plain(tmp_path / "kv", options) as runtime:
        runtime.put(keys(2), pages).wait()
        shape = runtime._parts.store.superblock
    with (tmp_path / "kv" / "extents.dat").open("r+b") as file:
        file.seek(shape.journal_offset + shape.area_bytes + 4096 + 40)
        file.write(b"\xff")
    with open_plain(tmp_path / "kv", options) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(2))), pages)
    assert "its journal is damaged" in caplog.text
    caplog.clear()
    with open_plain(tmp_path / "kv", options) as runtime:
        assert len(runtime.lookup(keys(2))) == 2
    assert "journal is damaged" not in caplog.text


def test_of_a_chain_put_in_pieces_the_end_of_each_piece_goes_first(tmp_path: Path) -> None:
    with open_plain(tmp_path / "kv", replace(PLAIN, device="threads", lease_s=0.0)) as runtime:
        runtime.put(keys(BLOCKS), content(BLOCKS)).wait()
        runtime.put(keys(2, BLOCKS), content(2, seed=5)).wait()
        assert len(runtime.lookup(keys(BLOCKS))) >= BLOCKS // 2


def test_a_smaller_cap_is_kept_soon_after_opening(tmp_path: Path) -> None:
    with open_plain(tmp_path / "kv", replace(PLAIN, device="threads")) as runtime:
        runtime.put(keys(BLOCKS), content(BLOCKS)).wait()
        shape = runtime._parts.catalog.superblock
    beside = shape.file_bytes - BLOCKS * shape.extent_bytes
    few = replace(PLAIN, device="threads", cap_bytes=beside + 2 * shape.extent_bytes)
    with open_plain(tmp_path / "kv", few) as runtime:
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        assert runtime.stats().store_writes.blocks_used == 2
