"""What the drives of a store say they moved, however many they are."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from prefetchd.bench import disk
from prefetchd.bench.disk import cached_share, read_counter
from prefetchd.hostinfo import Medium, medium_of


def test_all_drives_of_a_store_are_counted_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"nvme0n1": 1 << 30, "nvme1n1": 2 << 30}
    counters = {name: SimpleNamespace(read_bytes=count) for name, count in counts.items()}
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: counters)
    first, second, third = (
        Medium(kind, device, memory, 512)
        for kind, device, memory in (
            ("xfs", "/dev/nvme0n1", 512),
            ("ext4", "/dev/nvme1n1", 4096),
            ("tmpfs", "tmpfs", 0),
        )
    )
    assert read_counter(Medium.together([first])) == 1 << 30
    both = Medium.together([first, second, first])
    assert (both.file_system, both.memory_alignment_bytes) == ("xfs + ext4", 4096)
    assert read_counter(both) == 3 << 30
    assert cached_share(3 << 30, read_counter(both)) is None
    assert not both.is_ram
    partly = Medium.together([first, third])
    assert partly.is_ram, "what is partly read from RAM measures no drive"
    assert read_counter(partly) is None


def test_of_a_loop_device_what_lies_below_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own counters are of what was asked of it, whether or not the page cache had it."""
    (tmp_path / "loop7" / "loop").mkdir(parents=True)
    (tmp_path / "loop7" / "loop" / "backing_file").write_text(f"{tmp_path / 'image'}\n")
    (tmp_path / "image").touch()
    with open(tmp_path / "image") as file:
        below = medium_of(file.fileno(), str(tmp_path / "image")).device
    counters = {
        "loop7": SimpleNamespace(read_bytes=1),
        os.path.basename(os.path.realpath(below)): SimpleNamespace(read_bytes=2),
    }
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: counters)
    monkeypatch.setattr(disk, "_BLOCK_DEVICES", tmp_path)
    assert read_counter(Medium("ext4", "/dev/loop7", 512, 512)) == 2
