"""What passes between puts, the writer and the commit: jobs, who waits for them, tags and counts.

Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prefetchd.device import OP, Ops
from prefetchd.model import NO_IDS, Ids

WRITE_TAG = np.uint64(1 << 63)
"""Set in the tag of every operation of a put."""
COMMIT_BIT = 1 << 62
"""Set in the tags of commits, beside WRITE_TAG."""
PROBE_TAG = np.uint64(1 << 63 | 1 << 61)
"""Set in the tags of probes of paths, without COMMIT_BIT."""


def is_probe(tag: int) -> bool:
    return tag >> 61 == int(PROBE_TAG) >> 61


def path_of_probe(tag: int) -> int:
    return tag & ((1 << 61) - 1)


@dataclass(frozen=True, slots=True)
class FlushLimits:
    """What a crash may take of what was put without waiting for a flush: at most `blocks` blocks,
    and nothing older than `age_ns` (and what the flush itself takes)."""

    blocks: int = 64
    age_ns: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Waiter:
    """One who put a block; `put` and `position` are his own."""

    put: int
    position: int
    durable: bool
    deadline_ns: int


@dataclass(slots=True)
class Job:
    """A block on its way to the medium, first through write buffer `buffer`. `visible`: it is found
    already. `filling`: somebody has begun to fill its buffer. `opened`: its extent and its pages in
    staging were there before the put. `staged`: its pages came into staging before it was written.
    `written`: the device has its payload. `deadline_ns`: until then a staged one is waited for.
    `since_ns`: when it was found, or else written."""

    block: int
    key: bytes
    waiters: list[Waiter]
    deadline_ns: int
    buffer: int
    seed: int
    opened: bool = False
    moved_from: int = -1
    """The block that it is a copy of, and whose place it takes once it is durable."""
    filling: bool = False
    visible: bool = False
    staged: bool = False
    written: bool = False
    given_up: bool = False
    since_ns: int = 0

    def rival(self, found: int) -> int:
        """What `found`, to which its key leads, is to it: -1 if it is to be found itself. A copy is
        not, if what it was copied from has gone meanwhile and nobody has put it again."""
        if self.moved_from < 0:
            return found
        if found == self.moved_from or (found < 0 and len(self.waiters) > 1):
            return -1
        return max(found, self.moved_from) if found < 0 else found

    @property
    def behind(self) -> bool:
        """Whether it is found while nothing but staging has its bytes."""
        return self.visible and not self.written

    @property
    def awaited(self) -> bool:
        """Whether its end is of interest to anybody."""
        return bool(self.waiters) or self.behind

    @property
    def durable(self) -> bool:
        return not self.visible or any(waiter.durable for waiter in self.waiters)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A part of a commit that failed: `result` is -errno, or a short count; `file` its path."""

    what: str
    result: int
    file: int


Todo = tuple[int, int, int, int, int]
"""One operation of a commit: file, kind, offset, memory, length."""


@dataclass(slots=True)
class Phase:
    """The phase of a commit that is under way: what it is about, and what has come of it."""

    number: int
    jobs: list[Job] = field(default_factory=list)
    removals: Ids = field(default_factory=lambda: NO_IDS)
    files: list[int] = field(default_factory=list)  # of each operation
    left: dict[int, int] = field(default_factory=dict)  # tag: bytes expected
    wrong: dict[int, int] = field(default_factory=dict)  # number of the operation: its result
    first: int = 0

    def begin(self, todo: list[Todo], start: int, serial: int) -> Ops:
        """Its operations, with serial numbers from `serial` on in their tags; `start`: where their
        memory is counted from."""
        ops = np.zeros(len(todo), OP)
        columns = np.array(todo, np.int64).reshape(len(todo), 5).T
        ops["file"], ops["kind"], ops["offset"], ops["memory"], ops["length"] = columns
        ops["memory"] += start
        serials = np.arange(serial, serial + len(todo), dtype=np.uint64)
        ops["tag"] = WRITE_TAG | np.uint64(COMMIT_BIT) | serials
        self.first = serial
        self.left = dict(zip(serials.tolist(), columns[4].tolist(), strict=True))
        return ops


@dataclass(slots=True)
class ByteCounts:
    """Bytes handed to the device, by what they are, and flushes."""

    payload: int = 0
    header: int = 0
    journal: int = 0
    flushes: int = 0

    @property
    def total(self) -> int:
        return self.payload + self.header + self.journal
