"""The store's file: made, owned, found again, refused in words that say what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import prefetchd
from prefetchd import StoreError, store_making, store_opening
from prefetchd.exits import judged
from prefetchd.format import FORMAT_VERSION, encode_superblock, newest_superblock
from tests.runtime_bench import (
    BLOCKS,
    PLAIN,
    content,
    keys,
    layout,
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(StoreError) as caught:
        act()
    return str(caught.value)


def opening(path: Path, **options: Any) -> str:
    return refusal(lambda: open_plain(path, replace(DIRECT, **options)))


# --- making and finding ---


def test_a_new_store_is_preallocated_and_reopens_after_a_clean_close(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    store_making.create(
        tmp_path / "kv", layout(), BLOCKS, fill=True, progress=lambda *part: told.append(part)
    )
    opened = store_opening.open_store(tmp_path / "kv", layout())
    shape = opened.superblock
    data = tmp_path / "kv" / "extents.dat"
    assert shape.clean
    assert data.stat().st_size == shape.file_bytes == told[-1][0] == told[-1][1]
    assert data.stat().st_blocks * 512 >= shape.file_bytes, "not sparse"
    opened.release()
    assert "exists already" in refusal(
        lambda: store_making.create(tmp_path / "kv", layout(), 1, fill=False)
    )
    with prefetchd.open(tmp_path / "kv", options=DIRECT):
        assert not newest_superblock(np.fromfile(data, np.uint8, 8192)).clean
    opened = store_opening.open_store(tmp_path / "kv")
    assert opened.superblock.clean
    opened.release()


@pytest.mark.parametrize("blocks", [0, -3])
def test_a_store_holds_at_least_one_block(blocks: int, tmp_path: Path) -> None:
    words = refusal(lambda: store_making.create(tmp_path / "kv", layout(), blocks, fill=False))
    assert words == f"a store holds at least one block, not {blocks}"
    assert not store_opening.exists(tmp_path / "kv")


def test_a_store_that_no_file_can_hold_is_told(tmp_path: Path) -> None:
    words = refusal(lambda: store_making.create(tmp_path / "kv", layout(), 10**17, fill=False))
    assert "more than a file can have; ask for fewer blocks" in words
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("error", [MemoryError("4 EiB"), OverflowError("C long")])
def test_a_number_that_is_too_large_is_no_fault_of_ours(error: Exception) -> None:
    code, words = judged(error)
    assert code == 3
    assert f"too large for this machine: {error}" in str(words)


def test_a_store_has_one_owner_who_is_named(kv: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from prefetchd import store_opening;"
        "opened = store_opening.open_store(Path(sys.argv[1])); print('mine', flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, kv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        words = opening(kv)
        assert f"is in use by process {owner.pid} (python" in words
        assert "stop it, or use another folder" in words
        owner.kill()
        owner.wait()
        open_plain(kv, DIRECT).close()  # a lock ends with its process
    with open_plain(kv, DIRECT):
        assert f"process {os.getpid()} " in opening(kv)


def test_a_refused_opening_gives_the_lock_back(kv: Path) -> None:
    assert "holds no page" in opening(kv, staging_bytes=100)
    with pytest.raises(prefetchd.RegistryError):
        open_plain(kv, replace(DIRECT, evict="nonsense"))
    open_plain(kv, DIRECT).close()


# --- what is wrong with it ---


def test_another_layout_is_named(kv: Path) -> None:
    words = refusal(lambda: prefetchd.open(kv, layout(8_192), options=DIRECT))
    assert "made for another layout: 3 pages of 12288 bytes" in words
    assert "3 pages of 8192 bytes" in words


def corrupt(path: Path, change: Callable[[bytearray], bytearray]) -> None:
    data = path / "extents.dat"
    data.write_bytes(change(bytearray(data.read_bytes())))


def newer(content: bytearray) -> bytearray:
    old = newest_superblock(np.array(content[:8192]))
    shape = msgspec.structs.replace(old, version=FORMAT_VERSION + 1)
    content[:8192] = encode_superblock(shape).tobytes() * 2
    return content


def flipped(content: bytearray) -> bytearray:
    content[30] ^= 1
    content[4096 + 30] ^= 1
    return content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (newer, "format version 4, this program reads 3"),
        (flipped, "superblock is damaged"),
        (lambda content: content[:-4096], "is cut short"),
        (lambda content: content[:10], "superblock is damaged"),
        (lambda _: bytearray(), "is not a prefetchd store"),
        (lambda content: bytearray(len(content)), "is not a prefetchd store"),
    ],
)
def test_what_is_no_store_of_ours_is_told(
    change: Callable[[bytearray], bytearray], words: str, kv: Path
) -> None:
    corrupt(kv, change)
    said = opening(kv)
    assert words in said
    assert str(kv) in said


def test_a_missing_store_and_a_missing_parent_are_told(tmp_path: Path) -> None:
    words = refusal(lambda: prefetchd.open(tmp_path / "kv", options=DIRECT))
    assert words == f"there is no store in {tmp_path / 'kv'}; create one first"
    words = refusal(lambda: prefetchd.open(tmp_path / "kv", layout(), options=DIRECT))
    assert words == f"there is no store in {tmp_path / 'kv'}; give blocks= to have one made"
    words = refusal(lambda: open_plain(tmp_path / "no" / "kv", DIRECT))
    assert "ENOENT (No such file or directory); create its parent folder first" in words


def refuse(monkeypatch: pytest.MonkeyPatch, flag: int, code: int) -> None:
    """Whatever is opened with this flag is refused."""
    really = os.open

    def refusing(path: Any, flags: int, *rest: int, **others: int) -> int:
        if flags & flag:
            raise OSError(code, os.strerror(code), path)
        return really(path, flags, *rest, **others)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EROFS, "mounted read-only; remount it or use another path"),
        (errno.EACCES, "give this user read and write permission"),
        (errno.EINVAL, "does not offer O_DIRECT; use a local disk file system"),
        (errno.EIO, "see the kernel log"),
    ],
)
def test_a_file_that_cannot_be_opened_is_told(
    code: int, remedy: str, kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, os.O_DIRECT, code)
    words = opening(kv)
    assert f"store {kv}: {errno.errorcode[code]} (" in words
    assert remedy in words
    monkeypatch.undo()
    open_plain(kv, DIRECT).close()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.EMFILE, "ulimit -n"), (errno.EIO, "kernel log"), (errno.EACCES, "")]
)
def test_names_that_cannot_be_made_lasting_are_told(
    code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, os.O_DIRECTORY, code)

    def make() -> None:
        store_making.create(tmp_path / "kv", layout(), 64, fill=False)

    if words:
        assert words in refusal(make)
    else:
        make()
    monkeypatch.undo()
    assert store_opening.exists(tmp_path / "kv") == (not words)


def test_a_read_only_file_system_is_told(small_disk: Path) -> None:
    open_plain(small_disk / "kv", DIRECT).close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for name in ("kv", "new"):
        words = opening(small_disk / name)
        assert "EROFS (Read-only file system)" in words
        assert "remount it or use another path" in words


def test_a_full_file_system_is_told_and_left_as_it_was(small_disk: Path) -> None:
    words = refusal(lambda: store_making.create(small_disk / "kv", layout(), 10**4, fill=False))
    assert "ENOSPC (No space left on device); the file system is full" in words
    assert not store_opening.exists(small_disk / "kv")
    with open_plain(small_disk / "kv", DIRECT) as runtime:
        assert runtime.medium.is_ram, "a tmpfs is no drive"
        assert runtime.medium.file_system == "tmpfs"
        assert np.array_equal(
            read_all(runtime, runtime.put(keys(2), content(2)).blocks), content(2)
        )
