"""Making a store that is killed at any moment: the next try makes it, and nothing is in its way."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import prefetchd
from prefetchd import Runtime, StoreError, key_file, store_making
from prefetchd.format import Superblock
from prefetchd.new_part import NewPart
from prefetchd.store_opening import Opening, open_store
from prefetchd.store_place import LOCK_NAME, InUseError, take_lock
from tests.replays import run_here
from tests.runtime_bench import BLOCKS, PLAIN, layout

Capture = pytest.CaptureFixture[str]
WORDS = ["--layers", "3", "--page-bytes", "12KiB", "--blocks", str(BLOCKS)]
STEPS = ("fsync", "rename", "posix_fallocate", "pwrite", "write", "unlink")


class KilledError(BaseException):
    """Stands for SIGKILL: nothing is cleaned up after it."""


def killed_at(step: int, act: Callable[[], object]) -> bool:
    """Whether the act was ended before its operation of this number on the file system."""
    count = itertools.count(1)

    def dying(really: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*words: Any, **more: Any) -> Any:
            if next(count) == step:
                raise KilledError
            return really(*words, **more)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(NewPart, "undo", lambda _: None)
        patch.setattr(key_file, "destroy", lambda _: None)
        try:
            act()
        except KilledError:
            return True
    return False


def kills(tmp_path: Path, act: Callable[[Path], object]) -> Iterator[Path]:
    """A folder for each moment at which `act` there can be killed, after it was."""
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        folder.mkdir(parents=True)
        if not killed_at(step, partial(act, folder)):
            assert step > 5
            return
        yield folder


def make(folder: Path, *, parts: int, keyed: bool) -> None:
    key = folder / "key" if keyed else None
    further = [folder / name for name in "bc"[: parts - 1]]
    store_making.create(folder / "a", layout(), BLOCKS, fill=True, paths=further, key_file=key)


@pytest.mark.parametrize(("parts", "keyed"), [(1, False), (3, False), (1, True), (3, True)])
def test_what_a_kill_leaves_is_not_in_the_way(parts: int, keyed: bool, tmp_path: Path) -> None:
    for folder in kills(tmp_path, lambda folder: make(folder, parts=parts, keyed=keyed)):
        if (folder / "a" / "extents.dat").exists():  # it has its name, and so it is whole
            open_store(folder / "a").release()
            continue
        make(folder, parts=parts, keyed=keyed)
        open_store(folder / "a").release()
        names = sorted(path.name for path in (folder / "a").iterdir())
        assert names == ["extents.dat", "owner.lock"]


def test_what_was_begun_is_told_and_can_be_erased(tmp_path: Path, capsys: Capture) -> None:
    for folder in itertools.islice(
        kills(tmp_path, lambda folder: make(folder, parts=1, keyed=False)), 3, 5
    ):
        kv = folder / "a"
        for command in ("info", "check", "repair"):
            run_here(capsys, "store", command, kv).failed(3, "begun and did not end")
        lock = take_lock(kv)
        try:
            for command, *words in (["info"], ["erase", "--yes"], ["create", *WORDS]):
                run_here(capsys, "store", command, kv, *words).failed(3, "in use by process")
        finally:
            os.close(lock)
        assert run_here(capsys, "store", "erase", kv, "--yes").code == 0
        assert not kv.exists()


def test_the_key_of_what_was_begun_goes_with_it_and_no_other(
    tmp_path: Path, capsys: Capture
) -> None:
    make(tmp_path, parts=1, keyed=True)
    for folder in kills(tmp_path / "k", lambda folder: make(folder, parts=1, keyed=True)):
        if not (folder / "key").exists() or (folder / "a" / "extents.dat").exists():
            continue
        erase: list[str | Path] = ["store", "erase", folder / "a", "--yes", "--key-file"]
        run_here(capsys, *erase, tmp_path / "key").failed(3, "is not the key of the store")
        assert run_here(capsys, *erase, folder / "key").code == 0
        assert [*folder.iterdir()] == []
    open_store(tmp_path / "a").release()
    assert (tmp_path / "key").exists()


def test_a_store_that_another_process_made_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = NewPart._take

    def late(part: NewPart) -> None:
        monkeypatch.setattr(NewPart, "_take", take)
        make(tmp_path, parts=1, keyed=False)
        take(part)

    monkeypatch.setattr(NewPart, "_take", late)
    with pytest.raises(StoreError, match="exists already"):
        make(tmp_path, parts=1, keyed=False)
    open_store(tmp_path / "a", layout(), Opening(read_only=True)).release()


def test_a_part_of_a_store_is_whole_or_made_again(tmp_path: Path) -> None:
    make(tmp_path, parts=3, keyed=False)
    shape = open_part_shape(tmp_path / "a")

    def act(folder: Path) -> None:
        store_making.create_part(
            folder / "d", shape.of_stripe(2), fill=False, raw=False, force=False
        )

    for folder in kills(tmp_path / "c", act):
        if not (folder / "d" / "extents.dat").exists():
            act(folder)
        assert (folder / "d" / "extents.dat").stat().st_size == shape.of_stripe(2).file_bytes


def open_part_shape(folder: Path) -> Superblock:
    store = open_store(folder)
    store.release()
    return store.superblock


def test_a_first_opening_that_was_killed_is_followed_by_one_that_works(tmp_path: Path) -> None:
    def opened(folder: Path) -> Runtime:
        return prefetchd.open(folder / "a", layout(), blocks=BLOCKS, options=PLAIN)

    assert killed_at(6, lambda: opened(tmp_path))
    assert not (tmp_path / "a" / "extents.dat").exists()
    opened(tmp_path).close()


def test_a_lock_that_its_owner_removed_meanwhile_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = take_lock(tmp_path)
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / LOCK_NAME).unlink()  # as erasing does, the last thing under its lock
        os.close(held)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    mine = take_lock(tmp_path)
    try:
        with pytest.raises(InUseError):
            take_lock(tmp_path)
    finally:
        os.close(mine)
