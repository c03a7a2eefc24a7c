"""A path that fails costs its blocks and nothing else, is said once a kind, and can come back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import Runtime, StoreError
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.threads import Threads
from prefetchd.devices.uring import Uring
from tests.runtime_bench import LAYERS, PLAIN, content, keys, layout

BLOCKS = 60
SECOND_NS = 10**9
PAGES = content(2 * BLOCKS, seed=5)


class Striped:
    """A store on three paths, on a device on which a path can be broken."""

    def __init__(self, folder: Path, inner: Any = Threads) -> None:
        self.folder = folder
        self.inner = inner
        self.device: Faulty
        self.options = replace(PLAIN, device=self._make, staging_bytes=12 * 12_288)

    def _make(self, files: Any, arena: Any, depth: int) -> Faulty:
        self.device = Faulty(self.inner(files, arena, depth), Faults())
        return self.device

    def open(self, **words: Any) -> Runtime:
        paths = [self.folder / "b", self.folder / "c"]
        first = self.folder / "a"
        return prefetchd.open(
            first, layout(), blocks=BLOCKS, fill=False, paths=paths, options=self.options, **words
        )


def read_known(runtime: Runtime, number: int) -> bool:
    """Whether all pages of this key's block could be had; they are then the right ones."""
    block = runtime.lookup(keys(1, number))
    if len(block) == 0:
        return False
    whole = True
    for layer in range(LAYERS):
        with runtime.demand(runtime.pages(block, layer)) as ticket:
            if ticket.missing[0]:
                whole = False
            else:
                assert np.array_equal(ticket.view(0), PAGES[number, layer])
    return whole


def advance(runtime: Runtime, seconds: float) -> None:
    """Let the engine's clock run ahead."""
    clock = runtime.engine.clock
    runtime.engine.clock = lambda: clock() + int(seconds * SECOND_NS)


def probe(runtime: Runtime, number: int) -> None:
    """Use the store until the path that is due has been tried as often as it takes."""
    for _ in range(8):
        advance(runtime, 700)
        read_known(runtime, number)
        runtime.engine.wait(lambda: not runtime._parts.driver._probing)


def test_other_paths_than_a_store_has_are_noted(tmp_path: Path) -> None:
    striped = Striped(tmp_path)
    for _ in range(2):
        with striped.open() as runtime:
            assert not any("were asked for" in note for note in runtime.notes)
    other: dict[str, Any] = {"paths": [tmp_path / "d"], "options": striped.options}
    with prefetchd.open(tmp_path / "a", layout(), **other) as runtime:
        [note] = [note for note in runtime.notes if "were asked for" in note]
    assert str(tmp_path / "d") in note
    assert f"made with {tmp_path / 'b'}, {tmp_path / 'c'}" in note
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("inner", [Threads, Uring])
@pytest.mark.parametrize("path", [0, 2])
def test_one_of_three_paths_fails_in_the_middle_of_traffic(
    inner: Any, path: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    striped = Striped(tmp_path, inner)
    random = np.random.default_rng(4)
    with striped.open() as runtime:
        first = runtime.put(keys(BLOCKS // 2), PAGES[: BLOCKS // 2]).blocks
        assert first.min() >= 0
        striped.device.broken = {path}
        there = set(range(BLOCKS // 2))
        for _ in range(300):
            number = int(random.integers(BLOCKS // 2))
            if read_known(runtime, number):
                assert first[number] % 3 != path
            else:
                there.discard(number)
        assert there == {n for n in range(BLOCKS // 2) if first[n] % 3 != path}
        lost = sorted(set(range(BLOCKS // 2)) - there)
        for number in lost:  # what is missing can be put again, and goes elsewhere
            put = runtime.put(keys(1, number), PAGES[number : number + 1])
            assert put.wait().failures == []
            assert put.blocks[0] % 3 != path
        assert all(read_known(runtime, number) for number in range(BLOCKS // 2))
        states = runtime.stats().paths
        assert [one.reading == "failed" for one in states] == [n == path for n in range(3)]
        assert states[path].errors < 40, "a failed path is not asked again and again"
        assert min(one.bytes_read for one in states) > 0
        assert min(one.bytes_written for one in states) > 0
        striped.device.broken = set()
    name = f"{'abc'[path]}/extents.dat"
    told = [r.getMessage() for r in caplog.records if name in r.getMessage()]
    assert len(told) == len(set(told)), "each kind once a path"
    assert len([words for words in told if ": EIO" in words and "flush" not in words]) == 1
    assert len([words for words in told if "this path has failed" in words]) == 1
    assert not [
        record
        for record in caplog.records
        if "extents.dat" in record.getMessage() and name not in record.getMessage()
    ]


def test_demands_of_blocks_that_were_found_before_are_misses_at_once(tmp_path: Path) -> None:
    striped = Striped(tmp_path)
    with striped.open() as runtime:
        blocks = runtime.put(keys(30), PAGES[:30]).blocks
        striped.device.broken = {1}
        for number in range(30):
            read_known(runtime, number)
        asked = striped.device.injected["eio"]
        gone = blocks[blocks % 3 == 1]
        with runtime.demand(runtime.pages(gone, 0)) as ticket:
            assert ticket.missing.all()
        assert striped.device.injected["eio"] == asked, "nobody waited for the device"
        stats = runtime.stats()
        assert stats.paths[1].refused >= len(gone)
        assert stats.failures["path has failed"] >= len(gone)
        striped.device.broken = set()


def test_a_path_comes_back_with_its_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    striped = Striped(tmp_path)
    with striped.open() as runtime:
        blocks = runtime.put(keys(30), PAGES[:30]).blocks
        striped.device.broken = {1}
        for number in range(30):
            read_known(runtime, number)
        away = [number for number in range(30) if blocks[number] % 3 == 1]
        again = runtime.put(keys(1, away[0]), PAGES[away[0] : away[0] + 1]).blocks
        probe(runtime, 0)
        assert runtime.stats().paths[1].reading == runtime.stats().paths[1].writing == "failed"
        striped.device.broken = set()
        probe(runtime, 0)
        assert all(read_known(runtime, number) for number in range(30))
        assert runtime.lookup(keys(1, away[0])).tolist() == again.tolist()
        assert runtime.lookup(keys(1, away[1])).tolist() == [blocks[away[1]]]
        states = runtime.stats().paths
        assert "failed" not in {one.reading for one in states} | {one.writing for one in states}
        more = runtime.put(keys(24, 30), PAGES[30:54])
        assert more.wait().failures == []
        assert (more.blocks % 3 == 1).any(), "it is written again"
        used = runtime.stats().store_writes.blocks_used
        assert used == runtime.stats().blocks_visible == 54, "the older copy is gone"
    assert caplog.text.count("can be read again") == 1
    assert caplog.text.count("is written again") == 1
    for scan in (False, True):
        striped.options = replace(striped.options, scan=scan)
        with striped.open() as runtime:
            assert all(read_known(runtime, number) for number in range(54))


def test_a_path_that_can_only_be_read_is_read(tmp_path: Path) -> None:
    striped = Striped(tmp_path)
    with striped.open() as runtime:
        blocks = runtime.put(keys(30), PAGES[:30]).blocks
        driver = runtime._parts.driver
        with runtime.engine.lock:
            driver.paths.failed(2, 8, runtime.engine.clock(), reading=False)
        put = runtime.put(keys(10, 30), PAGES[30:40])
        assert put.wait().failures == []
        assert not (put.blocks % 3 == 2).any()
        assert all(read_known(runtime, number) for number in range(40))
        state = runtime.stats().paths[2]
        assert (state.reading, state.writing) == ("healthy", "failed")
        assert (blocks % 3 == 2).any()


def test_blocks_put_twice_because_their_path_was_away_are_sorted_out_at_the_next_opening(
    tmp_path: Path,
) -> None:
    striped = Striped(tmp_path)
    with striped.open() as runtime:
        blocks = runtime.put(keys(6), PAGES[:6]).blocks
        striped.device.broken = {1}
        for _ in range(4):
            for number in range(6):
                read_known(runtime, number)
        away = next(number for number in range(6) if blocks[number] % 3 == 1)
        runtime.put(keys(1, away), PAGES[away : away + 1]).wait()
        # Closed at once: nobody has had the time to remove the older copy.
    with striped.open() as runtime:
        stats = runtime.stats()
        assert stats.blocks_visible == stats.store_writes.blocks_used == 6
        assert all(read_known(runtime, number) for number in range(6))


def test_a_store_opens_without_a_path_only_if_that_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    striped = Striped(tmp_path)
    with striped.open() as runtime:
        blocks = runtime.put(keys(30), PAGES[:30]).blocks
    shutil.move(tmp_path / "b", tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="allow_missing_paths") as refused:
        striped.open()
    assert str(tmp_path / "b") in str(refused.value)
    for inner in (Threads, Uring):
        striped.inner = inner
        with striped.open(allow_missing_paths=True) as runtime:
            known = {number for number in range(30) if read_known(runtime, number)}
            assert known == {number for number in range(30) if blocks[number] % 3 != 1}
            put = runtime.put(keys(4, 30), PAGES[30:34])
            assert put.wait().failures == []
            assert not (put.blocks % 3 == 1).any()
            assert runtime.stats().paths[1].reading == "failed"
    assert caplog.text.count(f"{tmp_path / 'b'}") >= 1
    shutil.move(tmp_path / "elsewhere", tmp_path / "b")
    with striped.open() as runtime:
        assert all(read_known(runtime, number) for number in range(34))


def test_the_first_path_cannot_be_missing(tmp_path: Path) -> None:
    striped = Striped(tmp_path)
    striped.open().close()
    shutil.move(tmp_path / "a", tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="no store in"):
        prefetchd.open(tmp_path / "a", options=striped.options, allow_missing_paths=True)
    with pytest.raises(StoreError, match="open the folder of its first part"):
        prefetchd.open(tmp_path / "b", options=striped.options, allow_missing_paths=True)
