"""Writes and reads trace files: a zip of `.npy` members, chunk by chunk, and a header.

Decides the bytes; what columns mean is `prefetchd.lab.trace_schema`. Column c of chunk n is member
`NNNNN/c.npy`, but for `blocks`: chains are mostly runs of ids, so what is stored, as `block_steps`,
is each id less the one before it in the chunk, which packs a hundred times smaller. `header.npy`,
written last, is the header as JSON in an array of bytes. `numpy.load` opens such a file. Nothing is
pickled, and nothing is parsed before its checksum has been verified. A trace is never held whole:
writer and reader hold one chunk.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from prefetchd.hostinfo import blaming
from prefetchd.lab.npz import DAMAGE, opened_zip, read_member
from prefetchd.lab.trace_schema import (
    PREFIX,
    VERSION,
    Columns,
    TraceError,
    TraceHeader,
    check,
    pieces,
    rows_of,
)

__all__ = [
    "OpenTrace",
    "TraceError",
    "TraceHeader",
    "TraceWriter",
    "is_trace",
    "open_trace",
]

HEADER = "header.npy"
_STEPS = "block_steps"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same trace is the same bytes, whenever it is written


class TraceWriter:
    """Writes a trace chunk by chunk; the file appears, whole, at the end of the `with` block.

    `header` may be replaced until then: what is only known at the end (its table of stop reasons,
    `how`) is written last. What was written is dropped if the block raises. Errors of the file
    system are OSErrors.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.header = header
        self._path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._rows: list[int] = []
        self._form: dict[str, str] = {}
        self._arrived_ns = 0

    def __enter__(self) -> Self:
        self._file = self._part.open("wb")
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED, compresslevel=4)
        return self

    def write(self, columns: Columns) -> None:
        """Append rows: any number of them, in order. Raises TraceError if they do not fit."""
        where = f"chunk {len(self._rows)} of trace {self._path}"
        check(self.header, columns, where)
        form = {name: values.dtype.str for name, values in columns.items()}
        if self._form and form != self._form:
            raise TraceError(f"{where} has the columns {form}, the ones before it {self._form}")
        self._form = form
        self._arrived_ns = _in_order(columns, self._arrived_ns, where)
        for piece in pieces(self.header.kind, columns):
            for name, values in piece.items():
                if name == "blocks":
                    steps = np.diff(values.astype(np.int64), prepend=0)
                    self._member(_name(len(self._rows), _STEPS), steps)
                else:
                    self._member(_name(len(self._rows), name), values)
            self._rows.append(rows_of(self.header.kind, piece))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with blaming(self._path):
                if error is not None:
                    raise error
                self._finish()
                self._zip.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._part.replace(self._path)
        finally:
            with suppress(OSError, ValueError):  # what went wrong first is what is told
                self._zip.close()
            with suppress(OSError):
                self._file.close()
            self._part.unlink(missing_ok=True)

    def _finish(self) -> None:
        if not self._rows:
            raise TraceError(f"nothing was written to trace {self._path}")
        self.header = msgspec.structs.replace(self.header, rows=tuple(self._rows))
        stored = {"schema": self.header.schema, **msgspec.structs.asdict(self.header)}
        self._member(HEADER, np.frombuffer(msgspec.json.encode(stored), np.uint8))

    def _member(self, name: str, values: NDArray[np.generic]) -> None:
        info = zipfile.ZipInfo(name, _EPOCH)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.file_size = values.nbytes  # tells zipfile that no 64-bit sizes are needed
        with self._zip.open(info, "w") as member:
            npy.write_array(member, np.ascontiguousarray(values), (1, 0), allow_pickle=False)


def _in_order(columns: Columns, arrived_ns: int, where: str) -> int:
    """The last arrival so far. Raises TraceError if a chunk begins before the last one ended."""
    arrivals = columns.get("arrival_ns")
    if arrivals is None or not len(arrivals):
        return arrived_ns
    if int(arrivals[0]) < arrived_ns:
        raise TraceError(f"{where} begins before the chunk before it ended; write by arrival")
    return int(arrivals[-1])


@dataclass(frozen=True, slots=True)
class OpenTrace:
    """A trace file whose header has been read; no file stays open between calls."""

    path: Path
    header: TraceHeader

    def chunks(self, only: Collection[str] | None = None) -> Iterator[Columns]:
        """Each chunk's columns in order, read-only; those named in `only`, or all.

        With all columns each chunk is checked against the schema. Raises TraceError.
        """
        with opened_zip(self.path) as archive:
            names = _columns_of(self.path, archive, self.header)
            arrived_ns = 0
            for number, rows in enumerate(self.header.rows):
                where = f"trace {self.path}, chunk {number}"
                chunk = {
                    name: _column(self.path, archive, number, name)
                    for name in names
                    if only is None or name in only
                }
                if only is None:
                    check(self.header, chunk, where)
                    if rows_of(self.header.kind, chunk) != rows:
                        raise TraceError(f"{where} has not the {rows} rows that its header counts")
                    arrived_ns = _in_order(chunk, arrived_ns, where)
                yield chunk


def is_trace(path: Path) -> bool:
    """Whether a file is of this format, by its members; damaged ones are told when opened."""
    try:
        with zipfile.ZipFile(path) as archive:
            return HEADER in archive.namelist()
    except (OSError, *DAMAGE):
        return False


def open_trace(path: Path) -> OpenTrace:
    """Open a trace file. Raises TraceError: missing, damaged, foreign, or of a newer schema."""
    with opened_zip(path) as archive:
        if HEADER not in archive.namelist():
            raise TraceError(
                f"{path} is a zip archive but no trace of ours (it has no {HEADER}); make one with "
                "`prefetchd trace convert`"
            )
        values = read_member(path, archive, HEADER)
        header = _header(path, values.tobytes())
        _columns_of(path, archive, header)
    return OpenTrace(path, header)


class _Schema(msgspec.Struct):
    schema: str = ""


def _header(path: Path, data: bytes) -> TraceHeader:
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        _check_schema(path, schema)
        header = msgspec.json.decode(data, type=TraceHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} is no trace of ours: its header cannot be read: {error}"
        ) from error
    if not header.rows:
        raise TraceError(f"{path} holds no steps or requests at all")
    if schema != header.schema or min(header.rows) < 1:
        raise TraceError(f"{path} is damaged: its header contradicts itself; get it again")
    return header


def _check_schema(path: Path, schema: str) -> None:
    kind, _, version = schema.removeprefix(PREFIX).partition("/")
    if not schema.startswith(PREFIX) or not version.isdecimal():
        raise TraceError(f"{path} is no trace of ours: its schema is {schema[:60]!r}")
    if kind not in ("decode", "restore") or int(version) != VERSION:
        raise TraceError(
            f"{path} is of schema {schema[:60]}, and this version reads decode/{VERSION} and "
            f"restore/{VERSION}; update prefetchd, or convert the trace again from its source"
        )


def _name(chunk: int, column: str) -> str:
    return f"{chunk:05d}/{column}.npy"


def _column(path: Path, archive: zipfile.ZipFile, chunk: int, name: str) -> NDArray[np.generic]:
    if name != "blocks":
        return read_member(path, archive, _name(chunk, name))
    steps = read_member(path, archive, _name(chunk, _STEPS))
    if steps.dtype != np.int64:
        raise TraceError(f"trace {path}, chunk {chunk}: {_STEPS} must be int64, not {steps.dtype}")
    return np.cumsum(steps, dtype=np.int64)


def _columns_of(path: Path, archive: zipfile.ZipFile, header: TraceHeader) -> list[str]:
    """Names of the columns, the same in every chunk."""
    members = [name for name in archive.namelist() if name != HEADER]
    names = list(dict.fromkeys(name.partition("/")[2].removesuffix(".npy") for name in members))
    wanted = {_name(number, name) for number in range(len(header.rows)) for name in names}
    if len(members) != len(wanted) or set(members) != wanted:
        raise TraceError(
            f"{path} does not hold the {len(header.rows)} chunks that its header counts, each "
            "with the same columns; it is damaged, get it again"
        )
    return ["blocks" if name == _STEPS else name for name in names]
