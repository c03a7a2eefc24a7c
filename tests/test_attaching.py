"""A path is taken out of use and another drive takes its place, while requests go on."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import EngineError, Runtime, StoreError, attaching, store_making
from prefetchd.arena import aligned_arena
from prefetchd.config import read_config, settings_of
from prefetchd.core import CoreLimits
from prefetchd.device import OP, READ, DeviceError, File, StorageDevice
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.registry import storage_device_class
from prefetchd.sidecar.drives import Drive, DriveGate
from prefetchd.sidecar.namespace import NamespaceSettings
from prefetchd.sidecar.reloading import Reloader
from prefetchd.testing import drain as reaped
from tests.runtime_bench import content, keys
from tests.sidecar_bench import daemon
from tests.test_draining import OPTIONS, left, open_three, read_all, until
from tests.test_reconfigure import asking

SOON = CoreLimits(read_timeout_ns=50_000_000)
ENGINES = ("threads", "uring", "liburing")


def options_of(device: str) -> Any:
    return replace(OPTIONS, device=device)


def emptied(kv: Runtime, folder: Path) -> None:
    number = kv.folders.index(folder)
    kv.reconfigure(drain=(str(folder),))
    until(kv, lambda: left(kv, number) == 0)


def open_here(folder: Path, **words: Any) -> Runtime:
    return open_three(folder, replace(OPTIONS, **words))


def descriptors_of(folder: Path) -> int:
    """How many this process has on what lies in a folder."""
    there = Path("/proc/self/fd")
    links = [os.readlink(there / name) for name in os.listdir(there) if (there / name).is_symlink()]
    return sum(link.startswith(f"{folder}/") for link in links)


@pytest.mark.parametrize("device", ENGINES)
def test_a_drive_is_changed_while_everything_goes_on(tmp_path: Path, device: str) -> None:
    pages = content(24)
    old, new = tmp_path / "b", tmp_path / "d"
    with open_three(tmp_path, options_of(device)) as kv:
        if any("going on with" in note for note in kv.notes):
            pytest.skip(str(kv.notes))
        kv.put(keys(24), pages).wait()
        emptied(kv, old)
        kv.reconfigure(lease_s=600)
        blocks = kv.lookup(keys(24))  # which are not evicted from here on
        some = blocks[blocks % 3 == 2][:3]  # on a path that stays
        chosen = [int(np.flatnonzero(blocks == block)[0]) for block in some]
        with asking(kv, pages[chosen], some, among=1000) as more:
            rounds = more()
            kv.detach(old)
            kv.detach(old)
            assert descriptors_of(old) == 0
            assert more() > rounds
            assert [one.reading for one in kv.stats().paths] == ["healthy", "detached", "healthy"]
            shutil.rmtree(old)
            rounds = more()
            kv.attach(old, new, fill=False)
            assert more() > rounds
            until(kv, lambda: left(kv, 1) > 0)
        assert kv.folders == (tmp_path / "a", new, tmp_path / "c")
        paths = kv.stats().paths
        assert [one.reading for one in paths] == ["healthy"] * 3
        assert (paths[1].path, paths[1].draining) == (str(new / "extents.dat"), False)
        assert paths[1].bytes_written > 0
        assert kv.options.drain == ()
        kv.put(keys(6, 1000), content(6)).wait()
        assert np.array_equal(read_all(kv, keys(24)), pages)
        assert kv.stats().failures == {}
        visible = kv.stats().blocks_visible
    for scan in (False, True):
        with open_here(tmp_path, scan=scan) as kv:
            assert kv.folders[1] == new
            assert kv.stats().blocks_visible == visible
            assert np.array_equal(read_all(kv, keys(24)), pages)


def test_a_detached_path_stays_away_until_it_is_attached_again(tmp_path: Path) -> None:
    pages = content(24)
    with open_here(tmp_path) as kv:
        kv.put(keys(24), pages).wait()
        emptied(kv, tmp_path / "c")
        kv.detach(tmp_path / "c")
    for scan in (False, True):  # it is there, and is not used all the same
        with open_here(tmp_path, scan=scan) as kv:
            assert any("is detached" in note for note in kv.notes)
            assert np.array_equal(read_all(kv, keys(24)), pages)
            assert left(kv, 2) == 0
            assert [one.writing for one in kv.stats().paths] == ["healthy"] * 2 + ["detached"]
            assert descriptors_of(tmp_path / "c") == 0
    with open_here(tmp_path) as kv:
        kv.attach(tmp_path / "c", fill=False)
        assert kv.put(keys(30, 100), content(30)).wait().failures == []
        assert left(kv, 2) > 0
    with open_here(tmp_path, scan=True) as kv:
        assert "without part" not in str(kv.notes)
        assert np.array_equal(read_all(kv, keys(30, 100)), content(30))


def test_a_path_that_was_away_is_replaced(tmp_path: Path) -> None:
    with open_here(tmp_path) as kv:
        kv.put(keys(24), content(24)).wait()
        emptied(kv, tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    with open_three(tmp_path, options_of("uring"), allow_missing_paths=True) as kv:
        kv.attach(tmp_path / "c", tmp_path / "d", fill=False)
        kv.put(keys(30, 100), content(30)).wait()
        assert left(kv, 2) > 0
        assert np.array_equal(read_all(kv, keys(24)), content(24))
    with open_here(tmp_path) as kv:
        assert np.array_equal(read_all(kv, keys(30, 100)), content(30))


def test_a_block_device_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    with open_here(tmp_path) as kv:
        kv.put(keys(24), content(24)).wait()
        emptied(kv, tmp_path / "c")
        drive = tmp_path / "drive"
        drive.write_bytes(b"\xff" * kv._parts.store.superblocks[2].file_bytes)
        kv.attach(tmp_path / "c", drive, raw=True)
        kv.put(keys(30, 100), content(30)).wait()
        assert left(kv, 2) > 0
    for scan in (False, True):
        with open_three(tmp_path, replace(OPTIONS, scan=scan), raw=True) as kv:
            assert np.array_equal(read_all(kv, keys(30, 100)), content(30))


def test_a_runtime_that_is_closed_meanwhile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_here(tmp_path)
    kv.put(keys(24), content(24)).wait()
    emptied(kv, tmp_path / "c")
    make = store_making.create_part

    def slow(*words: Any, **more: Any) -> None:
        make(*words, **more)
        kv.close()

    monkeypatch.setattr(attaching, "create_part", slow)
    with pytest.raises(EngineError, match="closed"):
        kv.attach(tmp_path / "c", tmp_path / "d", fill=False)
    assert not (tmp_path / "d").exists()
    assert descriptors_of(tmp_path) == 0
    with open_here(tmp_path) as kv:
        assert np.array_equal(read_all(kv, keys(24)), content(24))


class Fixed(storage_device_class("threads")):  # type: ignore[misc]
    """A device that keeps its files."""

    change_file = StorageDevice.change_file


def test_what_cannot_be_done_is_refused_in_words_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with open_here(tmp_path) as kv:
        kv.put(keys(24), content(24)).wait()
        emptied(kv, tmp_path / "c")
        for old, new, words in (
            ("a", "d", "its first path cannot go"),
            ("x", "d", "has no path"),
            ("b", "d", "blocks lie on .*; drain it first"),
            ("c", "b", "has the path .* already"),
            ("c", None, "is in use; detach it first"),
            ("c", "no/such", "create its parent folder first"),
            ("c", "f", "is a file and no folder"),
            ("c", "d" * 4000, "too long"),
        ):
            with pytest.raises(StoreError, match=words):
                kv.attach(tmp_path / old, new and tmp_path / new)
        for path, words in (("a", "first path"), ("x", "has no path"), ("b", "drain it first")):
            with pytest.raises(StoreError, match=words):
                kv.detach(tmp_path / path)
        with pytest.raises(StoreError, match="has 0 bytes, the store needs"):
            kv.attach(tmp_path / "c", tmp_path / "f", raw=True)
        assert [one.reading for one in kv.stats().paths] == ["healthy"] * 3
        kv.reconfigure(drain=())
        kv.put(keys(12, 100), content(12)).wait()
        assert kv._parts.catalog.free.barred == set(), "it is used again"
    assert not (tmp_path / "d").exists()
    with open_three(tmp_path, replace(OPTIONS, device=Fixed)) as kv:
        for go in (kv.detach, lambda old: kv.attach(old, tmp_path / "d", fill=False)):
            emptied(kv, tmp_path / "c")
            with pytest.raises(DeviceError, match="cannot change a file while it is open"):
                go(tmp_path / "c")
        assert [one.reading for one in kv.stats().paths] == ["healthy"] * 3
        assert not (tmp_path / "d").exists()
    with open_here(tmp_path) as kv:
        assert kv.folders[2] == tmp_path / "c"
        assert kv.stats().blocks_visible == 36
    with open_three(tmp_path, read_only=True) as kv, pytest.raises(StoreError, match="reading"):
        kv.detach(tmp_path / "c")


def test_a_store_that_cannot_be_told_leaves_the_path_out_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever paths the medium names then, nothing lies on the one in question."""

    def broken(*_: object) -> None:
        raise OSError(5, "no")

    with open_here(tmp_path) as kv:
        kv.put(keys(24), content(24)).wait()
        emptied(kv, tmp_path / "c")
        kv.reconfigure(drain=())
        with monkeypatch.context() as patch:
            patch.setattr("prefetchd.store.os.fdatasync", broken)
            with pytest.raises(StoreError, match="EIO"):
                kv.attach(tmp_path / "c", tmp_path / "d", fill=False)
        assert kv.put(keys(10, 100), content(10)).wait().failures == []
        assert left(kv, 2) == 0
    for scan in (False, True):
        with open_here(tmp_path, scan=scan) as kv:
            assert np.array_equal(read_all(kv, keys(24)), content(24))
            assert np.array_equal(read_all(kv, keys(10, 100)), content(10))


def test_a_drive_that_does_not_answer_is_not_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[Faulty] = []

    def make(files: Any, arena: Any, depth: int) -> Faulty:
        inner = storage_device_class("threads")(files, arena, depth)
        devices.append(Faulty(inner, Faults()))
        return devices[0]

    monkeypatch.setattr(attaching, "_PATIENCE_NS", 50_000_000)
    with open_three(tmp_path, replace(OPTIONS, device=make, core=SOON)) as kv:
        block = int(kv.put(keys(3), content(3)).blocks[1])
        path = kv.folders[block % 3]
        device = devices[0]
        with kv.engine.lock:
            device._script[device._accepted] = "stall"
            ticket = kv.demand(kv.pages(np.array([block]), 0), timeout_s=0)
            kv._parts.catalog.hide(np.array([block]))
        ticket.wait()
        ticket.release()
        kv.room.leave(block)
        until(kv, lambda: kv.room.tidy() or left(kv, block % 3) == 0)  # type: ignore[func-returns-value]
        with pytest.raises(StoreError, match="have not ended"):
            kv.detach(path)
        assert [one.reading for one in kv.stats().paths] == ["healthy"] * 3
        assert kv._parts.catalog.free.barred == set()
        with kv.engine.lock:
            device.release_stalled()
        assert kv.detach(path)
        assert kv.stats().failures == {}


def test_the_gate_is_of_the_drive_that_is_there() -> None:
    one, two = Drive(), Drive()
    other, gate = [
        DriveGate([one, one], 1, lambda: None, lambda file: two if file.path else Drive())
        for _ in range(2)
    ]
    gate.attend(present=True)
    gate.change_file(1, File(3, "two", 1))
    assert (one.gates, two.gates, gate.drives) == ([other, gate], [gate], [one, two])
    assert two.shares.contended(other)
    gate.change_file(0, File(-1, "", 1))
    assert (one.gates, two.gates) == ([other], [gate])
    gate.change_file(0, File(3, "two", 1))
    gate.set_weight(3)
    assert gate.drives == [two, two]
    gate.close()
    assert two.gates == []


def opened(paths: Sequence[Path]) -> list[File]:
    return [File(os.open(path, os.O_RDWR), str(path), 8192) for path in paths]


@pytest.mark.parametrize("device", [*ENGINES, "plain uring", "uring_sqpoll"])
def test_a_device_reads_the_new_file(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in "abc"]
    for number, place in enumerate(places):
        place.write_bytes(bytes([number + 1]) * 8192)
    files = opened(places)
    arena = aligned_arena(8192, 4096)
    kind = storage_device_class(device.rsplit(maxsplit=1)[-1])
    if device == "plain uring":
        monkeypatch.setattr(kind, "_register_files", lambda self: False)
    try:
        engine = kind(files[:2], arena, 4)
    except DeviceError as error:
        pytest.skip(str(error))
    ops = np.zeros(1, OP)
    ops["length"], ops["file"], ops["kind"] = 4096, 1, READ
    for file, result, byte in (
        (None, 4096, 2),
        (files[2], 4096, 3),
        (File(-1, "", 8192), -9, 3),
        (files[0], 4096, 1),
    ):
        if file is not None:
            engine.change_file(1, file)
        engine.submit(ops)
        assert reaped(engine, 1)["result"].tolist() == [result]
        assert arena[0] == byte
    engine.close()
    for file in files:
        os.close(file.fd)


# --- a daemon ---

TABLE = """
[namespaces.a]
store = "{store}"
layers = 3
page_bytes = "12KiB"
fill = false
device = "threads"
staging = "1MiB"
predictor = "none"
evict = "lru"
{more}
"""


Again = Callable[..., str]


@contextmanager
def served(folder: Path, log: pytest.LogCaptureFixture, **more: Any) -> Iterator[tuple[Any, Again]]:
    """The runtime of a daemon, and what has its configuration read again and gives what it logs."""
    file = folder / "p.toml"

    def settings(more: dict[str, Any]) -> dict[str, NamespaceSettings]:
        lines = "\n".join(f"{name} = {value}" for name, value in more.items())
        file.write_text(TABLE.format(store=folder / "a", more=lines))
        read = settings_of(read_config(file).namespaces["a"])
        return {"a": replace(read, options=replace(read.options, lease_s=0))}

    with daemon(folder, settings(more)) as running:
        reloader = Reloader(file, read_config(file), running.server)
        running.connect(namespace="a")

        def again(**more: Any) -> str:
            settings(more)
            log.clear()
            running.server.interrupt(reloader.reload)
            running.settle()
            done = threading.Event()
            running.server.aside(done.set)
            assert done.wait(60)
            return log.text

        yield running.runtime("a"), again


def test_a_configuration_that_is_read_again_changes_paths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefetchd")
    pages = content(12)
    a, b, c, d, e = (str(tmp_path / name) for name in "abcde")
    with open_here(tmp_path, namespace="a") as kv:
        kv.put(keys(12), pages).wait()
    with served(tmp_path, caplog, drain=[b, c]) as (kv, again):
        until(kv, lambda: left(kv, 1) + left(kv, 2) == 0)
        wanted = {"drain": [b, c], "detach": [c], "replace": f'{{ "{b}" = "{d}" }}'}
        said = again(**wanted)
        assert f"namespace a: {d} is in the place of {b}" in said
        assert f"namespace a: {c} is detached, its drive may go" in said
        said = again(**wanted)
        assert "ERROR" not in said
        assert "is detached" not in said
        assert f"{a} is not detached: store {a}: its first path cannot go" in again(detach=[a])
        kv.put(keys(20, 100), content(20)).wait()
        assert f"{d} is not detached: store {a}: " in again(detach=[d])
        assert np.array_equal(read_all(kv, keys(12)), pages)
    shutil.rmtree(b)
    shutil.rmtree(c)
    caplog.clear()
    both = f'{{ "{b}" = "{d}", "{c}" = "{e}" }}'
    with served(tmp_path, caplog, drain=[b, c], replace=both) as (kv, _):
        assert kv.folders[1:] == (Path(d), Path(e))
        assert "ERROR" not in caplog.text
        assert np.array_equal(read_all(kv, keys(12)), pages)
