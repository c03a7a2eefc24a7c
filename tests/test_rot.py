"""Bits that flip on the medium: the block goes and can be put again; nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import prefetchd
from prefetchd import Options, uniform
from prefetchd.format import Superblock
from prefetchd.model import Ids
from tests.runtime_bench import PLAIN, FaultyRuntime, content, harm_next, keys, read_all

BLOCKS, LAYERS, PAGE_BYTES = 250, 8, 4096


def pages_of(seed: int = 1) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (BLOCKS, LAYERS, PAGE_BYTES), np.uint8)


def flip(path: Path, shape: Superblock, blocks: Ids) -> Ids:
    """One bit in each of 1 % of all pages; which pages."""
    random = np.random.default_rng(2)
    harmed: Ids = np.sort(random.choice(BLOCKS * LAYERS, BLOCKS * LAYERS // 100, replace=False))
    with open(path, "r+b") as medium:
        for page in harmed.tolist():
            start = int(shape.extent_offsets(blocks[[page // LAYERS]])[0]) + shape.header_bytes
            place = start + page % LAYERS * shape.slot_bytes + int(random.integers(PAGE_BYTES))
            medium.seek(place)
            byte = medium.read(1)[0]
            medium.seek(place)
            medium.write(bytes([byte ^ 1 << int(random.integers(8))]))
    return harmed


def test_a_flipped_bit_in_one_page_of_a_hundred(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout, pages = uniform(LAYERS, PAGE_BYTES), pages_of()
    options = Options(
        device="threads", predictor="none", evict="lru", staging_bytes=40 * PAGE_BYTES
    )
    names = keys(BLOCKS)
    with prefetchd.open(tmp_path / "kv", layout, blocks=BLOCKS, options=options) as runtime:
        blocks = runtime.put(names, pages).blocks
        shape = runtime._parts.store.superblock
    harmed = flip(tmp_path / "kv" / "extents.dat", shape, blocks)
    bad = set((harmed // LAYERS).tolist())
    with prefetchd.open(tmp_path / "kv", options=options) as runtime:
        missing = 0
        for number in range(BLOCKS):
            for layer in range(LAYERS):
                block = runtime.lookup(names[number : number + 1])
                if len(block) == 0:
                    continue
                with runtime.demand(runtime.pages(block, layer)) as ticket:
                    if ticket.missing[0]:
                        missing += 1
                    else:
                        assert np.array_equal(ticket.view(0), pages[number, layer])
        gone = {n for n in range(BLOCKS) if len(runtime.lookup(names[n : n + 1])) == 0}
        assert gone == bad
        stats = runtime.stats()
        assert stats.store_writes.blocks_rotten == len(bad)
        assert stats.failures["checksum mismatch"] == 2 * missing, "each was read once more"
        assert caplog.text.count("checksum mismatch") == 1
        assert caplog.text.count("is removed, so that it can be put again") == 1
        put = runtime.put(names, pages)
        assert put.wait().failures == []
        assert runtime.stats().store_writes.blocks_admitted == len(bad)
    for scan in (False, True):
        with prefetchd.open(tmp_path / "kv", options=replace(options, scan=scan)) as runtime:
            found = runtime.lookup(names)
            assert len(found) == BLOCKS
            for number in sorted(bad):
                with runtime.demand(runtime.pages(found[[number]], 0)) as ticket:
                    assert np.array_equal(ticket.view(0), pages[number, 0])


@pytest.mark.parametrize("fault", ["eio", "short"])
def test_a_read_that_fails_removes_nothing_however_often(fault: str) -> None:
    pages = content(2)
    with FaultyRuntime(options=PLAIN) as runtime:
        blocks = runtime.put(keys(2), pages).blocks
        for _ in range(10):
            harm_next(runtime, (0, fault), (1, fault))
            with runtime.demand(runtime.pages(blocks[:1], 0)) as ticket:
                assert ticket.missing.all()
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(2))), pages)
        assert runtime.stats().store_writes.blocks_rotten == 0


def test_a_page_that_is_right_the_second_time_is_forgiven_the_first() -> None:
    pages = content(1)
    with FaultyRuntime(options=replace(PLAIN, staging_bytes=12_288)) as runtime:
        blocks = runtime.put(keys(1), pages).blocks
        for layer in (0, 1, 0, 1, 0):
            harm_next(runtime, (0, "flip"))
            with runtime.demand(runtime.pages(blocks, layer)) as ticket:
                assert np.array_equal(ticket.view(0), pages[0, layer])
        assert runtime.stats().failures == {"checksum mismatch": 5}
        assert runtime.stats().store_writes.blocks_rotten == 0
