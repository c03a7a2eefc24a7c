"""Puts in flight: payloads on their way to their extents, and who waits for them.

Decides when a key becomes visible and what its puts are told. Pages go through its own buffers, so
that the caller's memory is free at once; how they are copied is `filling`'s, flushing and the
records that make a block last are the commit's. Moves no bytes to the device itself.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import Catalog
from prefetchd.commit import Commit
from prefetchd.device import OP, WRITE, Ops
from prefetchd.filling import fill
from prefetchd.pipeline import COMMIT_BIT, WRITE_TAG, Job, Waiter


@dataclass(frozen=True, slots=True)
class Written:
    """The end of one block's put: its place in the caller's batch, and its block or -1.

    `late`: nobody waits for it any more, since its put was told that it failed.
    """

    put: int
    position: int
    block: int
    result: int
    late: bool = False


class Writer:
    """`buffers` rows of the device's arena, one extent each, beginning at byte `start`.

    A write that does not end in time is given up, yet its buffer and its block stay the device's
    until it does end. `in_flight`: blocks that are waited for; `given_up`: those that no longer
    are.
    """

    def __init__(
        self, catalog: Catalog, buffers: NDArray[np.uint8], start: int, commit: Commit
    ) -> None:
        self.catalog = catalog
        self.commit = commit
        self._buffers = buffers
        self._start = start
        self._writing: list[Job | None] = [None] * len(buffers)
        self._jobs: dict[int, Job] = {}  # by block
        self._job_of: dict[bytes, Job] = {}  # by key; of two, the one that is not given up
        self._outgoing: list[Ops] = []
        self.admitted = 0
        self.in_flight = 0
        self.given_up = 0
        self.overdue: list[int] = []
        """Blocks given up since somebody last looked."""

    @property
    def idle(self) -> bool:
        """Whether all that was put is on the medium, or has failed."""
        return not self._jobs and self.commit.idle

    @property
    def lost(self) -> bool:
        """Whether no buffer can be had before the device ends what was given up."""
        return all(job is not None and job.given_up for job in self._writing)

    @property
    def full(self) -> bool:
        return None not in self._writing

    def under_way(self, key: bytes) -> bool:
        """Whether a block with this key is on its way to the medium."""
        job = self._job_of.get(key)
        return job is not None and not job.given_up

    def join(self, key: bytes, waiter: Waiter) -> bool:
        """Wait for a block that is already on its way; False if there is nothing to wait for."""
        job = self._job_of[key]
        if job.visible and not waiter.durable:
            return False
        self.in_flight += not job.waiters
        job.waiters.append(waiter)
        return True

    def reserve(self, waiter: Waiter, key: bytes, seed: int) -> Job:
        """A buffer and an extent for one block, to be filled and then handed to `filled`.

        The caller checks `full` and `under_way`. Raises StoreFullError; the key is then simply
        not there.
        """
        number = self._writing.index(None)
        block = self.catalog.reserve()
        job = Job(block, key, [waiter], number, seed)
        self._writing[number] = self._jobs[block] = self._job_of[key] = job
        self.admitted += 1
        self.in_flight += 1
        self.commit.coming += 1
        return job

    def fill(self, job: Job, pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Copy a block, `pages` (layers, page_bytes), into its buffer; its checksums. Needs no
        lock: until it is over the buffer is the caller's alone."""
        shape = self.catalog.superblock
        payload = self._buffers[job.buffer][shape.header_bytes :]
        return fill(payload.reshape(shape.layers, shape.slot_bytes), pages, job.seed)

    def filled(
        self, job: Job, checksums: NDArray[np.uint64] | None, expires_ns: int
    ) -> list[Written]:
        """A reserved block's buffer is to be written; checksums None: it could not be filled."""
        if checksums is None or job.given_up:
            self._let_go(job)
            self.catalog.give_back(job.block)
            return self._settled(job, -errno.ETIMEDOUT if job.given_up else -errno.ECANCELED)
        self.catalog.record(job.block, job.key, job.seed, checksums, expires_ns)
        self._outgoing.append(self._operation(job.buffer, job.block))
        return []

    def _let_go(self, job: Job) -> None:
        """Its buffer is free."""
        self._writing[job.buffer] = None
        self.commit.coming -= 1

    def _operation(self, number: int, block: int) -> Ops:
        shape = self.catalog.superblock
        op = np.zeros(1, OP)
        op["tag"] = WRITE_TAG | np.uint64(number)
        op["file"] = block % shape.stripes
        op["offset"] = shape.extent_offsets(np.array([block])) + shape.header_bytes
        op["memory"] = self._start + number * shape.extent_bytes + shape.header_bytes
        op["length"] = shape.extent_bytes - shape.header_bytes
        op["kind"] = WRITE
        self.commit.written.payload += int(op["length"][0])
        return op

    def take(self, now_ns: int) -> list[Ops]:
        """Operations for the device: payloads, and the next phase of a commit if it is due."""
        step = self.commit.step(now_ns)
        ops = self._outgoing if step is None else [*self._outgoing, step]
        self._outgoing = []
        return ops

    def completed(self, tag: int, result: int, now_ns: int) -> list[Written]:
        """One operation has ended; the puts that end with it."""
        tag &= ~int(WRITE_TAG)
        if tag & COMMIT_BIT:
            ended = self.commit.completed(tag, result, now_ns)
            return [end for job, wrong in ended for end in self._settled(job, wrong)]
        job = self._writing[tag]
        assert job is not None, f"write buffer {tag} completed twice"
        self._let_go(job)
        shape = self.catalog.superblock
        if result != shape.extent_bytes - shape.header_bytes:
            self.catalog.give_back(job.block)
            return self._settled(job, result or -errno.EIO)
        if self._job_of.get(job.key) is not job:  # late, and its key was put again
            self.catalog.give_back(job.block)
            return self._settled(job, -errno.ETIMEDOUT)
        self.commit.add(job, now_ns)
        fast = [waiter for waiter in job.waiters if not waiter.durable]
        if not fast:
            return []
        self.catalog.publish(job.block)
        job.visible = True
        job.waiters = [waiter for waiter in job.waiters if waiter.durable]
        self.in_flight -= not job.waiters
        return _told(fast, job.block, result)

    def _settled(self, job: Job, wrong: int) -> list[Written]:
        """A job has ended: on the medium if not `wrong`."""
        del self._jobs[job.block]
        if self._job_of.get(job.key) is job:
            del self._job_of[job.key]
        if not wrong and not job.visible:
            if self.catalog.find(job.key) >= 0:  # late, and its key was put again
                self.commit.remove(np.array([job.block]))
            else:
                self.catalog.publish(job.block)  # even if late: from here on it can be had
        if wrong and job.visible:
            self.catalog.discard(job.block)  # nobody may take it for a block that lasts
        self.given_up -= job.given_up
        self.in_flight -= bool(job.waiters)
        block = -1 if wrong else job.block
        if job.waiters:
            return _told(job.waiters, block, wrong)
        return [Written(0, 0, block, wrong, late=True)] if wrong else []

    def expire(self, now_ns: int) -> list[Written]:
        """Give up the blocks whose writes have not ended by their deadline."""
        told: list[Written] = []
        for job in self._jobs.values():
            over = [waiter for waiter in job.waiters if waiter.deadline_ns <= now_ns]
            if not over:
                continue
            told += _told(over, -1, -errno.ETIMEDOUT)
            job.waiters = [waiter for waiter in job.waiters if waiter.deadline_ns > now_ns]
            if not job.waiters:
                self.in_flight -= 1
                self.overdue.append(job.block)
                self.given_up += not job.visible
                job.given_up = not job.visible
        return told


def _told(waiters: Iterable[Waiter], block: int, result: int) -> list[Written]:
    return [Written(waiter.put, waiter.position, block, result) for waiter in waiters]
