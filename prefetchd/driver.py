"""Between the core and a storage device: commands become operations, completions become events.

Decides how pages merge into operations and in which order waiting operations reach the device
(demand, prefetch, write). Makes no policy: what to read into which slot is the core's business.
Calls are made by one thread at a time, except `verify`, which needs no lock.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from dataclasses import dataclass

import numpy as np

from prefetchd.catalog import Catalog
from prefetchd.device import DONE, OP, Arena, Completions, Ops, StorageDevice
from prefetchd.hostinfo import errno_name
from prefetchd.model import Cancel, Completed, Fill, Ids, IoClass, Mask, Read, Slots
from prefetchd.pipeline import WRITE_TAG
from prefetchd.writer import Writer, Written

log = logging.getLogger("prefetchd")

_SLOT_BITS = np.uint64(24)
SLOTS_MAX = 1 << 24
_SLOT_MASK = np.uint64(SLOTS_MAX - 1)
_GENERATION_MASK = np.uint64((1 << 39) - 1)


@dataclass(frozen=True, slots=True)
class RawReads:
    """Reads that have ended, not verified yet: one row a page."""

    slots: Slots
    pages: Ids
    generations: Ids
    whole: Mask  # the device moved all bytes it was asked for


@dataclass(slots=True)
class DepthMeter:
    """Time-weighted number of operations in flight, over the time when there were any."""

    area_ns: int = 0
    busy_ns: int = 0
    _in_flight: int = 0
    _since_ns: int = 0

    def note(self, in_flight: int, now_ns: int) -> None:
        if self._in_flight:
            elapsed_ns = now_ns - self._since_ns
            self.area_ns += self._in_flight * elapsed_ns
            self.busy_ns += elapsed_ns
        self._in_flight, self._since_ns = in_flight, now_ns

    @property
    def mean(self) -> float:
        return self.area_ns / self.busy_ns if self.busy_ns else 0.0


class Driver:
    """`staging` is the arena's front, shape (slots, slot_bytes)."""

    def __init__(
        self, device: StorageDevice, catalog: Catalog, staging: Arena, writer: Writer
    ) -> None:
        self.device = device
        self.catalog = catalog
        self.staging = staging
        self.writer = writer
        self.depth = DepthMeter()
        self.bytes_read = 0
        self.failures: Counter[str] = Counter()
        self._waiting: list[list[Ops]] = [[] for _ in IoClass]
        self._cancelled: Completions = np.empty(0, DONE)  # before the device had them
        slots = len(staging)
        self._ops = np.zeros(slots, OP)  # the read of one page into each slot, but for its offset
        self._ops["tag"] = np.arange(slots)
        self._ops["memory"] = np.arange(slots) * staging.shape[1]
        self._ops["length"] = staging.shape[1]
        # Pages of the operation that begins at a slot: one, but for those joined.
        self._run = np.ones(slots, np.int64)
        self._page = np.zeros(slots, np.int64)
        self._generation = np.zeros(slots, np.int64)

    def read(self, command: Read) -> None:
        """Queue a read; `start` hands it to the device."""
        pages, slots = command.pages, command.slots
        self._page[slots] = pages
        self._generation[slots] = command.generations
        self.bytes_read += len(pages) * self.staging.shape[1]
        follows = pages[1:] - pages[:-1] == 1
        if follows.any():
            pages, slots = self._joined(pages, slots, follows)
        ops = self._ops[slots]
        if len(pages) < len(command.pages):
            ops["length"] *= self._run[slots]
        generations = self._generation[slots].view(np.uint64) & _GENERATION_MASK
        ops["tag"] |= generations << _SLOT_BITS
        ops["file"], ops["offset"] = self.catalog.locate(pages)
        self._waiting[command.io_class].append(ops)

    def _joined(self, pages: Ids, slots: Slots, follows: Mask) -> tuple[Ids, Slots]:
        """Neighbours on the medium that are neighbours in memory too make one operation: the first
        page and slot of each, the number of its pages in `_run`."""
        follows = follows & (slots[1:] - slots[:-1] == 1)
        follows &= pages[1:] % self.catalog.superblock.layers != 0
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        self._run[slots[first]] = np.diff(first, append=len(pages))
        return pages[first], slots[first]

    def fill(self, command: Fill) -> None:
        """Give slots the bytes of their block: those that the writer has of it, or else zeros."""
        block = int(command.pages[0]) // self.catalog.superblock.layers
        payload = self.writer.payload(block)
        self.staging[command.slots] = 0 if payload is None else payload

    def write(self, now_ns: int) -> None:
        """Queue what the writer has to do now; `start` hands it to the device."""
        self._waiting[IoClass.WRITE_BACK] += self.writer.take(now_ns)

    def cancel(self, command: Cancel) -> None:
        """End reads early: at once if they are still queued here, else as far as the device can;
        those that began inside a longer run go with it."""
        generations = self._generation[command.slots].view(np.uint64) & _GENERATION_MASK
        tags = (generations << _SLOT_BITS) | command.slots.astype(np.uint64)
        for queue in self._waiting[: IoClass.WRITE_BACK]:
            for place, ops in enumerate(queue):
                unwanted = np.isin(ops["tag"], tags)
                queue[place] = ops[~unwanted]
                ended = np.zeros(np.count_nonzero(unwanted), DONE)
                ended["tag"] = ops["tag"][unwanted]
                ended["result"] = -errno.ECANCELED
                self._cancelled = np.concatenate([self._cancelled, ended])
        self.device.cancel(tags)

    def start(self, now_ns: int) -> None:
        """Hand over what is queued, most urgent first, as far as the device has room."""
        for queue in self._waiting:
            while queue:
                taken = self.device.submit(queue[0])
                if taken < len(queue[0]):
                    queue[0] = queue[0][taken:]
                    self.depth.note(self.device.in_flight, now_ns)
                    return
                queue.pop(0)
        self.depth.note(self.device.in_flight, now_ns)

    def reap(self, now_ns: int) -> tuple[RawReads | None, list[Written]]:
        """Take what has ended. Reads still need `verify`; writes are carried on here."""
        completions = self.device.reap()
        if len(self._cancelled):
            completions = np.concatenate([completions, self._cancelled])
            self._cancelled = self._cancelled[:0]
        if len(completions) == 0:
            return None, []
        self.depth.note(self.device.in_flight, now_ns)
        reads, written = completions, list[Written]()
        if not self.writer.idle:
            writing = (completions["tag"] & WRITE_TAG) != 0
            reads, written = completions[~writing], self._carry_on(completions[writing], now_ns)
        return (self._raw_reads(reads) if len(reads) else None), written

    def _raw_reads(self, completions: Completions) -> RawReads:
        first = (completions["tag"] & _SLOT_MASK).astype(np.int64)
        # An operation seen twice must not end the next one of its slot.
        begun = self._generation[first].view(np.uint64) & _GENERATION_MASK
        current = begun == completions["tag"] >> _SLOT_BITS
        if not current.all():
            self._failed("completion seen twice", len(current) - int(np.count_nonzero(current)))
            completions, first = completions[current], first[current]
        runs = self._run[first]
        self._run[first] = 1
        lengths = runs * self.staging.shape[1]
        results = completions["result"]
        whole = results == lengths
        if not whole.all():
            for result in results[~whole].tolist():
                self._failed("short read" if result >= 0 else errno_name(result))
        slots, each = first, whole
        if len(first) != runs.sum():
            each = np.repeat(whole, runs)
            within = np.arange(len(each)) - np.repeat(np.cumsum(runs) - runs, runs)
            slots = np.repeat(first, runs) + within
        return RawReads(slots, self._page[slots], self._generation[slots], each)

    def verify(self, reads: RawReads) -> Completed:
        """Check every page that came whole; only a verified page may be read by anyone."""
        whole = reads.whole
        if whole.all():
            good = verified = self.catalog.verify(reads.pages, self.staging, reads.slots)
        else:
            verified = whole.copy()
            good = self.catalog.verify(reads.pages[whole], self.staging, reads.slots[whole])
            verified[whole] = good
        corrupt = len(good) - int(np.count_nonzero(good))
        if corrupt:
            self._failed("checksum mismatch", corrupt)
        return Completed(reads.slots, reads.generations, verified)

    def _failed(self, kind: str, count: int = 1) -> None:
        """Count a failure; say the first of each kind, not the millionth."""
        first = kind not in self.failures
        self.failures[kind] += count
        if first:
            where = self.device.files[0].path
            log.warning("%s: %s; what it was for is a miss, the rest goes on", where, kind)

    def _carry_on(self, completions: Completions, now_ns: int) -> list[Written]:
        ended: list[Written] = []
        for tag, result in zip(
            completions["tag"].tolist(), completions["result"].tolist(), strict=True
        ):
            ended += self.writer.completed(tag, result, now_ns)
        commit = self.writer.commit
        failed = [("write", end.result) for end in ended if end.block < 0]
        for what, result in failed + commit.troubles:
            reason = errno_name(result) if result < 0 else "short write"
            self._failed(f"{what}: {reason}")
        commit.troubles.clear()
        self.write(now_ns)
        return ended

    @property
    def queued(self) -> bool:
        """Whether operations wait for the device to have room, or cancelled ones to be reaped."""
        return any(self._waiting) or len(self._cancelled) > 0
