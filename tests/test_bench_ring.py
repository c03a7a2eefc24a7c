"""`prefetchd bench ring`: what it does on a small file; rates themselves are nobody's business."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prefetchd.bench import commands, ring
from prefetchd.bench.ring import BenchError, Rate, Shape
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

    def fio(path: Path, shape: Shape, seconds: float) -> Rate:
        assert (path, seconds) == (file, 0.1)
        asked.append(shape)
        return Rate(1000.0, 1.0)

    monkeypatch.setattr(commands, "has_fio", lambda: True)
    monkeypatch.setattr(commands, "run_fio", fio)
    words: list[str | Path] = ["bench", "ring", file, *BRIEF, "--device", "threads", "--json", "-"]
    done = run_here(capsys, *words)
    result = json.loads(done.out)
    assert done.code == 0
    assert result["schema"] == "prefetchd.bench.ring/1"
    assert [(row["load"], row["device"]) for row in result["rows"]] == [
        ("4 KiB, depth 4", "threads"),
        ("4 KiB, depth 4", "fio"),
        ("8 KiB, depth 2", "threads"),
        ("8 KiB, depth 2", "fio"),
    ]
    assert asked == [Shape(4096, 4), Shape(8192, 2)]
    for row in result["rows"]:
        ours = row["device"] == "threads"
        assert row["ratio_to_fio"] == (row["operations_s"] / 1000 if ours else None)
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
    assert "8 KiB, depth 2" in done.out
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
    for path, told in (
        (sparse, "sparse"),
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


def test_a_short_read_ends_the_benchmark(file: Path) -> None:
    opened = ring.open_file(file, [Shape(4096, 4)])
    try:
        os.truncate(file, 4096)
        with pytest.raises(BenchError, match="came short"):
            ring.run_device("threads", opened, Shape(4096, 4), 5.0)
    finally:
        os.close(opened.fd)


def test_fio_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fio").write_text("#!/bin/sh\necho no such engine >&2\nexit 7\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(BenchError, match=r"fio failed \(7\): no such engine"):
        ring.run_fio(tmp_path / "fio", Shape(4096, 1), 0.1)
