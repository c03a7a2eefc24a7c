"""What all commands that write a trace do: look at the target, show progress, say what was written.

Decides words and progress bars. Knows no option but `--force`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from prefetchd.lab.text import Told
from prefetchd.lab.trace_format import TraceHeader, TraceWriter
from prefetchd.lab.trace_schema import Columns, TraceError, rows_of


def check_out(out: Path, force: bool) -> None:
    """Raises TraceError for a target that cannot be written, before any work is done."""
    if not out.parent.is_dir():
        raise TraceError(f"{out} cannot be written: there is no folder {out.parent}")
    if out.is_dir() or (out.exists() and not force):
        raise TraceError(f"{out} is already there; name another file, or use --force on a file")


def save(out: Path, header: TraceHeader, chunks: Iterator[Columns], told: Told) -> str:
    """Write a trace; how much was written, in words. Raises TraceError if nothing was."""
    rows = 0
    with TraceWriter(out, header) as writer:
        for chunk in chunks:
            writer.write(chunk)
            rows += rows_of(header.kind, chunk)
            told(rows, max(rows, header.length))
        if not rows:
            raise TraceError(f"nothing of trace {header.name} is left to be written")
    what = "steps" if header.kind == "decode" else "requests"
    return f"{rows} {what} in {len(writer.header.rows)} chunks, {out.stat().st_size} bytes"


def say(out: Path, words: str) -> None:
    """What became of a file."""
    Console(highlight=False, soft_wrap=True).print(f"{out}: {words}", markup=False)


class Bars:
    """Progress bars by name, each made when it is first told of anything."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, name: str) -> Told:
        tasks: list[Any] = []

        def tell(done: int, whole: int) -> None:
            if not tasks:
                tasks.append(self._progress.add_task(name, total=whole))
            self._progress.update(tasks[0], completed=done, total=whole)

        return tell


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """On stderr, gone when done."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield Bars(progress)
