"""Opens any trace: our own format, or one of the raw ones, as a header and chunks of columns.

Decides by a file's content which reader it is for, never by its name. What is read is the same
whichever it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol

from prefetchd.lab.attention_npz import read_recording
from prefetchd.lab.npz import ZIP_MAGIC
from prefetchd.lab.request_csv import CsvSettings, csv_requests
from prefetchd.lab.request_lines import json_requests
from prefetchd.lab.spool import Spool
from prefetchd.lab.text import Told, text_lines
from prefetchd.lab.trace_format import is_trace, open_trace
from prefetchd.lab.trace_schema import Columns, TraceError, TraceHeader

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Source(Protocol):
    """A trace. `chunks` begins anew each time; of a raw trace the header counts all rows as one."""

    @property
    def header(self) -> TraceHeader: ...

    def chunks(self, only: Collection[str] | None = None) -> Iterator[Columns]: ...


@contextmanager
def trace_source(
    path: Path,
    settings: CsvSettings | None = None,
    *,
    limit: int | None = None,
    told: Told | None = None,
) -> Iterator[Source]:
    """Open a trace of any format. Raises TraceError.

    Of a raw text format only the first `limit` requests are read; other readers leave it to the
    caller to stop. `told` hears how many bytes of a text format have been read.
    """
    magic = _magic(path)
    if magic.startswith(ZIP_MAGIC):
        yield open_trace(path) if is_trace(path) else read_recording(path)
        return
    if magic == _ZSTD_MAGIC:
        raise TraceError(f"trace {path} is compressed with zstd; unpack it first: zstd -d {path}")
    lines = text_lines(path, told)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"trace {path} is empty; name a file with a request or session a line")
    with Spool() as spool:
        whole = chain([first], lines)
        if first[1].startswith((b"{", b"[")):
            yield json_requests(path, whole, spool, limit)
        else:
            yield csv_requests(path, whole, spool, limit, settings or CsvSettings())


def _magic(path: Path) -> bytes:
    """The first bytes; none of what cannot be read, which its reader tells better."""
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError:
        return b""


def check_kind(path: Path, header: TraceHeader, kind: str) -> None:
    """Raises TraceError if a trace is of the other kind."""
    if header.kind == kind:
        return
    what = {"decode": "recorded attention", "restore": "requests and their blocks"}
    raise TraceError(
        f"trace {path} is {what[header.kind]}, for `prefetchd replay {header.kind}` and `prefetchd "
        f"simulate {header.kind}`; this needs {what[kind]}"
    )


def label(header: TraceHeader) -> str:
    """A trace's name, with what nobody must overlook."""
    words = header.name
    if header.synthetic and "SYNTHETIC" not in words:
        words += " (SYNTHETIC)"
    if not header.identity and "WITHOUT REUSE" not in words:
        words += " (WITHOUT REUSE)"
    return words
