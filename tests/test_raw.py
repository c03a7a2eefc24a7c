"""A store that lies directly on a device: refused unless asked for, and never over something."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import prefetchd
from prefetchd import StoreError, store_making
from prefetchd.raw import signature
from tests.runtime_bench import BLOCKS, PLAIN, content, keys, layout, read_all

DIRECT = replace(PLAIN, device="threads")
SIZE = 4 << 20
PAGES = content(BLOCKS)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file that stands for a device."""
    path = tmp_path / "device"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture
def loop(device: Path) -> Iterator[Path]:
    """A block device, where the machine lets us have one."""
    words = ["losetup", "--find", "--show", "--direct-io=on", str(device)]
    made = subprocess.run(words, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device can be had here: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "--detach", path], check=True)


def fill_and_read(path: Path, further: list[Path] | None = None) -> None:
    with prefetchd.open(
        path, layout(), blocks=BLOCKS, paths=further or [], options=DIRECT, raw=True
    ) as runtime:
        put = runtime.put(keys(BLOCKS), PAGES).wait()
        assert put.failures == []
    for options in (DIRECT, replace(DIRECT, scan=True), replace(DIRECT, device="uring")):
        for read_only in (False, True):
            with prefetchd.open(path, options=options, raw=True, read_only=read_only) as runtime:
                assert np.array_equal(read_all(runtime, runtime.lookup(keys(BLOCKS))), PAGES)


def test_a_store_on_a_file_in_a_devices_stead(device: Path) -> None:
    fill_and_read(device)
    assert device.stat().st_size == SIZE, "it is used as it is"
    assert list(device.parent.iterdir()) == [device]


def test_a_store_on_a_block_device(loop: Path) -> None:
    fill_and_read(loop)
    with prefetchd.open(loop, options=DIRECT, raw=True) as runtime:
        assert runtime.medium.file_system == "raw device"
        with pytest.raises(StoreError, match=r"EBUSY|in use"):
            prefetchd.open(loop, options=DIRECT, raw=True)


def test_a_mounted_device_is_refused_even_with_force(loop: Path, tmp_path: Path) -> None:
    made = subprocess.run(["mkfs.ext4", "-q", loop], check=False, capture_output=True)
    mount = tmp_path / "mount"
    mount.mkdir()
    if made.returncode or subprocess.run(["mount", loop, mount], check=False).returncode:
        pytest.skip("no file system can be made or mounted here")
    try:
        for force in (False, True):
            with pytest.raises(StoreError, match="is mounted on"):
                store_making.create(loop, layout(), 2, fill=False, raw=True, force=force)
    finally:
        subprocess.run(["umount", mount], check=True)
    with pytest.raises(StoreError, match="holds an ext file system"):
        store_making.create(loop, layout(), 2, fill=False, raw=True)


def test_a_store_on_a_folder_and_a_device(device: Path, tmp_path: Path) -> None:
    fill_and_read(tmp_path / "kv", [device])
    with pytest.raises(StoreError, match="is a file and no folder"):
        prefetchd.open(tmp_path / "kv", options=DIRECT)


def test_nothing_is_opened_or_made_without_the_flag(device: Path) -> None:
    with pytest.raises(StoreError, match="is not a prefetchd store"):
        prefetchd.open(device, options=DIRECT)
    for act in (
        lambda: prefetchd.open(device, layout(), blocks=2, options=DIRECT),
        lambda: store_making.create(device, layout(), 2, fill=False),
    ):
        with pytest.raises(StoreError, match=r"say raw=True \(--raw\)"):
            act()
    assert device.read_bytes() == bytes(SIZE)


def test_a_device_that_is_too_small_is_told_and_left_alone(device: Path) -> None:
    with pytest.raises(StoreError, match=f"has {SIZE} bytes, the store needs"):
        store_making.create(device, layout(), 1000, fill=False, raw=True)
    assert device.read_bytes() == bytes(SIZE)


@pytest.mark.parametrize(
    ("offset", "magic", "words"),
    [
        (0, b"XFSB", "XFS"),
        (0x438, b"\x53\xef", "ext"),
        (0x10040, b"_BHRfS_M", "Btrfs"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (512, b"EFI PART", "GPT"),
        (510, b"\x55\xaa", "partition table"),
    ],
)
def test_what_lies_there_is_not_written_over(
    offset: int, magic: bytes, words: str, device: Path
) -> None:
    with open(device, "r+b") as medium:
        medium.seek(offset)
        medium.write(magic)
    before = device.read_bytes()
    with pytest.raises(StoreError, match=f"{words}.*--force"):
        store_making.create(device, layout(), BLOCKS, fill=False, raw=True)
    assert device.read_bytes() == before
    store_making.create(device, layout(), BLOCKS, fill=False, raw=True, force=True)
    with pytest.raises(StoreError, match="a prefetchd store"):
        store_making.create(device, layout(), BLOCKS, fill=False, raw=True)
    fill_and_read(device)


def test_the_file_system_that_a_tool_makes_is_known(device: Path) -> None:
    made = subprocess.run(["mkfs.ext4", "-q", "-F", device], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("mkfs.ext4 is not there")
    assert signature(device.read_bytes()) == "an ext file system"


def test_a_store_whose_first_page_is_damaged_is_not_made_anew(device: Path) -> None:
    fill_and_read(device)
    with device.open("r+b") as data:
        data.write(bytes(512))
    assert signature(device.read_bytes()) == "a prefetchd store"
    with prefetchd.open(device, layout(), blocks=BLOCKS, options=DIRECT, raw=True) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(BLOCKS))), PAGES)
