"""A fast put is found at once, out of staging, and kept there until the device has written it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefetchd import Outcome, Runtime
from prefetchd.devices.faulty import Faulty
from prefetchd.writer import Writer
from tests.runtime_bench import (
    HASTY,
    LAYERS,
    PAGE_BYTES,
    PLAIN,
    FaultyRuntime,
    content,
    harm_next,
    keys,
    open_plain,
    pinned,
    read_all,
)

QUICK = replace(HASTY, put_timeout_s=0.2, flush_after_s=3600.0)


def slots(count: int) -> int:
    return count * PAGE_BYTES


def device(runtime: Runtime) -> Faulty:
    found: Any = runtime._parts.device
    assert isinstance(found, Faulty)
    return found


def settle(runtime: Runtime) -> None:
    runtime._parts.driver.writer.commit.draining = True
    runtime.engine.look_after_writes()
    writer = runtime._parts.driver.writer
    runtime.engine.wait(lambda: writer.idle)
    runtime._parts.driver.writer.commit.draining = False


def test_it_is_found_and_read_while_the_device_has_written_nothing() -> None:
    pages = content(2)
    with FaultyRuntime(options=QUICK) as runtime:
        harm_next(runtime, (0, "stall"), (1, "stall"))
        put = runtime.put(keys(2), pages, durability="fast")
        assert put.done
        blocks = runtime.lookup(keys(2))
        assert blocks.tolist() == put.blocks.tolist()
        with runtime.demand(runtime.pages(blocks, 1)) as ticket:
            assert (ticket.outcomes == Outcome.RETAINED).all()
        assert np.array_equal(read_all(runtime, blocks), pages)
        stats = runtime.stats()
        assert (stats.pages_read, stats.store_writes.blocks_at_risk) == (0, 2)
        device(runtime).release_stalled()
        settle(runtime)
        writes = runtime.stats().store_writes
        assert (writes.blocks_staged, writes.blocks_waited, writes.blocks_at_risk) == (2, 0, 0)
        runtime._parts.core.staging.check()
        assert pinned(runtime) == 0


def test_what_is_read_from_the_store_later_is_what_was_staged() -> None:
    pages = content(4)
    with open_plain(None, replace(PLAIN, staging_bytes=slots(2 * LAYERS))) as runtime:
        for number in range(4):
            put = runtime.put(keys(1, number), pages[number : number + 1], durability="fast")
            assert np.array_equal(read_all(runtime, put.blocks), pages[number : number + 1])
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(4))), pages)
        assert runtime.stats().pages_read > 0
        assert runtime.stats().failures == {}


def test_dirty_pages_are_not_evicted_and_without_room_a_put_is_found_once_written() -> None:
    pages = content(3)
    with FaultyRuntime(options=replace(QUICK, staging_bytes=slots(2 * LAYERS))) as runtime:
        known = runtime.put(keys(1, 9), content(1, seed=2)).blocks
        harm_next(runtime, (0, "stall"), (1, "stall"), (2, "stall"))
        first = runtime.put(keys(1), pages[:1], durability="fast")
        second = runtime.put(keys(2, 1), pages[1:], durability="fast")  # more than half of staging
        assert first.done
        assert not second.done
        for _ in range(2):
            read_all(runtime, known)
        assert runtime._parts.core.fills.kept == LAYERS
        with runtime.demand(runtime.pages(first.blocks, 0)) as ticket:
            assert ticket.outcomes.tolist() == [Outcome.RETAINED]
        device(runtime).release_stalled()
        assert np.array_equal(read_all(runtime, second.blocks), pages[1:])
        writes = runtime.stats().store_writes
        assert (writes.blocks_staged, writes.blocks_waited) == (1, 2)


@pytest.mark.parametrize("fault", ["eio", "enospc"])
def test_a_block_that_cannot_be_written_is_gone_and_its_put_is_told(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = content(2)
    with caplog.at_level(logging.WARNING), FaultyRuntime(options=QUICK) as runtime:
        harm_next(runtime, (0, "stall"), (1, "stall"))
        put = runtime.put(keys(2), pages, durability="fast")
        again = runtime.put(keys(1), pages[:1], durability="fast")
        assert put.done
        assert again.done
        reader = runtime.demand(runtime.pages(put.blocks, 0)).wait()
        harm_next_stalled(runtime, fault)
        settle(runtime)
        assert runtime.lookup(keys(2)).tolist() == []
        assert put.blocks[0] == again.blocks[0] == -1
        assert put.blocks[1] >= 0
        assert "block 0 was lost after it was found: E" in put.failures[0]
        assert len(again.failures) == 1
        assert np.array_equal(np.stack(reader.views()), pages[:, 0])  # as long as it is read
        assert runtime.stats().store_writes.blocks_used == 2
        reader.release()
        runtime.lookup(keys(1))
        assert runtime.stats().store_writes.blocks_used == 1
        writes = runtime.stats().store_writes
        assert (writes.blocks_lost, writes.blocks_at_risk) == (1, 0)
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(1, 1))), pages[1:])
        better = runtime.put(keys(1), pages[:1])
        assert np.array_equal(read_all(runtime, better.blocks), pages[:1])
        runtime._parts.core.staging.check()
    assert caplog.text.count("could not be written") == 1


def harm_next_stalled(runtime: Runtime, fault: str) -> None:
    """The first operation that stalls ends with an error, the others as they should."""
    stalled = device(runtime)._stalled
    _, op = stalled.pop(0)
    passed = device(runtime)._inject(fault, 0.0, op[0])
    assert not passed
    device(runtime).release_stalled()


def test_a_write_that_does_not_end_is_given_up_and_its_extent_is_not_used_again() -> None:
    pages = content(2)
    with FaultyRuntime(options=replace(QUICK, put_timeout_s=0.05)) as runtime:
        harm_next(runtime, (0, "stall"))
        put = runtime.put(keys(1), pages[:1], durability="fast")
        (block,) = put.blocks.tolist()
        runtime.engine.wait(lambda: bool(put.failures))
        assert runtime.lookup(keys(1)).tolist() == []
        assert pinned(runtime) == 0
        better = runtime.put(keys(1), pages[1:])
        assert better.blocks[0] != block
        device(runtime).release_stalled()
        settle(runtime)
        assert runtime.lookup(keys(1)).tolist() == better.blocks.tolist()
        assert np.array_equal(read_all(runtime, better.blocks), pages[1:])
        assert runtime.stats().store_writes.blocks_used == 1
        assert runtime.stats().writes_given_up == 0


def test_a_late_write_that_ends_well_while_its_key_is_copied_again_stays_the_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = content(1)
    with FaultyRuntime(options=replace(QUICK, put_timeout_s=0.05)) as runtime:
        harm_next(runtime, (1, "stall"))  # the flush
        late = runtime.put(keys(1), pages)
        assert late.blocks.tolist() == [-1]
        plain, catalog = Writer.fill, runtime._parts.catalog
        runtime._puts._write_timeout_ns = 30 * 10**9

        def slow(writer: Writer, job: Any, rows: Any) -> Any:
            device(runtime).release_stalled()
            runtime.engine.wait(lambda: catalog.find(job.key) >= 0)
            return plain(writer, job, rows)

        monkeypatch.setattr(Writer, "fill", slow)
        again = runtime.put(keys(1), pages, durability="fast")
        assert runtime.lookup(keys(1)).tolist() == again.blocks.tolist() == [0]
        settle(runtime)
        assert np.array_equal(read_all(runtime, again.blocks), pages)
        stats = runtime.stats()
        assert (stats.store_writes.blocks_used, stats.writes_given_up) == (1, 0)
        assert pinned(runtime) == 0


def test_a_key_whose_block_expired_before_it_was_flushed_can_be_put_again() -> None:
    pages = content(1)
    with open_plain(None, replace(PLAIN, flush_after_s=3600.0)) as runtime:
        runtime.put(keys(1), pages, durability="fast", ttl_s=5.0).wait()
        now_ns = runtime.room.wall_ns()
        runtime.room.wall_ns = lambda: now_ns + 10**10
        again = runtime.put(keys(1), pages).wait()
        assert runtime.lookup(keys(1)).tolist() == again.blocks.tolist()
        assert runtime.stats().failures == {}
        assert np.array_equal(read_all(runtime, again.blocks), pages)


def test_a_durable_put_of_a_block_that_is_found_already_waits_for_the_medium() -> None:
    pages = content(1)
    with FaultyRuntime(options=QUICK) as runtime:
        harm_next(runtime, (0, "stall"))
        fast = runtime.put(keys(1), pages, durability="fast")
        durable = runtime.put(keys(1), pages)
        assert fast.done
        assert not durable.done
        device(runtime).release_stalled()
        assert durable.blocks.tolist() == fast.blocks.tolist()
        writes = runtime.stats().store_writes
        assert (writes.blocks_at_risk, writes.blocks_admitted) == (0, 1)
        assert fast.failures == []
