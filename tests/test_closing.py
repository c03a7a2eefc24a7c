"""What a runtime says at its two ends: of a size that was not had, of a store not marked clean."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import Runtime, StoreError
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.threads import Threads
from tests.runtime_bench import (
    BLOCKS,
    PLAIN,
    FaultyRuntime,
    content,
    harm_next,
    keys,
    layout,
    open_plain,
    read_all,
)

DIRECT = replace(PLAIN, device="threads")


def open_failing(path: Path) -> Runtime:
    """A runtime whose last write, the mark, fails; one put of two blocks comes before it."""

    def make(*opened: Any) -> Faulty:
        return Faulty(Threads(*opened), Faults())

    runtime = open_plain(path, replace(DIRECT, device=make))
    runtime.put(keys(2), content(2)).wait()
    harm_next(runtime, (0, "eio"))
    return runtime


def check_nothing_is_lost(path: Path) -> None:
    with open_plain(path, DIRECT) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(2))), content(2))


def test_a_store_that_cannot_be_marked_clean_says_that_it_was_closing(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_failing(tmp_path / "kv").close()
    assert str(caught.value).startswith(
        f"store {tmp_path / 'kv'}: closing it failed, so it is not marked clean; blocks stored "
        "earlier are where they were"
    )
    assert "EIO" in str(caught.value)
    check_nothing_is_lost(tmp_path / "kv")


def test_a_close_does_not_wait_for_flushes_that_fail_again_and_again() -> None:
    faulty = FaultyRuntime()
    runtime = faulty.runtime
    runtime.put(keys(2), content(2), durability="fast").wait()
    faulty.device.broken.add(0)
    runtime.close()
    assert runtime._parts.driver.writer.commit.failed_flushes == 3


def test_a_failed_close_does_not_hide_what_went_wrong_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError) as caught, open_failing(tmp_path / "kv"):
        raise KeyError("the body's own")
    assert "while closing: store" in caught.value.__notes__[0]
    assert "closing it failed" in caplog.text

    async def main() -> None:
        async with open_failing(tmp_path / "other"):
            raise KeyError("the body's own")

    with pytest.raises(KeyError) as caught:
        asyncio.run(main())
    assert "while closing: store" in caught.value.__notes__[0]
    check_nothing_is_lost(tmp_path / "kv")
    with pytest.raises(StoreError, match="closing it failed"), open_failing(tmp_path / "third"):
        pass


def test_another_number_of_blocks_than_the_store_has_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_plain(tmp_path / "kv", DIRECT).close()
    words = f"{BLOCKS + 1} blocks were asked for, but the store was made for {BLOCKS}"
    with prefetchd.open(tmp_path / "kv", layout(), blocks=BLOCKS + 1, options=DIRECT) as runtime:
        assert runtime.geometry.blocks == BLOCKS
        assert words in runtime.notes[0] == runtime.stats().notes[0]
    assert words in caplog.text
    with prefetchd.open(tmp_path / "kv", layout(), blocks=BLOCKS, options=DIRECT) as runtime:
        assert not any("blocks" in note for note in runtime.notes)
