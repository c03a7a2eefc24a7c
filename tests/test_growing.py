"""Open blocks are written bit by bit and read all the while; at their end nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd import GrowError, GrowingBlock, Options, Runtime
from prefetchd.core import CoreLimits
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.model import Ids
from tests.runtime_bench import (
    BLOCKS,
    LAYERS,
    PAGE_BYTES,
    PLAIN,
    content,
    harm_next,
    keys,
    open_plain,
    pinned,
    read_all,
)

LEVELS = pytest.mark.parametrize("level", ["durable", "fast"])
IMPATIENT = replace(PLAIN, demand_timeout_s=0.2)


def faulty(options: Options = PLAIN) -> Runtime:
    return open_plain(
        None, replace(options, device=lambda *opened: Faulty(Memory(*opened), Faults()))
    )


def write(block: GrowingBlock, pages: NDArray[np.uint8]) -> None:
    for layer in range(LAYERS):
        block.write(layer, pages[layer], 0)


def read(runtime: Runtime, block: GrowingBlock) -> NDArray[np.uint8]:
    page: NDArray[np.uint8] = read_all(runtime, np.array([block.number]))[0]
    return page


def is_gone(runtime: Runtime, pages: Ids) -> bool:
    with runtime.demand(pages).wait() as ticket:
        return bool(ticket.missing.all())


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with open_plain(None, IMPATIENT) as runtime:
        yield runtime
        check_nothing_is_left(runtime)


def check_nothing_is_left(runtime: Runtime) -> None:
    """No slot, extent or buffer is held for anything but blocks that are found."""
    writer = runtime._parts.driver.writer
    runtime.engine.wait(lambda: writer.in_flight == 0)
    runtime.lookup([])
    runtime.engine.wait(lambda: writer.commit.removing == 0)
    stats = runtime.stats()
    assert stats.store_writes.blocks_open == 0
    assert stats.store_writes.blocks_used == stats.blocks_visible
    assert pinned(runtime) == 0
    assert runtime._parts.core.fills.kept == 0
    runtime._parts.core.staging.check()


@LEVELS
def test_it_is_read_beside_sealed_blocks_while_it_grows_and_after(
    level: str, runtime: Runtime
) -> None:
    pages = content(2)
    known = runtime.put(keys(1), pages[:1]).blocks
    with runtime.grow() as block:
        assert not read(runtime, block).any()
        seen = runtime.demand(block.pages(0)).wait()
        for at in range(0, PAGE_BYTES, PAGE_BYTES // 4):
            for layer in range(LAYERS):
                part = pages[1, layer, at : at + PAGE_BYTES // 4]
                block.write(layer, part.view(np.float16).reshape(2, -1), at)
                wanted = np.concatenate([runtime.pages(known, layer), block.pages(layer)])
                with runtime.demand(wanted) as ticket:
                    old, new = ticket.views()
                    end = at + len(part)
                    assert np.array_equal(old, pages[0, layer])
                    assert np.array_equal(new[:end], pages[1, layer, :end])
                    assert not new[end:].any()
        assert np.array_equal(seen.view(0), pages[1, 0])
        assert runtime.lookup(keys(2)).tolist() == known.tolist()
        put = block.seal(keys(1, 1)[0], durability=level)
        assert np.array_equal(read(runtime, block), pages[1])
        assert put.blocks.tolist() == [block.number]
        seen.release()
    assert not block.is_open
    assert np.array_equal(read_all(runtime, runtime.lookup(keys(2))), pages)
    assert runtime.stats().store_writes.blocks_staged == (level == "fast")


@LEVELS
def test_a_sealed_block_is_evicted_and_read_again_like_any_other(level: str) -> None:
    pages = content(3)
    with open_plain(None, replace(PLAIN, staging_bytes=2 * LAYERS * PAGE_BYTES)) as runtime:
        for number in range(3):
            block = runtime.grow()
            write(block, pages[number])
            block.seal(keys(1, number)[0], durability=level).wait()
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(3))), pages)
        assert runtime.stats().pages_read > 0
        check_nothing_is_left(runtime)


def test_what_ends_early_leaves_nothing(runtime: Runtime) -> None:
    block = runtime.grow(request=7)
    write(block, content(1)[0])
    reader = runtime.demand(block.pages(0)).wait()
    pages = block.pages(1)
    block.drop()
    block.drop()
    for call in (
        lambda: block.write(0, content(1)[0, 0], 0),
        lambda: block.seal(keys(1)[0]),
        lambda: block.number,
    ):
        with pytest.raises(ValueError, match="dropped"):
            call()
    assert is_gone(runtime, pages)
    assert runtime.stats().store_writes.blocks_used == 1
    assert np.array_equal(reader.view(0), content(1)[0, 0])  # as long as it is read
    reader.release()

    with pytest.raises(TypeError), runtime.grow() as block:
        block.write(0, content(1)[0, 0], at="here")  # type: ignore[arg-type]
    assert runtime.lookup(keys(1)).tolist() == []


def test_close_and_death_leave_nothing_of_an_open_block(tmp_path: Path) -> None:
    options = replace(PLAIN, device="threads")
    for ends_well in (True, False):
        runtime = open_plain(tmp_path / "kv", options)
        runtime.put(keys(1), content(1)).wait()
        block = runtime.grow()
        write(block, content(1, seed=5)[0])
        if ends_well:
            runtime.close()
            assert not block.is_open
            block.drop()
        else:  # what the process had in memory is gone with it
            runtime.engine.stop()
            runtime._parts.close(clean=False)
        with open_plain(tmp_path / "kv", options) as runtime:
            stats = runtime.stats()
            assert (stats.blocks_visible, stats.store_writes.blocks_used) == (1, 1)


def test_bounds_are_told() -> None:
    greedy = replace(IMPATIENT, core=CoreLimits(filled_share_max=1.0))
    with open_plain(None, greedy) as runtime:
        blocks = [runtime.grow(request=number) for number in range(BLOCKS)]
        with pytest.raises(GrowError, match=f"all {BLOCKS} blocks of the store are in use"):
            runtime.grow()
        put = runtime.put(keys(1), content(1))
        assert "blocks of the store are in use" in put.wait().failures[0]
        for block in blocks:
            block.drop()
        check_nothing_is_left(runtime)

    with open_plain(None, replace(IMPATIENT, open_blocks_max=2)) as other:
        with other.grow(request=3), other.grow(request=5):
            words = "2 blocks are open, the most allowed, of requests 3, 5"
            with pytest.raises(GrowError, match=words):
                other.grow()
        other.grow().drop()

    small = replace(IMPATIENT, staging_bytes=(2 * LAYERS - 1) * PAGE_BYTES)
    with open_plain(None, small) as other, pytest.raises(GrowError, match="takes 3 pages"):
        other.grow()
    small = replace(IMPATIENT, staging_bytes=2 * LAYERS * PAGE_BYTES)
    with open_plain(None, small) as other:
        known = other.put(keys(2), content(2)).blocks
        wanted = np.concatenate([other.pages(known, layer) for layer in range(2)])
        with other.demand(wanted):
            with pytest.raises(GrowError, match="staging has no room for its 3 pages"):
                other.grow()
            assert other.stats().store_writes.blocks_used == 2
        with other.grow(), pytest.raises(GrowError, match="all that staging keeps"):
            other.grow()
        check_nothing_is_left(other)


def test_a_full_store_makes_room_for_an_open_block_and_never_evicts_it(runtime: Runtime) -> None:
    pages = content(BLOCKS + 3)
    runtime.put(keys(BLOCKS), pages[:BLOCKS]).wait()
    with runtime.grow() as block:
        write(block, pages[-1])
        runtime.put(keys(BLOCKS + 2), pages[: BLOCKS + 2]).wait()
        assert np.array_equal(read(runtime, block), pages[-1])
        block.seal(keys(1, 50)[0]).wait()
    assert np.array_equal(read_all(runtime, runtime.lookup(keys(1, 50))), pages[-1:])


@LEVELS
def test_a_key_that_is_there_already_keeps_its_block(level: str, runtime: Runtime) -> None:
    pages = content(1)
    known = runtime.put(keys(1), pages).blocks
    block = runtime.grow()
    write(block, pages[0])
    assert block.seal(keys(1)[0], durability=level).blocks.tolist() == known.tolist()
    assert block.number == known[0]
    assert np.array_equal(read(runtime, block), pages[0])


def test_a_key_that_is_on_its_way_is_waited_for() -> None:
    pages = content(1)
    with faulty() as runtime:
        harm_next(runtime, (0, "stall"))
        first = runtime.put(keys(1), pages)
        block = runtime.grow()
        own = block.number
        write(block, pages[0])
        put = block.seal(keys(1)[0])
        assert not put.done
        assert np.array_equal(read(runtime, block), pages[0])
        device: Any = runtime._parts.device
        device.release_stalled()
        assert put.blocks.tolist() == first.blocks.tolist() == [block.number] != [own]
        check_nothing_is_left(runtime)


def test_what_is_refused_stays_open() -> None:
    pages = content(1)
    with open_plain(None, replace(PLAIN, admission="second-touch")) as runtime:
        with runtime.grow() as block:
            write(block, pages[0])
            assert block.seal(keys(1)[0]).refused == [0]
            assert block.is_open
            assert np.array_equal(read(runtime, block), pages[0])
            assert block.seal(keys(1)[0]).blocks.tolist() == [block.number]
        check_nothing_is_left(runtime)
        with pytest.raises(ValueError, match="durability"), runtime.grow() as block:
            block.seal(keys(1, 1)[0], durability="maybe")
        with runtime.grow() as block:
            for layer, at in ((LAYERS, 0), (0, 1), (0, -1)):
                with pytest.raises(ValueError, match="a block has 3 layers"):
                    block.write(layer, pages[0, 0], at)
            with pytest.raises(ValueError, match="layer 3 of a store"):
                block.pages(LAYERS)
        check_nothing_is_left(runtime)


@LEVELS
@pytest.mark.parametrize("operation", [0, 1, 2, 4])
def test_a_seal_that_fails_at_any_step_leaves_nothing_wrong(level: str, operation: int) -> None:
    """Payload, flush, header, flush; number 3 is the journal, which only costs the journal."""
    pages = content(1)
    with faulty(replace(PLAIN, flush_after_s=0.0)) as runtime:
        harm_next(runtime, (operation, "eio"))
        block = runtime.grow()
        own = block.number
        write(block, pages[0])
        put = block.seal(keys(1)[0], durability=level)
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        stored = level == "fast" and operation in {1, 4}  # a flush is tried again
        assert stored or put.failures or (level, operation) == ("fast", 2)
        assert runtime.stats().store_writes.blocks_lost == (not stored)
        assert (runtime.lookup(keys(1)).tolist() == [own]) == stored
        if not stored:
            assert is_gone(runtime, block.pages(0))
            again = runtime.put(keys(1), pages).blocks
            assert np.array_equal(read_all(runtime, again), pages)
        check_nothing_is_left(runtime)


def test_more_open_blocks_than_staging_keeps_are_refused_at_once() -> None:
    """Nobody but the caller could make room, so waiting for it would be for ever."""
    options = replace(PLAIN, staging_bytes=4 * LAYERS * PAGE_BYTES, demand_timeout_s=10**6)
    with open_plain(None, options) as runtime:
        opened = [runtime.grow(), runtime.grow()]
        with pytest.raises(GrowError, match="2 blocks are open, all that staging keeps"):
            runtime.grow()
        opened[0].drop()
        runtime.grow().drop()
