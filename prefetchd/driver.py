"""Between the core and a storage device: commands become operations, completions become events.

Decides how pages merge into operations and in which order waiting operations reach the device
(demand, prefetch, write). Makes no policy: what to read into which slot is the core's business.
Calls are made by one thread at a time, except `verify`, which needs no lock.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.blame import REFUSED, Blame
from prefetchd.catalog import Catalog
from prefetchd.depth import DepthMeter
from prefetchd.device import DONE, OP, Arena, Completions, Ops, StorageDevice
from prefetchd.gate import Gate
from prefetchd.hostinfo import why_not
from prefetchd.masks import every
from prefetchd.model import Cancel, Completed, Fill, Ids, IoClass, Mask, Read, Slots
from prefetchd.paths import Paths
from prefetchd.pipeline import WRITE_TAG, Trouble, is_probe, path_of_probe
from prefetchd.places import locate
from prefetchd.rot import Rot
from prefetchd.writer import Writer, Written

_SLOT_BITS = np.uint64(24)
SLOTS_MAX = 1 << 24
_SLOT_MASK = np.uint64(SLOTS_MAX - 1)
_BEFORE_WRITES_MAX = 64
_GENERATION_MASK = np.uint64((1 << 39) - 1)


@dataclass(frozen=True, slots=True)
class RawReads:
    """Reads that have ended, not verified yet: one row a page."""

    slots: Slots
    pages: Ids
    generations: Ids
    whole: Mask  # the device moved all bytes it was asked for


class Driver:
    """`staging` is the arena's front, shape (slots, slot_bytes)."""

    def __init__(
        self,
        device: StorageDevice,
        catalog: Catalog,
        staging: Arena,
        writer: Writer,
        paths: Paths,
    ) -> None:
        self.device = device
        self.catalog = catalog
        self.staging = staging
        self.writer = writer
        self.paths = paths
        self.rot = Rot(catalog)
        self.blame = Blame(catalog, paths)
        self._now_ns = 0
        self._probing = 0
        self._before_writes = 0  # operations that began while one waited
        self.wrote = False
        """Whether the last `reap` found ends of writes: of a payload, a record or a flush."""
        self._writing: dict[int, tuple[int, int]] = {}  # tag: file, bytes expected
        self.depth = DepthMeter()
        self.gate = Gate()
        self.bytes_read = 0
        self.waiting: list[list[Ops]] = [[] for _ in IoClass]
        self.ended: list[tuple[int, int]] = []  # tag, result: the device never had them
        slots = len(staging)
        # Pages of the operation that begins at a slot: one, but for those joined.
        self._run = np.ones(slots, np.int32)
        self._page = np.zeros(slots, np.int64)
        self._generation = np.zeros(slots, np.int64)

    def read(self, command: Read) -> None:
        """Queue a read; `start` hands it to the device."""
        pages, slots = command.pages, command.slots
        self._page[slots] = pages
        self._generation[slots] = command.generations
        size = len(pages) * self.staging.shape[1]
        self.bytes_read += size
        follows = pages[1:] - pages[:-1] == 1
        if np.count_nonzero(follows):
            pages, slots = self._joined(pages, slots, follows)
        ops = np.zeros(len(slots), OP)
        ops["memory"] = slots * self.staging.shape[1]
        ops["length"] = self.staging.shape[1]
        if len(pages) < len(command.pages):
            ops["length"] *= self._run[slots]
        ops["tag"] = self._tags(slots)
        ops["file"], ops["offset"] = locate(self.catalog.superblock, pages)
        if self.paths.down:
            ops = self._refuse(ops, self.paths.unreadable)
            size = int(ops["length"].sum())
        self.paths.count_reads(ops, size)
        self.waiting[command.io_class].append(ops)

    def _tags(self, slots: Slots) -> NDArray[np.uint64]:
        generations = self._generation[slots].view(np.uint64) & _GENERATION_MASK
        return (generations << _SLOT_BITS) | slots.view(np.uint64)

    def _refuse(self, ops: Ops, shut: Mask) -> Ops:
        """End at once what is for a path that is shut; return the rest."""
        refused = shut[ops["file"]]
        if not refused.any():
            return ops
        np.add.at(self.paths.refused, ops["file"][refused], 1)
        self.ended += [(tag, REFUSED) for tag in ops["tag"][refused].tolist()]
        rest: Ops = ops[~refused]
        return rest

    def _joined(self, pages: Ids, slots: Slots, follows: Mask) -> tuple[Ids, Slots]:
        """Neighbours on the medium that are neighbours in memory too make one operation: the first
        page and slot of each, the number of its pages in `_run`."""
        follows = follows & (slots[1:] - slots[:-1] == 1)
        follows &= pages[1:] % self.catalog.superblock.layers != 0
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        self._run[slots[first]] = np.diff(first, append=len(pages))
        return pages[first], slots[first]

    def uses(self, file: int, reading: Slots) -> bool:
        """Whether operations on this path have not ended. `reading`: the device's slots."""
        writing = any(one == file for one, _ in self._writing.values())
        into = bool((self.blame.files_of(self._page[reading]) == file).any())
        return writing or into or self.paths.probing(file)

    def fill(self, command: Fill) -> None:
        """Give slots the bytes of their block: those that the writer has of it, or else zeros."""
        block = int(command.pages[0]) // self.catalog.superblock.layers
        payload = self.writer.payload(block)
        self.staging[command.slots] = 0 if payload is None else payload
        if payload is not None and self.catalog.cipher is not None:
            self.catalog.verify(command.pages, self.staging, command.slots)

    def write(self, now_ns: int) -> None:
        """Queue what the writer has to do now; `start` hands it to the device."""
        for ops in self.writer.take(now_ns):
            for tag, file, length in ops[["tag", "file", "length"]].tolist():
                self._writing[tag] = file, length
            passed = self._refuse(ops, self.paths.unwritable) if self.paths.down else ops
            self.waiting[IoClass.WRITE_BACK].append(passed)

    def cancel(self, command: Cancel) -> None:
        """Reads took too long. End them early: at once if they are still queued here, else as far
        as the device can; those that began inside a longer run go with it."""
        files = self.blame.files_of(self._page[command.slots])
        late = np.bincount(files, minlength=len(self.paths.names))
        tags = self._tags(command.slots)
        for queue in self.waiting[: IoClass.WRITE_BACK]:
            for place, ops in enumerate(queue):
                unwanted = np.isin(ops["tag"], tags)
                never = ops[unwanted]  # begun: no path is to blame for them
                np.subtract.at(late, never["file"], never["length"] // self.staging.shape[1])
                queue[place] = ops[~unwanted]
                self.ended += [(tag, -errno.ECANCELED) for tag in never["tag"].tolist()]
        for file, count in enumerate(np.maximum(late, 0).tolist()):
            self.paths.failed(file, count, self._now_ns, reading=True)
        self.device.cancel(tags)

    def start(self, now_ns: int) -> None:
        """Hand over what is queued, most urgent first, as far as the device has room."""
        self._now_ns = now_ns
        if self.paths.uneasy and (probes := self.paths.probes(now_ns)) is not None:
            self.waiting[IoClass.WRITE_BACK].append(probes)
            self._probing += len(probes)
        writes = self.waiting[IoClass.WRITE_BACK]
        due = writes and self._before_writes >= _BEFORE_WRITES_MAX
        if due and self._begin([writes[0][:1]], IoClass.WRITE_BACK, now_ns):
            rest = writes[0][1:]
            writes[:1] = [rest] if len(rest) else []
        for io_class, queue in enumerate(self.waiting):
            if not self._begin(queue, io_class, now_ns):
                break
        else:
            self.gate.rest()
        self.depth.note(self.device.in_flight, now_ns)

    def _begin(self, queue: list[Ops], io_class: int, now_ns: int) -> bool:
        """Whether all of it could begin. Writes that wait while more urgent operations begin are
        let past them now and then: those may never end."""
        while queue:
            taken = self.gate.submit(self.device, queue[0], io_class, now_ns)
            if io_class == IoClass.WRITE_BACK:
                self._before_writes *= not taken
            elif self.waiting[IoClass.WRITE_BACK]:
                self._before_writes += taken
            if taken < len(queue[0]):
                queue[0] = queue[0][taken:]
                return False
            queue.pop(0)
        return True

    def reap(self, now_ns: int) -> tuple[RawReads | None, list[Written]]:
        """Take what has ended. Reads still need `verify`; writes are carried on here."""
        completions = self.device.reap()
        self.gate.ended(completions, now_ns)
        self.wrote = False
        if self.ended:
            completions = np.concatenate([completions, np.array(self.ended, DONE)])
            self.ended.clear()  # who looks at it has this very list
        self._now_ns = now_ns
        if self._probing:
            completions = self._without_probes(completions)
        if len(completions) == 0:
            return None, []
        self.depth.note(self.device.in_flight, now_ns)
        reads, written = completions, list[Written]()
        if not self.writer.idle:
            writing = (completions["tag"] & WRITE_TAG) != 0
            self.wrote = bool(writing.any())
            reads, written = completions[~writing], self._carry_on(completions[writing], now_ns)
        return (self._raw_reads(reads) if len(reads) else None), written

    def _without_probes(self, completions: Completions) -> Completions:
        tags = completions["tag"].tolist()
        mine = np.array([is_probe(tag) for tag in tags], np.bool_)
        for tag, result in completions[mine].tolist():
            self._probing -= 1
            self.paths.probed(path_of_probe(tag), result, self._now_ns)
        rest: Completions = completions[~mine]
        return rest

    def _raw_reads(self, completions: Completions) -> RawReads:
        first = (completions["tag"] & _SLOT_MASK).astype(np.int64)
        # An operation seen twice must not end the next one of its slot.
        begun = self._generation[first].view(np.uint64) & _GENERATION_MASK
        current = begun == completions["tag"] >> _SLOT_BITS
        if (twice := len(current) - int(np.count_nonzero(current))) > 0:
            self.blame.failed("completion seen twice", count=twice)
            completions, first = completions[current], first[current]
        runs = self._run[first].astype(np.int64)
        self._run[first] = 1
        lengths = runs * self.staging.shape[1]
        results = completions["result"]
        whole = results == lengths
        if not every(whole) or self.paths.uneasy:
            self.blame.judge_reads(self._page[first], results, whole, self._now_ns)
        slots, each = first, whole
        if len(first) != runs.sum():
            each = np.repeat(whole, runs)
            within = np.arange(len(each)) - np.repeat(np.cumsum(runs) - runs, runs)
            slots = np.repeat(first, runs) + within
        return RawReads(slots, self._page[slots], self._generation[slots], each)

    def verify(self, reads: RawReads) -> Completed:
        """Check every page that came whole; only a verified page may be read by anyone."""
        whole = reads.whole
        if every(whole):
            good = verified = self.catalog.verify(reads.pages, self.staging, reads.slots)
        else:
            verified = whole.copy()
            good = self.catalog.verify(reads.pages[whole], self.staging, reads.slots[whole])
            verified[whole] = good
        if not every(good):
            corrupt = reads.pages[whole][~good]
            self.rot.met(corrupt)
            for file in self.blame.files_of(corrupt).tolist():
                self.blame.failed("checksum mismatch", file)
        if self.rot.suspected:
            self.rot.passed(reads.pages[verified])
        return Completed(reads.slots, reads.generations, verified)

    def _carry_on(self, completions: Completions, now_ns: int) -> list[Written]:
        ended: list[Written] = []
        commit = self.writer.commit
        for tag, result in completions.tolist():
            file, length = self._writing.pop(tag, (0, result))
            self.blame.judge_write(file, length, result, now_ns)
            told = self.writer.completed(tag, result, now_ns)
            troubles, commit.troubles = commit.troubles, []
            blamed = troubles[0].file if troubles else file
            troubles += [Trouble("write", end.result, blamed) for end in told if end.block < 0]
            for trouble in troubles:
                reason = why_not(trouble.result)
                self.blame.failed(f"{trouble.what}: {reason}", trouble.file)
            ended += told
        self.write(now_ns)
        return ended

    def expire(self, now_ns: int) -> list[Written]:
        """Give up what the device does not write in time."""
        told = self.writer.expire(now_ns)
        overdue, self.writer.overdue = self.writer.overdue, []
        for file in self.catalog.superblock.files(np.array(overdue, np.int64)).tolist():
            self.paths.failed(file, 1, now_ns, reading=False)
        return told

    @property
    def queued(self) -> bool:
        """Whether operations wait for the device to have room, or such as it never had for their
        end to be taken note of."""
        return any(self.waiting) or bool(self.ended)
