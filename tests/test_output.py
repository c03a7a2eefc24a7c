"""Where commands put their results, and what they refuse before they begin."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import ReplayError
from tests.replays import run_here

Capture = pytest.CaptureFixture[str]


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_a_dash_prints_json_and_nothing_else(capsys: Capture, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    outputs = Outputs(Path("-"), page)
    outputs.check()
    outputs.show(
        quiet(), encoded=b"{}", table=lambda: print("table"), report=lambda path: path.touch()
    )
    assert capsys.readouterr().out == "{}\n"
    assert page.exists()


def test_a_file_is_written_beside_the_table(capsys: Capture, tmp_path: Path) -> None:
    console, path = quiet(), tmp_path / "r.json"
    Outputs(path).show(console, encoded=b"{}", table=lambda: print("table"))
    assert (capsys.readouterr().out, path.read_bytes()) == ("table\n", b"{}")
    assert isinstance(console.file, io.StringIO)
    assert str(path) in console.file.getvalue()


def test_what_cannot_be_written_is_refused_before_anything_is_made(
    capsys: Capture, tmp_path: Path
) -> None:
    nowhere = tmp_path / "missing" / "r.json"
    done = run_here(capsys, "bench", "ring", tmp_path / "f", "--size", "1MiB", "--json", nowhere)
    done.failed(2, str(nowhere), "--json")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_the_file() -> None:
    full = Path("/dev/full")  # takes nothing, as a full file system does
    with pytest.raises(OSError, match="No space left") as told:
        Outputs(full).show(quiet(), encoded=b"{}", table=lambda: None)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, "/dev/full")


def test_memory_that_is_not_there_is_told_with_a_remedy() -> None:
    check_memory(1, "staging", "less")
    with pytest.raises(ReplayError, match=r"staging takes .* use less"):
        check_memory(2 * psutil.virtual_memory().total, "staging", "less")


def test_a_temporary_folder_is_gone_afterwards_and_one_asked_for_stays(tmp_path: Path) -> None:
    with temporary_folder(None, quiet()) as folder:
        folder.mkdir()
    assert not folder.parent.exists()
    with temporary_folder(tmp_path, quiet()) as folder:
        assert folder == tmp_path
    assert tmp_path.exists()


def test_one_bar_follows_another() -> None:
    console = quiet()
    with progress_bars(console) as bar:
        bar("writing", 2).steps(2)
        replaying = bar("replaying", 3)
        replaying.say("round 1")
        replaying.steps(3)
