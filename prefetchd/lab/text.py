"""Lines of a trace in text, gzipped or not. Decides how what is wrong with a file is told.

Knows nothing of what the lines say. A file is read once, from front to end, a line at a time.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from prefetchd.lab.trace_format import TraceError

Told = Callable[[int, int], None]
"""Is told how much has been done, of how much."""

_GZIP_MAGIC = b"\x1f\x8b"
_LINE_BYTES_MAX = 256 << 20
_TOLD_LINES = 1000


def text_lines(path: Path, told: Told | None = None) -> Iterator[tuple[int, bytes]]:
    """Line number, from 1, and line, without empty ones. Raises TraceError.

    `told` hears bytes of the file.
    """
    number = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as raw, _unpacked(raw) as file:
            while line := file.readline(_LINE_BYTES_MAX):
                number += 1
                if len(line) == _LINE_BYTES_MAX:
                    raise TraceError(
                        f"trace {path}, line {number} does not end; is it a text file?"
                    )
                if told and number % _TOLD_LINES == 0:
                    told(raw.tell(), size)
                if line := line.removeprefix(codecs.BOM_UTF8).strip():
                    yield number, line
        if told:
            told(size, size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"trace {path} is cut short or no gzip file (after line {number}): {error}"
        ) from error
    except IsADirectoryError as error:
        raise TraceError(f"trace {path} is a folder; name a file in it") from error
    except FileNotFoundError as error:
        raise TraceError(f"there is no trace {path}") from error
    except OSError as error:
        raise TraceError(f"trace {path} cannot be read: {error.strerror}") from error


def _unpacked(raw: BufferedReader) -> BinaryIO:
    """The text itself, of a file that is packed or not."""
    is_packed = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    return cast("BinaryIO", gzip.open(raw)) if is_packed else raw


def not_usable(path: Path, number: int, error: Exception) -> TraceError:
    """What a line lacks, or why it cannot be used."""
    what = f"has no {error.args[0]}" if isinstance(error, KeyError) else f"cannot be used: {error}"
    return TraceError(f"trace {path}, line {number} {what}")
