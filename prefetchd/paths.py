"""The paths of a store while it is open: which of them fail, what follows, and who is told.

Decides that blocks on a path which cannot be read are not found, that new blocks go to paths which
can be written, and that each kind of trouble is said once a path. When a path is given up and tried
again is `health`'s; which operation failed is the driver's business.

Reading and writing are judged apart, since a drive at its end often still reads. A path that cannot
be read is not written either. A path is probed by reading its superblock while the store is used;
writing is simply tried again, with a block that then may fail.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from prefetchd.catalog import Catalog
from prefetchd.commit import Commit
from prefetchd.device import OP, READ, Arena, Ops
from prefetchd.format import FormatError, newest_superblock
from prefetchd.health import Health, State
from prefetchd.model import Ids
from prefetchd.pipeline import PROBE_TAG

log = logging.getLogger("prefetchd")

_FAILED_WORDS = {
    True: "this path has failed: its blocks are misses and new ones go to the other paths, until "
    "it answers again",
    False: "this path cannot be written: new blocks go to the others; what it holds is read on",
}


class PathStats(msgspec.Struct, frozen=True):
    """One path: `reading` and `writing` are "healthy", "suspect", "failed" or "detached";
    `refused` counts operations that were not even tried, since the path had failed; `blocks`:
    extents in use, of all namespaces; `draining`: they are being moved to the other paths."""

    path: str
    reading: str
    writing: str
    errors: int
    refused: int
    bytes_read: int
    bytes_written: int
    blocks: int
    draining: bool


class Paths:
    """`names`: for messages, one a path. `memory`, of which the arena's byte `start` is the first,
    is for probes: a superblock's copies a path."""

    def __init__(
        self, names: Sequence[str], catalog: Catalog, commit: Commit, memory: Arena, start: int
    ) -> None:
        self.names = tuple(names)
        self.uneasy = False
        """Whether any path is not healthy, so that successes are worth telling."""
        self.down = False
        """Whether operations on some path are to be refused."""
        count = len(self.names)
        self.unreadable = np.zeros(count, np.bool_)
        self.unwritable = np.zeros(count, np.bool_)
        self.bytes_read = np.zeros(count, np.int64)
        self.bytes_written = np.zeros(count, np.int64)
        self.refused = np.zeros(count, np.int64)
        self._reading = [Health() for _ in self.names]
        self._writing = [Health() for _ in self.names]
        self._catalog = catalog
        self._commit = commit
        self._memory = memory.reshape(count, -1)
        self._start = start
        self._probing: set[int] = set()
        self.draining: set[int] = set()
        """Paths on which no new block is written although they can be."""
        self.detached: set[int] = set()
        """Those that are away on purpose, of which nothing is missed."""
        self._said: set[tuple[str, int]] = set()

    def lose(self, path: int) -> None:
        """This path is not there; no operation is for it, and it is not probed."""
        self._reading[path].lost()
        self._writing[path].lost()
        self._close(path, reading=True)

    def found(self, path: int, name: str) -> None:
        """It is there (again), with nothing on it; another one if it has another name."""
        if name != self.names[path]:
            self.names = (*self.names[:path], name, *self.names[path + 1 :])
            self._said = {said for said in self._said if said[1] != path}
            for counts in (self.bytes_read, self.bytes_written, self.refused):
                counts[path] = 0
        self._reading[path], self._writing[path] = Health(), Health()
        self.detached.discard(path)
        if self.unreadable[path]:
            self.unreadable[path] = False
            self._catalog.index.resume(path)
        self._write_again(path)
        self.uneasy = any(h.state for h in (*self._reading, *self._writing))

    def probing(self, path: int) -> bool:
        return path in self._probing

    def drain(self, path: int) -> None:
        """From here on new blocks go to the others."""
        self.draining.add(path)
        self._catalog.free.bar(path)

    def use_again(self, path: int) -> None:
        self.draining.discard(path)
        if not self.unwritable[path]:
            self._catalog.free.unbar(path)

    # --- what came of operations ---

    def count_reads(self, ops: Ops, size: int) -> None:
        """`size`: their bytes in all, for the case of one path, which is free."""
        if len(self.names) == 1:
            self.bytes_read[0] += size
        else:
            self.bytes_read += np.bincount(
                ops["file"], ops["length"], minlength=len(self.names)
            ).astype(np.int64)

    def say(self, kind: str, path: int, words: str) -> None:
        """Log trouble of a kind, once a path."""
        if (kind, path) not in self._said:
            self._said.add((kind, path))
            log.warning("%s: %s; %s", self.names[path], kind, words)

    def failed(self, path: int, count: int, now_ns: int, *, reading: bool) -> None:
        if count == 0:
            return
        self.uneasy = True
        health = (self._reading if reading else self._writing)[path]
        if health.failed(count, now_ns) and len(self.names) > 1:
            self._close(path, reading=reading)
            log.error("%s: %s", self.names[path], _FAILED_WORDS[reading])

    def succeeded(self, files: Ids, *, reading: bool) -> None:
        for path, count in Counter(files.tolist()).items():
            (self._reading if reading else self._writing)[path].succeeded(count)
        self.uneasy = any(h.state for h in (*self._reading, *self._writing))

    # --- what follows ---

    def _close(self, path: int, *, reading: bool) -> None:
        self.uneasy = self.down = True
        if reading and not self.unreadable[path]:
            self.unreadable[path] = True
            self._catalog.index.suspend(path)
        if not self.unwritable[path]:
            self.unwritable[path] = True
            self._commit.broken.add(path)
            self._catalog.free.bar(path)

    def _reopen(self, path: int) -> None:
        """As far as both directions allow."""
        if self.unreadable[path] and self._reading[path].state != State.FAILED:
            self.unreadable[path] = False
            self._catalog.index.resume(path)
            log.warning("%s: this path can be read again", self.names[path])
        if self.unreadable[path] or self._writing[path].state == State.FAILED:
            return
        if self.unwritable[path]:
            self._write_again(path)
            log.warning("%s: this path is written again", self.names[path])

    def _write_again(self, path: int) -> None:
        self.unwritable[path] = False
        self._commit.broken.discard(path)
        if path not in self.draining:
            self._catalog.free.unbar(path)
        self._commit.retry(path)
        self.down = bool(self.unwritable.any())

    def probes(self, now_ns: int) -> Ops | None:
        """Operations that try what is due; `probed` is told of their end."""
        if len(self.names) == 1:  # there is no other path to go to: it is simply used on
            for health in (*self._reading, *self._writing):
                if health.is_due(now_ns):
                    health.forgive()
            return None
        for path, health in enumerate(self._writing):
            if health.is_due(now_ns) and not self.unreadable[path] and health.forgive():
                self._reopen(path)
        due = [
            path
            for path, health in enumerate(self._reading)
            if health.is_due(now_ns) and path not in self._probing
        ]
        if not due:
            return None
        self._probing.update(due)
        ops = np.zeros(len(due), OP)
        ops["tag"] = PROBE_TAG | np.array(due, np.uint64)
        ops["memory"] = self._start + np.array(due) * self._memory.shape[1]
        ops["length"] = self._memory.shape[1]
        ops["file"] = due
        ops["kind"] = READ
        return ops

    def probed(self, path: int, result: int, now_ns: int) -> None:
        self._probing.discard(path)
        well = result == self._memory.shape[1] and self._is_ours(path)
        if self._reading[path].probed(well=well, now_ns=now_ns):
            self._reopen(path)

    def _is_ours(self, path: int) -> bool:
        try:
            found = newest_superblock(self._memory[path])
        except (FormatError, msgspec.DecodeError):
            return False
        ours = self._catalog.superblock.store_id
        return (found.store_id, found.stripe) == (ours, path)

    # --- what can be told ---

    def _word(self, path: int, state: State) -> str:
        return "detached" if path in self.detached else state.name.lower()

    def stats(self) -> tuple[PathStats, ...]:
        return tuple(
            PathStats(
                name,
                self._word(path, self._reading[path].state),
                self._word(
                    path, State.FAILED if self.unwritable[path] else self._writing[path].state
                ),
                self._reading[path].errors + self._writing[path].errors,
                int(self.refused[path]),
                int(self.bytes_read[path]),
                int(self.bytes_written[path]),
                self._catalog.taken_on(path),
                path in self.draining,
            )
            for path, name in enumerate(self.names)
        )
