"""What the commands that take minutes share: progress, a temporary folder, checks made before they
begin, and where results go.

Decides how a result reaches a screen, a file or a pipe, and what is refused at once and not after
minutes of work. Knows no replay, no result and no option but the ones it is handed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prefetchd.bench.replay import ReplayError, Report
from prefetchd.bench.report import check_report
from prefetchd.hostinfo import blaming, medium_of

_DRAW_S = 0.5
_FREE_SHARE = 0.9  # of the free memory that a command may take

NewBar = Callable[[str, int], Report]
"""Words and steps of the bar that takes the place of the one before it."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a result goes besides the screen; `-` as `json` or `csv`: to stdout, and nothing else
    there."""

    json: Path | None = None
    report: Path | None = None
    csv: Path | None = None

    def check(self) -> None:
        """Now, and not after minutes of work. Raises ReplayError, ReportError."""
        if self.report is not None:
            check_report(self.report)
        if _is_stdout(self.json) and _is_stdout(self.csv):
            raise ReplayError("--json - and --csv - cannot both have stdout; name a file for one")
        for option, path in (("--json", self.json), ("--csv", self.csv)):
            if path is None or _is_stdout(path):
                continue
            if why := _why_not_written(path):
                raise ReplayError(
                    f"the result cannot be written to {path}: {why}; name another file with "
                    f"{option}"
                )

    def show(
        self,
        console: Console,
        *,
        encoded: bytes,
        table: Callable[[], None],
        report: Callable[[Path], object] | None = None,
        csv: str = "",
    ) -> None:
        """Print JSON, CSV or the table, write what was asked for and name it on `console`
        (stderr)."""
        if _is_stdout(self.json):
            typer.echo(encoded.decode())
        elif _is_stdout(self.csv):
            typer.echo(csv, nl=False)
        else:
            table()
        for path, text in ((self.json, encoded), (self.csv, csv.encode())):
            if path is not None and not _is_stdout(path):
                with blaming(path):
                    path.write_bytes(text)
                _name(console, "result", path)
        if self.report is not None and report is not None:
            report(self.report)
            _name(console, "report", self.report)


def _why_not_written(path: Path) -> str:
    if path.is_dir():
        return "it is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    allowed = os.access(path if path.exists() else path.parent, os.W_OK)
    return "" if allowed else "no permission, or a read-only file system"


def _is_stdout(path: Path | None) -> bool:
    return str(path) == "-"


def _name(console: Console, what: str, path: Path) -> None:
    console.print(f"{what}: {path.absolute()}", soft_wrap=True, markup=False, highlight=False)


@contextmanager
def progress_bars(console: Console) -> Iterator[NewBar]:
    """One bar at a time, drawn between steps and never from a thread of its own, which would take
    the interpreter's lock in the middle of what is measured."""
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False
    ) as progress:
        drawn_s = 0.0

        def bar(words: str, total: int) -> Report:
            for former in progress.task_ids:
                progress.remove_task(former)
            task = progress.add_task(words, total=total)

            def draw(count: int) -> None:
                nonlocal drawn_s
                progress.advance(task, count)
                if time.monotonic() - drawn_s > _DRAW_S:
                    progress.refresh()
                    drawn_s = time.monotonic()

            def say(told: str) -> None:
                progress.update(task, description=told, refresh=True)

            return Report(say=say, steps=draw)

        yield bar


def check_memory(need_bytes: int, what: str, remedy: str) -> None:
    """Raises ReplayError, in the words `what` takes so much and its `remedy`, if it cannot fit."""
    free = psutil.virtual_memory().available
    if need_bytes > _FREE_SHARE * free:
        raise ReplayError(
            f"{what} takes {need_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of memory are "
            f"free; use {remedy}"
        )


@contextmanager
def temporary_folder(store: Path | None, console: Console) -> Iterator[Path]:
    """The folder asked for, or a temporary one on a disk if there is one, removed afterwards."""
    if store is not None:
        yield store
        return
    folder = Path(tempfile.mkdtemp(prefix="prefetchd-", dir=_disk_folder()))
    try:
        words = f"store: {folder} (temporary; name one with --store)"
        console.print(words, style="dim", soft_wrap=True, markup=False, highlight=False)
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _disk_folder() -> str | None:
    """The first usual folder for temporary files that is not kept in RAM."""
    for name in (tempfile.gettempdir(), "/var/tmp", "."):
        try:
            fd = os.open(name, os.O_RDONLY)
        except OSError:
            continue
        try:
            if not medium_of(fd, name).is_ram:
                return name
        finally:
            os.close(fd)
    return None
