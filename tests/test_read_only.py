"""A store opened for reading: nothing is written, whoever it belongs to and however it was left."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import prefetchd
from prefetchd import Runtime, StoreError
from prefetchd.format import newest_superblock
from tests.runtime_bench import BLOCKS, PLAIN, content, keys, layout, open_plain, read_all

DIRECT = replace(PLAIN, device="threads")
PAGES = content(BLOCKS)


def reading(path: Path, **options: object) -> Runtime:
    return prefetchd.open(path, options=replace(DIRECT, **options), read_only=True)  # type: ignore[arg-type]


def fingerprint(path: Path) -> dict[str, tuple[str, int]]:
    """Of every file: what it holds, and when it was last written."""
    return {
        file.name: (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(path.iterdir())
    }


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    with open_plain(tmp_path / "kv", DIRECT) as runtime:
        runtime.put(keys(4), PAGES[:4]).wait()
        runtime.put(keys(1, 4), PAGES[4:5], ttl_s=1000).wait()
    return tmp_path / "kv"


@pytest.fixture
def unclean(kv: Path) -> Path:
    """The same, as a process leaves it that is killed."""
    with open_plain(kv, DIRECT):
        shutil.copytree(kv, kv.parent / "copy")
    assert not newest_superblock(np.fromfile(kv.parent / "copy" / "extents.dat", np.uint8)).clean
    return kv.parent / "copy"


@pytest.mark.parametrize("device", ["threads", "uring", "liburing"])
def test_everything_is_read_and_nothing_written(kv: Path, device: str) -> None:
    before = fingerprint(kv)
    with reading(kv, device=device, staging_bytes=3 * 12_288) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(5))[:3]), PAGES[:3])
        put = runtime.put(keys(2, 3), PAGES[3:5]).wait()
        assert put.failures == [], "they are there already"
        put = runtime.put(keys(1, 20), PAGES[:1]).wait()
        assert put.failures == ["block 0 was not stored: the store is open for reading only"]
        runtime.room.wall_ns = lambda: 2**62  # what has expired is not found, and stays
        assert len(runtime.lookup(keys(5))) == 4
        assert runtime.stats().bytes_written == 0
    assert fingerprint(kv) == before
    with open_plain(kv, DIRECT) as runtime:
        assert len(runtime.lookup(keys(5))) == 5


@pytest.mark.parametrize("scan", [False, True])
def test_what_an_unclean_close_left_is_mended_in_memory(unclean: Path, scan: bool) -> None:
    before = fingerprint(unclean)
    with reading(unclean, scan=scan, cap_bytes=10**6) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(5))), PAGES[:5])
    assert fingerprint(unclean) == before


def test_readers_share_and_a_writer_is_alone(kv: Path) -> None:
    with reading(kv), reading(kv) as second:
        assert len(second.lookup(keys(5))) == 5
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()} "):
            open_plain(kv, DIRECT)
    with open_plain(kv, DIRECT), pytest.raises(StoreError, match="in use by process"):
        reading(kv)


def test_a_store_is_not_made_by_whoever_only_reads(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store"):
        prefetchd.open(tmp_path / "kv", layout(), blocks=2, options=DIRECT, read_only=True)
    assert not (tmp_path / "kv").exists()


def test_a_read_only_mount_is_served(kv: Path, tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    done = subprocess.run(["mount", "--bind", kv, mount], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", mount], check=True)
        with pytest.raises(StoreError, match=r"EROFS.*read_only=True$"):
            open_plain(mount, DIRECT)
        with reading(mount) as runtime:
            assert np.array_equal(read_all(runtime, runtime.lookup(keys(5))), PAGES[:5])
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_a_file_that_may_not_be_written_is_served(kv: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    for path in (kv / "extents.dat", kv / "owner.lock", kv):
        path.chmod(0o555)
    for parent in kv.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    code = """
import os, sys, tempfile, prefetchd  # before this user cannot read the standard library
os.setresuid(65534, 65534, 65534)
options = prefetchd.Options(device="threads", predictor="none")
try:
    prefetchd.open(sys.argv[1], options=options)
except prefetchd.StoreError as error:
    print(error)
with prefetchd.open(sys.argv[1], options=options, read_only=True) as kv:
    print(len(kv.lookup([(0).to_bytes(16, "big")])))
"""
    command = [sys.executable, "-c", code, str(kv)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "Permission denied: '/" in done.stderr:
        pytest.skip("another user cannot even import the package here")
    words, found = done.stdout.splitlines()
    assert "EACCES" in words, done.stderr
    assert "or open it with read_only=True" in words
    assert "--read-only" not in words
    assert found == "1"
