"""The store through its device: the first operations, the headers, the alignment."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import StoreError, store_making, store_opening
from prefetchd.device import DONE, OP, READ, WRITE, Completions, File, Ops
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.devices.threads import Threads
from prefetchd.hostinfo import Medium, medium_of
from prefetchd.testing import aligned_arena
from prefetchd.transfers import transfer
from tests.runtime_bench import (
    BLOCKS,
    OPENING,
    PLAIN,
    content,
    keys,
    open_plain,
    read_all,
)

DIRECT = replace(PLAIN, device="threads")


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    """A store that holds two blocks, closed."""
    with open_plain(tmp_path / "kv", DIRECT) as runtime:
        runtime.put(keys(2), content(2)).wait()
    return tmp_path / "kv"


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(StoreError) as caught:
        act()
    return str(caught.value)


def opening(path: Path, **options: Any) -> str:
    return refusal(lambda: open_plain(path, replace(DIRECT, **options)))


# --- the first operations through the device ---


@pytest.mark.parametrize(("operation", "what"), [(0, "writing"), (1, "flushing"), (2, "reading")])
def test_a_device_that_refuses_its_first_operations_is_told(
    operation: int, what: str, kv: Path
) -> None:
    class Refuses(Threads):
        count = 0

        def reap(self) -> Completions:
            done = super().reap()
            for one in done:
                if self.count == operation:
                    one["result"] = -errno.EINVAL
                self.count += 1
            return done

    words = opening(kv, device=Refuses)
    assert words.startswith(f"store {kv}: {what} the first page through threads failed: EINVAL (")
    assert "O_DIRECT was accepted at open but does not work here" in words
    assert "use another path" in words
    open_plain(kv, DIRECT).close()


def test_a_device_that_reads_back_something_else_is_told(kv: Path) -> None:
    def make(files: Any, arena: Any, depth: int) -> Faulty:
        return Faulty(Threads(files, arena, depth), Faults(script=((2, "flip"),)))

    assert "reads back different" in opening(kv, device=make)


def test_a_header_that_cannot_be_read_is_not_written_over(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pages = content(BLOCKS)

    def make(*faults: tuple[int, str]) -> Callable[..., Faulty]:
        return lambda *opened: Faulty(Threads(*opened), Faults(script=faults))

    first, again = OPENING + 2, OPENING + 2 + BLOCKS  # after the heads of the journal's areas
    once = replace(DIRECT, device=make((first, "eio")), scan=True)
    with open_plain(kv, once) as runtime:
        assert len(runtime.lookup(keys(2))) == 2, "a passing error is passed over"
    device = make((first, "eio"), (again, "eio"))
    always = replace(DIRECT, device=device, scan=True, evict_blocks=False)
    with open_plain(kv, always) as runtime:
        assert runtime.lookup(keys(2)).tolist() == []
        assert np.count_nonzero(runtime.put(keys(BLOCKS, 2), pages).blocks < 0) == 2
    assert "1 headers cannot be read: EIO" in caplog.text
    with open_plain(kv, DIRECT) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(2))), content(2))


class Hasty(Memory):
    """Every second time it has nothing after all, else a stranger's completion comes first."""

    turns = 0

    def reap(self) -> Completions:
        self.turns += 1
        if self.turns % 2:
            return np.empty(0, DONE)
        return np.concatenate([np.array([(2**40, 4096)], DONE), super().reap()])

    def wait(self, timeout_ns: int, count: int = 1) -> None:
        pass


def test_a_transfer_is_not_misled_by_an_early_wake_up_or_a_strangers_completion() -> None:
    device = Hasty([File(-1, "memory", 1 << 16)], aligned_arena(1 << 16), 4)
    ops = np.zeros(10, OP)
    ops["tag"] = np.arange(10)
    ops["offset"] = ops["memory"] = np.arange(10) * 4096
    ops["length"], ops["kind"] = 4096, READ
    assert transfer(device, ops).tolist() == [4096] * 10
    device.close()


# --- alignment ---


@pytest.mark.parametrize("page_bytes", [18_432, 33_792])
def test_a_drive_with_a_large_alignment_gets_padded_slots_and_gives_exact_bytes(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarse(fd: int, path: str) -> Medium:
        return replace(medium_of(fd, path), offset_alignment_bytes=16_384)

    seen: list[Ops] = []

    class Watched(Threads):
        def submit(self, ops: Ops) -> int:
            seen.append(ops.copy())
            return super().submit(ops)

    monkeypatch.setattr(store_opening, "medium_of", coarse)
    monkeypatch.setattr(store_making, "medium_of", coarse)
    pages = content(BLOCKS, page_bytes)
    options = replace(PLAIN, device=Watched)
    with open_plain(tmp_path / "kv", options, page_bytes) as runtime:
        assert runtime.slot_bytes == -(-page_bytes // 16_384) * 16_384
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        assert np.array_equal(read_all(runtime, blocks), pages)
        address = runtime._parts.device.arena.ctypes.data
    ops = np.concatenate(seen)
    moved = ops[(ops["kind"] == READ) | (ops["kind"] == WRITE)]
    for name in ("offset", "memory", "length"):
        assert (moved[name] % 16_384 == 0).all(), name
    assert address % 16_384 == 0


def test_a_store_whose_alignment_no_longer_fits_is_told(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        store_opening, "medium_of", lambda *_: Medium("ext4", "/dev/x", 512, 16_384)
    )
    words = opening(kv)
    assert "is aligned to 4096 bytes, but here the device needs 16384" in words
    assert "create the store anew" in words
