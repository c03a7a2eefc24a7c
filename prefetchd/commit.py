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

import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import Catalog
from prefetchd.device import SYNC, WRITE, Ops
from prefetchd.journal import Journal, Piece
from prefetchd.model import Ids
from prefetchd.pipeline import COMMIT_BIT, ByteCounts, FlushLimits, Job, Phase, Todo, Trouble
from prefetchd.records import PUBLISH, REMOVE, encode_headers
from prefetchd.stuck import Stuck

ROWS = 64  # records of one commit
GATHER_NS = 10_000_000  # how long a flush waits for payloads that are being written
_PAUSE_NS = 200_000_000  # after a flush that failed

_FLUSH, _RECORD, _COMPACT = range(3)

Ended = list[tuple[Job, int]]


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
        self.draining = self.hurried = False
        """Flush whatever is not flushed, however young: always, or once."""
        self.coming = 0
        """Blocks whose payload is being written; whoever adds them counts them."""
        self.failed_flushes = 0  # one after another, of files not known to be broken
        self.troubles: list[Trouble] = []
        """What failed, for whoever counts it."""
        self.broken: set[int] = set()
        """Files (paths) on which nothing can be written; what is to be said there waits."""
        self._stuck = Stuck()
        self._region = region
        self._start = start
        self._limits = limits
        self._unflushed: list[Job] = []
        self._ready: list[Job] = []  # their payload is on the medium
        self._said: list[Job] = []  # their records are written
        self._removing: list[int] = []
        self._unsaid: list[int] = []  # removed, and that is written
        self._dirty: set[int] = set()  # files
        self._under: Phase | None = None
        self._compacting: list[Piece | None] = []  # None: a flush
        self._serial = self._paused_ns = 0
        self._asked_ns = 0  # since when a flush is asked for; 0: it is not

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
        return sum(job.visible for job in [*self._unflushed, *self._ready, *self._said])

    def add(self, job: Job, now_ns: int) -> None:
        """The payload of a block has been written."""
        job.since_ns = job.since_ns or now_ns
        self._unflushed.append(job)
        self._dirty.add(job.block % self.catalog.superblock.stripes)

    def remove(self, blocks: Ids) -> None:
        """These blocks, hidden already, are to be gone from the medium; then their extents are
        free."""
        self._removing += blocks.tolist()

    def retry(self, file: int) -> None:
        """What could not be said on this file can be said now."""
        self._removing += self._stuck.take(file, self.catalog.superblock.stripes)

    # --- what to do next ---

    def step(self, now_ns: int) -> Ops | None:
        """The operations of the next phase, if one is due and none is under way."""
        if self._under is not None or now_ns < self._paused_ns:
            return None
        if self._compacting:
            return self._compact()
        if self._ready or self._removing:
            return self._record()
        if self._unsaid or (self._asks(now_ns) and self._gathered(now_ns)):
            return self._flush()
        return None

    def _gathered(self, now_ns: int) -> bool:
        """Whether a flush that is asked for waits no more for payloads that could share it."""
        if not self._asked_ns:
            self._asked_ns = now_ns
        return not self.coming or self.hurried or now_ns - self._asked_ns >= GATHER_NS

    def _asks(self, now_ns: int) -> bool:
        """Whether somebody needs a flush, or what is at risk has reached its bound."""
        waiting = self._unflushed
        if self._said or not waiting:
            return bool(self._said)
        if self.draining or self.hurried or len(waiting) >= self._limits.blocks:
            return True
        if now_ns - min(job.since_ns for job in waiting) >= self._limits.age_ns:
            return True
        return any(job.durable for job in waiting)

    def _flush(self) -> Ops:
        # All there is, even what could wait: the files it lies in are clean from here on.
        taken, self._unflushed = self._unflushed, []
        self.hurried, self._asked_ns = False, 0
        files = sorted(self._dirty)
        self._under = Phase(_FLUSH, taken, files=files)
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
        self._under = Phase(_RECORD, jobs, removals)
        blocks = np.array([job.block for job in jobs], np.int64)
        gone, here = self.catalog.say(removals, REMOVE), self.catalog.say(blocks, PUBLISH)
        records = np.concatenate([gone, here])
        rows = encode_headers(records, shape)
        self._region[: rows.size] = rows.reshape(-1)
        files = shape.files(records["block"])
        self._under.files = [*files.tolist(), 0]
        places = shape.extent_offsets(records["block"])
        size = shape.header_bytes
        pairs = enumerate(zip(files.tolist(), places.tolist(), strict=True))
        todo = [(file, WRITE, offset, row * size, size) for row, (file, offset) in pairs]
        self._dirty.update(files.tolist())
        self.written.header += rows.size
        if self.journal.generation:
            todo.append(self._piece(self.journal.append(records), rows.size))
        return self._begin(todo)

    def _compact(self) -> Ops:
        self._under = Phase(_COMPACT)
        piece = self._compacting.pop(0)
        if piece is None:
            self.written.flushes += 1
            return self._begin([(0, SYNC, 0, 0, 0)])
        return self._begin([self._piece(piece, 0)])

    def _piece(self, piece: Piece, at: int) -> Todo:
        self._region[at : at + len(piece.data)] = piece.data
        self.written.journal += len(piece.data)
        self._dirty.add(0)
        return 0, WRITE, piece.offset, at, len(piece.data)

    def _begin(self, todo: list[Todo]) -> Ops:
        assert self._under is not None
        ops = self._under.begin(todo, self._start, self._serial)
        self._serial += len(todo)
        return ops

    # --- what came of it ---

    def completed(self, tag: int, result: int, now_ns: int) -> Ended:
        """The jobs that end with an operation: each with 0, or -errno, or a short count."""
        serial = tag & (COMMIT_BIT - 1)
        under = self._under
        if under is None or serial not in under.left:
            return []  # seen twice
        if result != under.left.pop(serial):
            under.wrong[serial - under.first] = result
        if under.left:
            return []
        self._under = None
        if under.number == _COMPACT:
            if under.wrong:
                self._lose_journal(next(iter(under.wrong.values())))
            return []
        if under.number == _RECORD:
            return self._recorded(under)
        return self._flushed(under, now_ns)

    def _lose_journal(self, result: int) -> None:
        self.journal.give_up()
        self._compacting = []
        self.troubles.append(Trouble("journal", result, 0))

    def _recorded(self, under: Phase) -> Ended:
        ended: Ended = []
        count = len(under.removals)
        rows = count + len(under.jobs)
        self._note("header", {row: what for row, what in under.wrong.items() if row < rows}, under)
        for number, block in enumerate(under.removals.tolist()):
            if number not in under.wrong:
                self._stuck.forget(block)
                self._unsaid.append(block)
            elif self._stuck.again(block):
                self._removing.append(block)
        for number, job in enumerate(under.jobs, count):
            if number not in under.wrong:
                self._said.append(job)
            else:
                self._discard(job, said=True)  # the journal may say that it is there
                ended.append((job, under.wrong[number]))
        if (failure := under.wrong.get(rows)) is not None:
            self._lose_journal(failure)
        return ended

    def _note(self, what: str, wrong: dict[int, int], under: Phase) -> None:
        for number, result in wrong.items():
            if under.files[number] not in self.broken:
                self.troubles.append(Trouble(what, result, under.files[number]))

    def _flushed(self, under: Phase, now_ns: int) -> Ended:
        """What is on the medium is said or told. Of a file that could not be flushed nobody knows:
        who waited is told."""
        bad = {under.files[number]: result for number, result in under.wrong.items()}
        self._note("flush", under.wrong, under)
        failed = bool(bad.keys() - self.broken)
        self.failed_flushes = self.failed_flushes + 1 if failed else 0
        self._paused_ns = now_ns + _PAUSE_NS if failed else 0
        shape = self.catalog.superblock
        if 0 in bad and shape.stripes > 1 and self.journal.generation:
            self._lose_journal(bad[0])  # the headers on the other paths say it all
        for block in self._unsaid:
            if block % shape.stripes in bad:
                self._removing.append(block)
            else:
                self.catalog.give_back(block)
        said, self._said, self._unsaid = self._said, [], []
        ended: Ended = []
        for number, job in enumerate([*said, *under.jobs]):
            is_said = number < len(said)
            if job.block % shape.stripes in bad:
                ended += self._not_flushed(job, bad, now_ns, said=is_said)
            elif is_said:
                self.catalog.busy[job.block] = False
                ended.append((job, 0))
            else:
                self._ready.append(job)
        return ended

    def _not_flushed(self, job: Job, bad: dict[int, int], now_ns: int, *, said: bool) -> Ended:
        """What is found is flushed and recorded anew, unless nothing can be written there."""
        file = job.block % self.catalog.superblock.stripes
        if job.visible and file not in self.broken:
            job.since_ns = now_ns
            self._unflushed.append(job)
            self._dirty.add(file)
            return []
        self._discard(job, said=said)
        return [(job, bad[file])]

    def _discard(self, job: Job, *, said: bool) -> None:
        """Free its extent again; that of a block that can be read goes when nobody reads it."""
        if job.staged or job.visible:
            return
        self.catalog.busy[job.block] = False
        if said:
            self._removing.append(job.block)
        else:
            self.catalog.give_back(job.block)
