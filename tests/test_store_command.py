"""`prefetchd store`: what it makes, shows, finds wrong, puts right and removes; and exit codes."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import prefetchd
from prefetchd import Runtime, checking
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.threads import Threads
from prefetchd.format import Superblock, encode_superblock, superblock_place
from prefetchd.journal import page_offset
from prefetchd.store_opening import Opening, superblock_of
from prefetchd.store_place import take_lock
from tests.replays import run_here
from tests.runtime_bench import BLOCKS, LAYERS, PLAIN, content, keys, layout, read_all

Capture = pytest.CaptureFixture[str]
DIRECT = replace(PLAIN, device="threads")
PAGES = content(BLOCKS)
STORED = 6


def opened(path: Path, **words: Any) -> Runtime:
    return prefetchd.open(path, options=DIRECT, **words)


@pytest.fixture(params=[1, 3])
def kv(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A closed store on one path or three, with six of eight blocks stored."""
    paths = [tmp_path / "b", tmp_path / "c"][: request.param - 1]
    first = tmp_path / "a"
    options = replace(DIRECT, namespace="tenant")
    made: dict[str, Any] = {"blocks": BLOCKS, "fill": True, "paths": paths}
    with prefetchd.open(first, layout(), options=options, **made) as runtime:
        runtime.put(keys(2), PAGES[:2]).wait()
    with prefetchd.open(first, options=DIRECT) as runtime:
        runtime.put(keys(3, 2), PAGES[2:5]).wait()
        runtime.put(keys(1, 5), PAGES[5:6], ttl_s=100).wait()
    return first


def shape_of(path: Path) -> Superblock:
    return superblock_of(path, Opening(read_only=True))


def harm(path: Path, block: int, at: int) -> None:
    """Flip a bit of a block's extent, at this byte of it."""
    shape = shape_of(path)
    places = [path, *map(Path, shape.paths[1:])]
    offset = int(shape.extent_offsets(np.array([block]))[0]) + at
    flip(places[block % shape.stripes] / "extents.dat", offset)


def flip(file: Path, offset: int) -> None:
    with open(file, "r+b") as medium:
        medium.seek(offset)
        byte = medium.read(1)[0]
        medium.seek(offset)
        medium.write(bytes([byte ^ 4]))


def checked(capsys: Capture, path: Path, code: int = 0) -> dict[str, Any]:
    done = run_here(capsys, "store", "check", path, "--json", "--device", "threads")
    assert done.code == code, done.err
    report: dict[str, Any] = json.loads(done.out)
    assert report["schema"] == "prefetchd.store.check/1"
    return report


def everything(path: Path) -> dict[str, bytes]:
    files = [file for folder in path.parent.iterdir() for file in folder.iterdir()]
    return {str(file): file.read_bytes() for file in files}


# --- create and info ---


def test_a_store_is_made_and_shown(tmp_path: Path, capsys: Capture) -> None:
    kv, further = tmp_path / "kv", tmp_path / "more"
    words = ["--layers", "3", "--page-bytes", "12KiB", "--blocks", "20"]
    done = run_here(capsys, "store", "create", kv, *words, "--path", further, "--json")
    assert done.code == 0, done.err
    info = json.loads(done.out)
    assert (info["layers"], info["page_bytes"], info["blocks"]) == (3, 12_288, 20)
    assert [path["blocks"] for path in info["paths"]] == [10, 10]
    assert info["clean"]
    with opened(kv, layout=layout()) as runtime:
        runtime.put(keys(4), PAGES[:4]).wait()
        runtime.put(keys(1, 4), PAGES[4:5], ttl_s=5000).wait()
    info = json.loads(run_here(capsys, "store", "info", kv, "--json").out)
    assert (info["blocks_stored"], info["blocks_free"], info["blocks_unknown"]) == (5, 15, 0)
    assert info["blocks_by_time_left"] == {"never": 4, "under a day": 1}
    assert info["blocks_by_openings_ago"] == {"0": 5}
    assert info["journal_records"] == 5
    shown = run_here(capsys, "store", "info", kv).out
    for words_shown in ("5 stored, 15 free of 20", "cleanly", "under a day: 1", str(further)):
        assert words_shown in shown


def test_a_store_of_a_model_takes_the_bytes_it_is_given(tmp_path: Path, capsys: Capture) -> None:
    words = ["--model", "llama-3-8b", "--bytes", "64MiB", "--no-fill", "--json"]
    done = run_here(capsys, "store", "create", tmp_path / "kv", *words)
    assert done.code == 0, done.err
    info = json.loads(done.out)
    assert info["file_bytes"] <= 64 << 20
    assert info["file_bytes"] + info["extent_bytes"] + 8192 > 64 << 20, "not a block less"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--layers", "2", "--page-bytes", "4KiB"], 2, "either --blocks or --bytes"),
        (["--model", "llama-9", "--blocks", "2"], 2, "'llama-9' is no preset"),
        (["--blocks", "2"], 2, "either --model, or --layers and --page-bytes"),
        (["--layers", "2", "--page-bytes", "4KiB", "--bytes", "9KiB"], 3, "hold no store"),
        (["--layers", "2", "--page-bytes", "0", "--blocks", "2"], 2, "--page-bytes"),
    ],
)
def test_what_makes_no_store_is_told(
    words: list[str], code: int, told: str, tmp_path: Path, capsys: Capture
) -> None:
    run_here(capsys, "store", "create", tmp_path / "kv", *words).failed(code, told)
    assert not (tmp_path / "kv" / "extents.dat").exists()


def test_one_folder_by_two_names_is_one(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b")
    words = ["--layers", "2", "--page-bytes", "4KiB", "--blocks", "9", "--path"]
    for again in (tmp_path / "link", tmp_path / "a" / ".." / "b"):
        made: list[str | Path] = ["store", "create", tmp_path / "a", *words, tmp_path / "b"]
        run_here(capsys, *made, "--path", again).failed(3, "named twice")


@pytest.mark.parametrize("code", ["ENOSPC", "EFBIG"])
def test_a_store_that_cannot_be_made_leaves_nothing(
    code: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(getattr(errno, code), "no")

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "posix_fallocate", full)
    words = ["--layers", "3", "--page-bytes", "12KiB", "--blocks", "20", "--path"]
    made: list[Any] = ["store", "create", tmp_path / "kv", *words]
    run_here(capsys, *made, tmp_path / "mine").failed(3, "ask for a smaller store")
    assert [*tmp_path.rglob("*")] == [tmp_path / "mine"]


def test_a_store_beside_another_is_not_begun(kv: Path, tmp_path: Path, capsys: Capture) -> None:
    before = everything(kv)
    for blocks, path, told in [("20", kv, "exists already"), ("1", tmp_path / "y", "block a path")]:
        words = ["--layers", "3", "--page-bytes", "12KiB", "--blocks", blocks]
        run_here(capsys, "store", "create", tmp_path / "x", *words, "--path", path).failed(3, told)
        assert not (tmp_path / "x").exists()
        assert not (tmp_path / "y").exists()
    assert everything(kv) == before


# --- check ---


def test_a_good_store_has_nothing_wrong_and_is_not_written(kv: Path, capsys: Capture) -> None:
    before = everything(kv)
    report = checked(capsys, kv)
    assert report["counts"] == {}
    assert report["blocks_stored"] == STORED
    assert report["pages_right"] == STORED * LAYERS
    shape = shape_of(kv)
    assert report["bytes_read"] == STORED * shape.extent_bytes
    assert everything(kv) == before
    shown = run_here(capsys, "store", "check", kv, "--device", "threads")
    assert "nothing is wrong" in shown.out


@pytest.mark.parametrize("device", ["uring", "threads"])
def test_extents_larger_than_an_operation_are_checked_in_parts(
    device: str, kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetchd.survey.CHUNK_BYTES", 20_000)
    harm(kv, 1, shape_of(kv).header_bytes + 2 * 12_288)
    report = checking.check(kv, Opening(), device=device)
    assert report.counts == {"checksum": 1}
    assert "block 1: pages of layers 2 are not" in report.problems[0].words
    assert report.bytes_read == STORED * shape_of(kv).extent_bytes


def test_every_kind_of_damage_is_named(kv: Path, capsys: Capture) -> None:
    shape = shape_of(kv)
    harm(kv, 0, shape.header_bytes)
    harm(kv, 0, shape.header_bytes + 12_288)
    harm(kv, 2, 40)
    report = checked(capsys, kv, 1)
    assert report["counts"] == {"checksum": 1, "header": 1}
    words = [problem["words"] for problem in report["problems"]]
    assert words == [
        "block 0: pages of layers 0, 1 are not what was written",
        "block 2: its header is damaged",
    ]
    assert report["pages_right"] == STORED * LAYERS - 2
    shown = run_here(capsys, "store", "check", kv, "--device", "threads")
    assert shown.code == 1
    assert "2 problems (1 checksum, 1 header)" in shown.out
    assert "prefetchd store repair" in shown.out


def test_a_damaged_journal_is_named(kv: Path, capsys: Capture) -> None:
    shape = shape_of(kv)
    flip(kv / "extents.dat", page_offset(shape, shape.journal[0], 0) + 30)
    report = checked(capsys, kv, 1)
    assert report["counts"] == {"journal": 1}
    assert "its journal is damaged" in report["problems"][0]["words"]
    assert report["pages_right"] == STORED * LAYERS, "the headers tell it all"


def test_a_header_that_the_journal_does_not_know_is_named(kv: Path, capsys: Capture) -> None:
    shape = shape_of(kv)
    older = everything(kv)
    with prefetchd.open(kv, options=replace(DIRECT, cap_bytes=10**9)) as runtime:
        room = runtime.room
        with runtime.engine.lock:
            room._evict(mine=False)
        runtime.engine.wait(lambda: runtime._parts.driver.writer.idle)
        gone = int(np.flatnonzero(runtime._parts.catalog.table["kind"] == 2)[0])
    places = [kv, *map(Path, shape.paths[1:])]
    file = places[gone % shape.stripes] / "extents.dat"
    start = int(shape.extent_offsets(np.array([gone]))[0])
    with open(file, "r+b") as medium:
        medium.seek(start)
        medium.write(older[str(file)][start : start + shape.header_bytes])
    report = checked(capsys, kv, 1)
    assert report["counts"] == {"header": 1}
    assert "says that a block lies there, but the journal" in report["problems"][0]["words"]


def test_parts_of_other_shapes_are_named(kv: Path, capsys: Capture) -> None:
    shape = shape_of(kv)
    if shape.stripes == 1:
        pytest.skip("there is one part")
    part = superblock_of(Path(shape.paths[1]), Opening(read_only=True))
    block = encode_superblock(
        msgspec.structs.replace(part, fingerprint=bytes(16), epoch=part.epoch + 2)
    )
    with open(Path(shape.paths[1]) / "extents.dat", "r+b") as medium:
        medium.seek(superblock_place(part))
        medium.write(block.tobytes()[:4096])
    assert checked(capsys, kv, 1)["counts"] == {"superblock": 1}


def test_what_cannot_be_read_is_told_apart_from_what_is_wrong(kv: Path) -> None:
    if shape_of(kv).stripes > 1:
        pytest.skip("one path is enough")
    shape = shape_of(kv)
    at = int(shape.extent_offsets(np.array([3]))[0]) + shape.header_bytes + 12_288

    class Sector(Threads):
        def _carry_out(self, op: Any) -> int:
            _, offset, _, length, _, kind = op
            if kind == 0 and offset <= at < offset + length:
                return -5
            return super()._carry_out(op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefetchd.devices.threads.Threads", Sector)
        patch.setattr("prefetchd.registry.storage_device_class", lambda name: Sector)
        report = checking.check(kv, Opening(), device="threads")
        assert report.counts == {"unreadable": 1}
        assert "block 3: page 1: EIO" in report.problems[0].words
        assert report.pages_right == STORED * LAYERS - 1
        done = checking.repair(kv, Opening(), device="threads")
        assert (done.removed, done.left) == (1, [])
    assert checking.check(kv, Opening(), device="threads").counts == {}


# --- repair ---


def test_a_repair_names_no_option_that_it_lacks(kv: Path, capsys: Capture, tmp_path: Path) -> None:
    if shape_of(kv).stripes == 1:
        pytest.skip("there is one part")
    (tmp_path / "b").rename(tmp_path / "away")
    done = run_here(capsys, "store", "repair", kv)
    done.failed(3, f"part 2 cannot be had: there is no store in {tmp_path / 'b'}; put it back")
    assert "--allow" not in done.err
    assert "--read-only" not in done.err


def test_a_repair_removes_what_fails_and_keeps_the_rest(kv: Path, capsys: Capture) -> None:
    shape = shape_of(kv)
    harm(kv, 3, shape.header_bytes + 5)
    harm(kv, 4, 40)
    flip(kv / "extents.dat", page_offset(shape, shape.journal[0], 0) + 30)
    done = run_here(capsys, "store", "repair", kv, "--json", "--device", "threads")
    assert done.code == 0, done.err
    repaired = json.loads(done.out)
    assert repaired["left"] == []
    report = checked(capsys, kv)
    assert report["blocks_stored"] == repaired["blocks_stored"] >= STORED - 2
    for scan in (False, True):
        found = 0
        for space in ("tenant", "default"):
            options = replace(DIRECT, namespace=space, scan=scan)
            with prefetchd.open(kv, options=options) as runtime:
                for number in range(STORED):
                    block = runtime.lookup(keys(1, number))
                    if len(block):
                        assert np.array_equal(read_all(runtime, block)[0], PAGES[number])
                        found += 1
        assert found == repaired["blocks_stored"]
    shown = run_here(capsys, "store", "repair", kv, "--device", "threads")
    assert "blocks removed: 0; headers written: 0" in shown.out


def test_a_path_that_cannot_be_read_is_not_emptied(kv: Path) -> None:
    if shape_of(kv).stripes == 1:
        pytest.skip("one path more is wanted")
    before = everything(kv)

    class Broken(Faulty):
        def __init__(self, files: Any, arena: Any, depth: int) -> None:
            super().__init__(Threads(files, arena, depth), Faults())

        def reap(self) -> Any:
            done = super().reap()
            if self._accepted > 12:  # opened; from here on nothing on the second path is read
                self.broken = {1}
            return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefetchd.registry.storage_device_class", lambda name: Broken)
        with pytest.raises(prefetchd.StoreError, match="the path is at fault, nothing was removed"):
            checking.repair(kv, Opening(), device="broken")
    report = checking.check(kv, Opening(), device="threads")
    assert report.counts == {}
    assert report.blocks_stored == STORED
    assert len(before) == len(everything(kv))


# --- erase, and what is common ---


def test_a_store_is_erased_and_nothing_else(kv: Path, capsys: Capture) -> None:
    (kv / "notes.txt").write_text("mine")
    run_here(capsys, "store", "erase", kv).failed(2, "say --yes")
    assert (kv / "extents.dat").exists()
    assert run_here(capsys, "store", "erase", kv, "--yes").code == 0
    assert sorted(path.name for path in kv.parent.iterdir()) == ["a"]
    assert [path.name for path in kv.iterdir()] == ["notes.txt"]
    run_here(capsys, "store", "erase", kv, "--yes").failed(3, "there is no store")


def test_a_store_with_a_part_away_is_erased_only_if_that_is_said(
    kv: Path, capsys: Capture, tmp_path: Path
) -> None:
    if shape_of(kv).stripes == 1:
        pytest.skip("there is one part")
    (tmp_path / "c").rename(tmp_path / "away")
    done = run_here(capsys, "store", "erase", kv, "--yes")
    done.failed(3, f"part 3 on {tmp_path / 'c'} cannot be erased: there is no store in")
    assert "create one" not in done.err
    assert (kv / "extents.dat").exists()
    assert run_here(capsys, "store", "erase", kv, "--yes", "--lone").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["away"]
    run_here(capsys, "store", "erase", tmp_path / "away", "--yes").failed(3, "--lone")
    assert run_here(capsys, "store", "erase", tmp_path / "away", "--yes", "--lone").code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_in_use_is_named_and_left(kv: Path, capsys: Capture, tmp_path: Path) -> None:
    if shape_of(kv).stripes == 1:
        pytest.skip("there is one part")
    for shared in (True, False):
        part = tmp_path / "c"
        lock = take_lock(part, shared=shared)
        try:
            done = run_here(capsys, "store", "erase", kv, "--yes")
            done.failed(3, f"part 3 on {part}", "in use by process", "nothing was erased")
        finally:
            os.close(lock)
    lock = take_lock(part, shared=True)
    try:
        done = run_here(capsys, "store", "erase", kv, "--yes", "--lone", "--json")
    finally:
        os.close(lock)
    said = json.loads(done.out)
    assert (done.code, said["away"]) == (3, {})
    assert "in use by process" in said["in_use"][str(part)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert (part / "extents.dat").exists()


def test_a_folder_that_is_no_store_is_not_erased(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "extents.dat").write_bytes(b"somebody's " * 1000)
    made = ["--layers", "2", "--page-bytes", "4KiB", "--blocks", "2"]
    for locked in (False, True):
        for command in ("info", "check", "repair", "create", "erase"):
            words = {"create": made, "erase": ["--yes"]}.get(command, [])
            done = run_here(capsys, "store", command, tmp_path, *words)
            done.failed(3, "is not a prefetchd store")
            assert (tmp_path / "owner.lock").exists() == locked
        (tmp_path / "owner.lock").touch()
    assert (tmp_path / "extents.dat").read_bytes() == b"somebody's " * 1000


def test_a_file_is_no_store(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "afile").write_text("mine")
    done = run_here(capsys, "store", "info", tmp_path / "afile")
    done.failed(3, "is a file and is not a prefetchd store")
    assert "raw" not in done.err


@pytest.mark.parametrize("command", ["info", "check", "repair", "erase"])
def test_a_folder_without_permission_ends_in_3(
    command: str, kv: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = Path.stat

    def refusing(path: Path, **words: Any) -> os.stat_result:
        if path.parent == kv:
            raise PermissionError(errno.EACCES, "no", str(path))
        return really(path, **words)

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(Path, "stat", refusing)
    words = ["--yes"] if command == "erase" else []
    run_here(capsys, "store", command, kv, *words).failed(3, "EACCES", "permission")


@pytest.mark.parametrize("command", ["info", "check", "repair", "erase"])
def test_a_store_in_use_is_left_alone_and_its_owner_named(
    command: str, kv: Path, capsys: Capture
) -> None:
    words = ["--yes"] if command == "erase" else []
    with opened(kv):
        done = run_here(capsys, "store", command, kv, *words)
        done.failed(3, f"in use by process {os.getpid()} ")
    assert checked(capsys, kv)["counts"] == {}


def test_a_store_on_a_device_goes_through_all_commands(tmp_path: Path, capsys: Capture) -> None:
    device = tmp_path / "device"
    device.write_bytes(bytes(4 << 20))
    size = ["--layers", "3", "--page-bytes", "12KiB", "--bytes", "4MiB"]
    run_here(capsys, "store", "create", device, *size).failed(3, "--raw")
    assert run_here(capsys, "store", "create", device, *size, "--raw").code == 0
    with opened(device, raw=True) as runtime:
        runtime.put(keys(3), PAGES[:3]).wait()
    for command in ("info", "check", "repair"):
        done = run_here(capsys, "store", command, device, "--raw", "--json")
        assert json.loads(done.out)["blocks_stored"] == 3
    run_here(capsys, "store", "create", device, *size, "--raw").failed(3, "a prefetchd store")
    assert run_here(capsys, "store", "erase", device, "--raw", "--yes").code == 0
    assert device.stat().st_size == 4 << 20
    run_here(capsys, "store", "info", device, "--raw").failed(3, "is not a prefetchd store")
