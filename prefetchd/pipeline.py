"""What passes between puts, the writer and the commit: jobs, who waits for them, tags and counts.

Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WRITE_TAG = np.uint64(1 << 63)
"""Set in the tag of every operation of a put."""
COMMIT_BIT = 1 << 62
"""Set in the tags of commits, beside WRITE_TAG."""


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
    """A block on its way to the medium. `visible`: it is found already. `staged`: its pages came
    into staging before it was written. `written`: the device has its payload. `deadline_ns`: until
    then a staged one is waited for. `since_ns`: when it was found, or else written."""

    block: int
    key: bytes
    waiters: list[Waiter]
    deadline_ns: int
    visible: bool = False
    staged: bool = False
    written: bool = False
    given_up: bool = False
    since_ns: int = 0

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
