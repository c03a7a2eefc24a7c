"""Operations that ended, judged: what failed, and which path is to blame for it.

Decides what counts as a failure, and of whom. What follows for a path is `paths`'; which page is
asked for again is the core's business.
"""

from __future__ import annotations

import errno
from collections import Counter

import numpy as np

from prefetchd.catalog import Catalog
from prefetchd.hostinfo import why_not
from prefetchd.model import Ids, Mask
from prefetchd.paths import Paths

REFUSED = -errno.ENODEV
"""The result of an operation for a path that has failed: it was not tried."""


class Blame:
    """`failures`: how many of each kind."""

    def __init__(self, catalog: Catalog, paths: Paths) -> None:
        self.failures: Counter[str] = Counter()
        self._catalog = catalog
        self._paths = paths

    def files_of(self, pages: Ids) -> Ids:
        shape = self._catalog.superblock
        return shape.files(pages // shape.layers)

    def failed(self, kind: str, file: int = 0, count: int = 1) -> None:
        """Count a failure; say the first of each kind and path, not the millionth."""
        self.failures[kind] += count
        self._paths.say(kind, file, "what it was for is a miss, the rest goes on")

    def judge_reads(self, pages: Ids, results: Ids, whole: Mask, now_ns: int) -> None:
        """One row an operation: its first page, its result, whether all bytes came."""
        paths, files = self._paths, self.files_of(pages)
        for file, result in zip(files[~whole].tolist(), results[~whole].tolist(), strict=True):
            if result == REFUSED and paths.unreadable[file]:
                self.failures["path has failed"] += 1
                continue
            self.failed(why_not(result, "short read"), file)
            if result != -errno.ECANCELED:
                paths.failed(file, 1, now_ns, reading=True)
        paths.succeeded(files[whole], reading=True)

    def judge_write(self, file: int, length: int, result: int, now_ns: int) -> None:
        """`length`, `result`: bytes wanted; bytes written or -errno."""
        if result == length:
            self._paths.bytes_written[file] += length
            if self._paths.uneasy:
                self._paths.succeeded(np.array([file]), reading=False)
        elif not (result == REFUSED and self._paths.unwritable[file]):
            self._paths.failed(file, 1, now_ns, reading=False)
