"""Reads arrays from an `.npz` file: a zip archive of `.npy` members.

Decides how what is wrong with such a file is told. Nothing is unpickled. Knows no column.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from prefetchd.hostinfo import errno_name
from prefetchd.lab.trace_schema import TraceError

ZIP_MAGIC = b"PK"
MEMBER_BYTES_MAX = 256 << 20
"""No writer of ours makes a larger member; one that claims to be is not read into memory."""
# What zipfile, zlib and numpy's header reader raise for bytes that are not as they should be.
DAMAGE = (
    ValueError,
    TypeError,
    EOFError,
    KeyError,
    IndexError,
    MemoryError,
    RuntimeError,
    OverflowError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@contextmanager
def opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive to read from; whatever is wrong with it or in it becomes a TraceError."""
    try:
        with path.open("rb") as file:
            _check_magic(path, file.read(len(ZIP_MAGIC)))
            with zipfile.ZipFile(file) as archive:
                yield archive
    except FileNotFoundError:
        raise TraceError(f"there is no trace {path}") from None
    except OSError as error:
        reason = errno_name(error.errno) if error.errno else str(error)
        raise TraceError(f"{path} cannot be read: {reason}") from error
    except DAMAGE as error:
        raise TraceError(
            f"{path} cannot be read as an .npz trace: {error}; it may be cut short, get it again"
        ) from error


def _check_magic(path: Path, magic: bytes) -> None:
    if not magic:
        raise TraceError(f"{path} is empty; get it again")
    if magic != ZIP_MAGIC:
        raise TraceError(f"{path} is no .npz file (a zip archive of arrays); name a trace")


def read_member(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[np.generic]:
    """An array, read-only. Reading all of a member is what verifies its checksum."""
    info = archive.getinfo(name)
    if info.file_size > MEMBER_BYTES_MAX:
        raise TraceError(
            f"{path}: {name} claims {info.file_size} bytes, and no column of a chunk has over "
            f"{MEMBER_BYTES_MAX}; it is damaged or foreign"
        )
    data = archive.read(info)
    stream = io.BytesIO(data)
    if npy.read_magic(stream) != (1, 0):
        raise TraceError(f"{path}: {name} is of another version of the .npy format")
    shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    if dtype.hasobject:
        raise TraceError(f"{path}: {name} holds pickled Python objects, which are never read")
    count = math.prod(shape)
    if is_fortran or stream.tell() + count * dtype.itemsize != len(data):
        raise TraceError(f"{path}: {name} does not hold the {shape} values that it claims")
    return np.frombuffer(data, dtype, count, stream.tell()).reshape(shape)
