"""Group commit: when what was written is flushed, and when the medium is told of it.

Decides the order that makes every statement on the medium a true one, whatever order a device
gives to writes between two flushes:

* a record (header and journal) says that a block is there only after a flush that came after the
  block's payload;
* an extent is written over only after a flush that came after the record that its block is gone.

One flush serves everybody who waits for one: the payloads written so far, and the records of the
payloads flushed before. Copies no payload, moves no bytes, reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import Catalog
from prefetchd.device import OP, SYNC, WRITE, Ops
from prefetchd.journal import Journal, Piece
from prefetchd.model import NO_IDS, Ids
from prefetchd.pipeline import COMMIT_BIT, WRITE_TAG, ByteCounts, FlushLimits, Job
from prefetchd.records import PUBLISH, REMOVE, encode_headers

ROWS = 64
"""Records of one commit."""
_PAUSE_NS = 200_000_000  # after a flush that failed

_FLUSH, _RECORD, _COMPACT = range(3)


@dataclass(slots=True)
class _Under:
    """The phase under way: what it is about, and what has come of it."""

    phase: int
    jobs: list[Job] = field(default_factory=list)
    removals: Ids = field(default_factory=lambda: NO_IDS)
    left: dict[int, int] = field(default_factory=dict)  # tag: bytes expected
    wrong: dict[int, int] = field(default_factory=dict)  # number of the operation: its result
    first: int = 0


class Commit:
    """`region`: part of the device's arena from byte `start`, of `region_bytes`."""

    def __init__(
        self,
        catalog: Catalog,
        journal: Journal,
        region: NDArray[np.uint8],
        start: int,
        limits: FlushLimits,
    ) -> None:
        self.catalog = catalog
        self.journal = journal
        self.written = ByteCounts()
        self.draining = False
        """Flush whatever is not flushed, however young."""
        self.hurried = False
        """The same, once."""
        self.troubles: list[tuple[str, int]] = []
        """What failed and with which result (-errno, or a short count), for whoever counts it."""
        self._region = region
        self._start = start
        self._limits = limits
        self._unflushed: list[Job] = []
        self._ready: list[Job] = []  # their payload is on the medium
        self._said: list[Job] = []  # their records are written
        self._removing: list[int] = []
        self._unsaid: list[int] = []  # removed, and that is written
        self._dirty: set[int] = set()  # files
        self._under: _Under | None = None
        self._compacting: list[Piece | None] = []  # None: a flush
        self._serial = 0
        self._paused_ns = 0

    @staticmethod
    def region_bytes(header_bytes: int) -> int:
        return 2 * ROWS * header_bytes

    @property
    def idle(self) -> bool:
        """Whether everything that was said is on the medium, and nothing is left to be said."""
        lists = (self._unflushed, self._ready, self._said, self._removing, self._unsaid)
        return self._under is None and not any(lists) and not self._compacting

    @property
    def removing(self) -> int:
        """Extents that will be free once the medium has been told."""
        under = len(self._under.removals) if self._under is not None else 0
        return len(self._removing) + len(self._unsaid) + under

    @property
    def at_risk(self) -> int:
        """Blocks that are found and would not survive a crash."""
        lists = self._unflushed, self._ready, self._said
        return sum(job.visible for jobs in lists for job in jobs)

    def add(self, job: Job, now_ns: int) -> None:
        """The payload of a block has been written."""
        job.since_ns = job.since_ns or now_ns
        self._unflushed.append(job)
        self._dirty.add(job.block % self.catalog.superblock.stripes)

    def remove(self, blocks: Ids) -> None:
        """These blocks, hidden already, are to be gone from the medium; then their extents are
        free."""
        self._removing += blocks.tolist()

    # --- what to do next ---

    def step(self, now_ns: int) -> Ops | None:
        """The operations of the next phase, if one is due and none is under way."""
        if self._under is not None or now_ns < self._paused_ns:
            return None
        if self._compacting:
            return self._compact()
        if self._ready or self._removing:
            return self._record()
        if self._said or self._unsaid or self._due(now_ns):
            return self._flush()
        return None

    def due(self, now_ns: int) -> bool:
        """Whether `step` would have something to do now."""
        if self._under is not None or now_ns < self._paused_ns:
            return False
        waiting = self._compacting or self._ready or self._removing or self._said or self._unsaid
        return bool(waiting) or self._due(now_ns)

    def _due(self, now_ns: int) -> bool:
        waiting = self._unflushed
        if not waiting:
            return False
        if self.draining or self.hurried or len(waiting) >= self._limits.blocks:
            return True
        if now_ns - min(job.since_ns for job in waiting) >= self._limits.age_ns:
            return True
        return any(job.durable for job in waiting)

    def _flush(self) -> Ops:
        """All that was written: a flush that is made for one of them covers the others."""
        taken, self._unflushed = self._unflushed, []
        self.hurried = False
        self._under = _Under(_FLUSH, jobs=taken)
        files = sorted(self._dirty)
        self._dirty.clear()
        self.written.flushes += len(files)
        return self._begin([(file, SYNC, 0, 0, 0) for file in files])

    def _record(self) -> Ops:
        shape = self.catalog.superblock
        removals = np.array(self._removing[:ROWS], np.int64)
        jobs = self._ready[: ROWS - len(removals)]
        if self.journal.generation and not self.journal.has_room(len(removals) + len(jobs)):
            pieces = self.journal.snapshot(self.catalog.live(), len(self._region))
            self._compacting = [*pieces, None, self.journal.head(), None]
            return self._compact()
        del self._removing[:ROWS], self._ready[: len(jobs)]
        self._under = _Under(_RECORD, jobs, removals)
        blocks = np.array([job.block for job in jobs], np.int64)
        gone, here = self.catalog.say(removals, REMOVE), self.catalog.say(blocks, PUBLISH)
        records = np.concatenate([gone, here])
        rows = encode_headers(records, shape)
        self._region[: rows.size] = rows.reshape(-1)
        files = shape.files(records["block"])
        places = shape.extent_offsets(records["block"])
        size = shape.header_bytes
        todo = [
            (file, WRITE, offset, number * size, size)
            for number, (file, offset) in enumerate(
                zip(files.tolist(), places.tolist(), strict=True)
            )
        ]
        self._dirty.update(files.tolist())
        self.written.header += rows.size
        if self.journal.generation:
            todo.append(self._piece(self.journal.append(records), rows.size))
        return self._begin(todo)

    def _compact(self) -> Ops:
        self._under = _Under(_COMPACT)
        piece = self._compacting.pop(0)
        if piece is None:
            self.written.flushes += 1
            return self._begin([(0, SYNC, 0, 0, 0)])
        return self._begin([self._piece(piece, 0)])

    def _piece(self, piece: Piece, at: int) -> tuple[int, int, int, int, int]:
        self._region[at : at + len(piece.data)] = piece.data
        self.written.journal += len(piece.data)
        self._dirty.add(0)
        return 0, WRITE, piece.offset, at, len(piece.data)

    def _begin(self, todo: list[tuple[int, int, int, int, int]]) -> Ops:
        assert self._under is not None
        ops = np.zeros(len(todo), OP)
        columns = np.array(todo, np.int64).reshape(len(todo), 5).T
        ops["file"], ops["kind"], ops["offset"], ops["memory"], ops["length"] = columns
        ops["memory"] += self._start
        serials = np.arange(self._serial, self._serial + len(todo), dtype=np.uint64)
        ops["tag"] = WRITE_TAG | np.uint64(COMMIT_BIT) | serials
        self._under.first = self._serial
        self._under.left = dict(zip(serials.tolist(), columns[4].tolist(), strict=True))
        self._serial += len(todo)
        return ops

    # --- what came of it ---

    def completed(self, tag: int, result: int, now_ns: int) -> list[tuple[Job, int]]:
        """An operation has ended; the jobs that end with it: each with 0, or what went wrong
        (-errno, or a short count)."""
        serial = tag & (COMMIT_BIT - 1)
        under = self._under
        if under is None or serial not in under.left:
            return []  # seen twice
        if result != under.left.pop(serial):
            under.wrong[serial - under.first] = result
        if under.left:
            return []
        self._under = None
        if under.phase == _COMPACT:
            if under.wrong:
                self._lose_journal(next(iter(under.wrong.values())))
            return []
        if under.phase == _RECORD:
            return self._recorded(under)
        return self._flush_failed(under, now_ns) if under.wrong else self._flushed(under)

    def _lose_journal(self, result: int) -> None:
        self.journal.give_up()
        self._compacting = []
        self.troubles.append(("journal", result))

    def _recorded(self, under: _Under) -> list[tuple[Job, int]]:
        ended: list[tuple[Job, int]] = []
        count = len(under.removals)
        rows = count + len(under.jobs)
        self.troubles += [("header", wrong) for row, wrong in under.wrong.items() if row < rows]
        for number, block in enumerate(under.removals.tolist()):
            if number not in under.wrong:  # else its extent stays out of use
                self._unsaid.append(block)
        for number, job in enumerate(under.jobs, count):
            if number not in under.wrong:
                self._said.append(job)
            else:
                self._discard(job, said=True)  # the journal may say that it is there
                ended.append((job, under.wrong[number]))
        if (failure := under.wrong.get(rows)) is not None:
            self._lose_journal(failure)
        return ended

    def _flushed(self, under: _Under) -> list[tuple[Job, int]]:
        ended = [(job, 0) for job in self._said]
        self._said = []
        for job, _ in ended:
            self.catalog.busy[job.block] = False
        for block in self._unsaid:
            self.catalog.give_back(block)
        self._unsaid = []
        self._ready += under.jobs
        return ended

    def _discard(self, job: Job, *, said: bool) -> None:
        """Free its extent again; that of a block that can be read goes when nobody reads it."""
        if job.staged or job.visible:
            return
        if said:
            self._removing.append(job.block)
        else:
            self.catalog.give_back(job.block)

    def _flush_failed(self, under: _Under, now_ns: int) -> list[tuple[Job, int]]:
        """Nobody knows what is on the medium: who waited is told, what is found stays found."""
        result = next(iter(under.wrong.values()))
        self.troubles.append(("flush", result))
        self._paused_ns = now_ns + _PAUSE_NS
        self._removing += self._unsaid
        ended: list[tuple[Job, int]] = []
        for job in [*under.jobs, *self._said]:
            if job.visible:  # a record of it may be there or not: it is made anew
                job.since_ns = now_ns
                self._unflushed.append(job)
            else:
                self._discard(job, said=job in self._said)
                ended.append((job, result))
        self._said, self._unsaid = [], []
        files = [job.block % self.catalog.superblock.stripes for job in self._unflushed]
        self._dirty.update(files)
        return ended
