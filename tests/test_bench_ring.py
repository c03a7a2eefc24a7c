"""`prefetchd bench ring`: what it does on a small file; rates themselves are nobody's business."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prefetchd.bench import commands, fio, ring, ring_rounds
from prefetchd.bench.ring import BenchError, Latency, Rate, Shape, stated
from prefetchd.device import Ops
from prefetchd.devices.threads import Threads
from prefetchd.hostinfo import Medium
from tests.replays import run_here

Capture = pytest.CaptureFixture[str]
BRIEF = ("--rounds", "1", "--seconds", "0.1", "--idle-s", "0", "--load", "4KiB@4,8KiB@2")
SIZE = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "random.dat"
    ring.create_file(path, SIZE, lambda _: None)
    return path


def test_every_load_and_engine_gets_a_row(
    file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Shape] = []

    def run(path: Path, shape: Shape, seconds: float) -> Rate:
        assert (path, seconds) == (file, 0.1)
        asked.append(shape)
        return Rate(1000.0, 1.0, Latency(3.0, 4.0, None), 100)

    monkeypatch.setattr(commands, "has_fio", lambda: True)
    monkeypatch.setattr(ring_rounds, "run_fio", run)
    words: list[str | Path] = ["bench", "ring", file, *BRIEF, "--device", "threads", "--json", "-"]
    done = run_here(capsys, *words)
    result = json.loads(done.out)
    assert done.code == 0
    assert result["schema"] == "prefetchd.bench.ring/2"
    assert (result["file"], result["file_bytes"]) == (str(file), SIZE)
    assert [(row["load"], row["device"]) for row in result["rows"]] == [
        ("4KiB@4", "threads"),
        ("4KiB@4", "fio"),
        ("8KiB@2", "threads"),
        ("8KiB@2", "fio"),
    ]
    assert asked == [Shape(4096, 4), Shape(8192, 2)]
    for row in result["rows"]:
        ours = row["device"] == "threads"
        assert row["ratio_to_fio"] == (row["operations_s"] / 1000 if ours else None)
        assert row["block_bytes"] * row["depth"] == 16384
        assert row["operations_s_rounds"] == [row["operations_s"]]
        # A drive that is busy otherwise reads too little in a tenth of a second to say a median.
        assert row["latency_us"]["p50"] is None or row["latency_us"]["p50"] > 0
        assert not ours or f"{row['depth']} threads" in row["engine"]
        assert ("aiofiles" if ours else "io_uring") in row["engine"]


def test_without_fio_it_says_so_and_goes_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "has_fio", lambda: False)
    path = tmp_path / "made.dat"
    words: list[str | Path] = [
        "bench",
        "ring",
        path,
        "--size",
        "1MiB",
        *BRIEF,
        "--device",
        "threads",
    ]
    done = run_here(capsys, *words, "--json", tmp_path / "r.json")
    assert path.stat().st_size == SIZE
    assert "fio is not installed" in done.err
    assert "8KiB@2" in done.out
    assert len(json.loads((tmp_path / "r.json").read_bytes())["rows"]) == 2


def test_the_uring_device_is_driven_too(
    file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "has_fio", lambda: False)
    done = run_here(capsys, "bench", "ring", file, *BRIEF, "--json", "-")
    if done.code == 3 and "io_uring" in done.err:
        pytest.skip(done.err.strip())
    assert {row["device"] for row in json.loads(done.out)["rows"]} == {"uring"}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--load", "64KiB"), 2, "write a size and a depth"),
        (("--load", "64KiB@\u00b2"), 2, "write a size and a depth"),
        (("--load", "64KiB@0"), 2, "write a size and a depth"),
        (("--load", "0@8"), 2, "cannot be read directly"),
        (("--load", "1000@8"), 2, "cannot be read directly"),
        (("--load", "64KiB@8"), 3, "use at least 4194304"),
        (("--device", "floppy"), 2, "floppy"),
        (("--device", "faulty"), 2, "tests"),
    ],
)
def test_what_cannot_be_measured_is_told(
    file: Path, capsys: Capture, words: tuple[str, ...], code: int, told: str
) -> None:
    run_here(capsys, "bench", "ring", file, *BRIEF, *words).failed(code, told)


def test_files_that_would_not_be_read_from_the_drive(file: Path, tmp_path: Path) -> None:
    shapes = [Shape(4096, 1)]
    sparse = tmp_path / "sparse.dat"
    sparse.touch()
    os.truncate(sparse, SIZE)
    os.mkfifo(tmp_path / "pipe")
    for path, told in (
        (sparse, "sparse"),
        (tmp_path / "pipe", "EINVAL"),
        (tmp_path, "EINVAL|EISDIR"),
        (tmp_path / "no", "ENOENT"),
    ):
        with pytest.raises(BenchError, match=told):
            ring.open_file(path, shapes)
    with pytest.raises(BenchError, match="EEXIST"):
        ring.create_file(file, SIZE, lambda _: None)
    assert file.stat().st_size == SIZE
    with pytest.raises(BenchError, match="ENOENT"):
        ring.create_file(tmp_path / "no" / "f", SIZE, lambda _: None)


def test_a_fill_that_is_interrupted_leaves_nothing_and_one_that_was_killed_is_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "random.dat"

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ring.create_file(path, SIZE, interrupt)
    assert not any(tmp_path.iterdir())

    seen: list[str] = []
    ring.create_file(path, SIZE, lambda _: seen.extend(os.listdir(tmp_path)))
    assert (seen, os.listdir(tmp_path)) == (["random.dat.making"], ["random.dat"])
    path.rename(tmp_path / seen[0])
    with pytest.raises(BenchError, match=r"random\.dat\.making .*EEXIST.*remove it"):
        ring.create_file(path, SIZE, lambda _: None)


def test_a_short_read_ends_the_benchmark(file: Path) -> None:
    opened = ring.open_file(file, [Shape(4096, 4)])
    try:
        os.truncate(file, 4096)
        with pytest.raises(BenchError, match="came short"):
            ring.run_device("threads", opened, Shape(4096, 4), 5.0)
    finally:
        os.close(opened.fd)


def test_fio_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fio").write_text("#!/bin/sh\necho no such >&2; echo engine\nexit 7\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BenchError, match=r"fio failed \(7\): no such engine; --no-fio"):
        fio.run_fio(tmp_path / "fio", Shape(4096, 1), 0.1)


def test_a_file_that_would_not_do_is_not_made(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str | Path] = ["bench", "ring", tmp_path / "new", *BRIEF]
    run_here(capsys, *words, "--size", "100KiB").failed(3, "use at least 524288")

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no")

    monkeypatch.setattr(os, "posix_fallocate", full)
    run_here(capsys, *words, "--size", "1MiB").failed(3, "ENOSPC")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["pci-0000:3d:00.0", os.fsdecode(b"[a]\n\xff")])
def test_a_name_is_taken_as_it_is(name: str, file: Path, capsys: Capture) -> None:
    """fio reads a colon as the end of a name and writes others into its JSON as they are; a table
    takes brackets for colours."""
    path = file.rename(file.with_name(name))
    words: list[str | Path] = ["bench", "ring", path, *BRIEF, "--load", "4KiB@1"]
    for more in ("--json=-", "--no-fio"):
        done = run_here(capsys, *words, "--device", "threads", more)
        assert done.code == 0, done.err
        assert "threads" in done.out


def test_offsets_are_of_the_whole_file_and_of_one_run_only(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive is not to answer from its cache what it read before."""
    monkeypatch.setattr(ring, "_DRAWN", 64)
    taken: list[list[int]] = []

    class Recording(Threads):
        def submit(self, ops: Ops) -> int:
            taken[-1] += (ops["offset"] // 4096).tolist()
            return super().submit(ops)

    monkeypatch.setattr(ring, "storage_device_class", lambda name: Recording)
    opened = ring.open_file(file, [Shape(4096, 4)])
    try:
        for _ in range(2):
            taken.append([])
            rate, _ = ring.run_device("threads", opened, Shape(4096, 4), 0.1)
            assert rate.operations <= len(taken[-1]) <= rate.operations + 4
    finally:
        os.close(opened.fd)
    first, second = taken
    assert first[:64] != second[:64]
    assert first[:64] != first[64:128]
    assert max(first) < SIZE // 4096


def test_a_percentile_needs_ten_reads_beyond_it() -> None:
    assert stated([1, 2, 3], 19) == Latency(None, None, None)
    assert stated([1, 2, 3], 1000) == Latency(1, 2, None)
    assert stated([1, 2, 3], 10_000) == Latency(1, 2, 3)


def test_percentiles_are_those_of_what_was_waited(file: Path) -> None:
    opened = ring.open_file(file, [Shape(4096, 1)])
    waits_ns = np.random.default_rng(1).lognormal(11, 1, 200_000).astype(np.int64)
    try:
        with ring._loaded("threads", opened, Shape(4096, 1)) as (_, load):
            for part in np.array_split(waits_ns, 9000):
                load._note(part)
            found = msgspec.structs.astuple(load.latency())
    finally:
        os.close(opened.fd)
    assert found == pytest.approx(np.quantile(waits_ns / 1e3, ring.LATENCY_SHARES), rel=0.012)


def test_what_a_cache_gave_and_rounds_that_differ_are_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, shape = ring.open_file(file, [Shape(4096, 4)]), Shape(4096, 4)
    rates = iter([100.0, 130.0, 100.0, 101.0])
    moved = itertools.count(0, 30 << 20)
    latency = Latency(1.0, 2.0, None)

    def run(name: str, *_: object) -> tuple[Rate, str]:
        return Rate(next(rates), 1.0, latency, 10_000), name

    monkeypatch.setattr(ring_rounds, "run_device", run)
    monkeypatch.setattr(ring_rounds, "best_turn", lambda *_: 1)
    monkeypatch.setattr(ring_rounds, "read_counter", lambda _: next(moved))
    medium = Medium("ext4", "/dev/x", 512, 512)
    pace = ring_rounds.Pace(2, 0.1, 0)
    try:
        rows, kind = ring_rounds.measure(opened, medium, [shape], ["a", "b"], pace, lambda _: None)
    finally:
        os.close(opened.fd)
    assert kind == "CACHED"  # 120 of 156 MiB
    cached, unsteady = ring_rounds.notes(rows, kind)
    assert cached.startswith("CACHED: bytes came from a cache")
    assert unsteady.startswith("UNSTEADY: 4KiB@4 b: its rounds differ by 26.1 %")
