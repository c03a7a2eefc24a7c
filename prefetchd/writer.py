"""Puts in flight: payloads on their way to their extents, and who waits for them.

Decides when a key becomes visible and what its puts are told. Pages go through its own buffers, so
that the caller's memory is free at once; how they are copied is `filling`'s, flushing and the
records that make a block last are the commit's. Moves no bytes to the device itself.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import Catalog
from prefetchd.commit import Commit
from prefetchd.device import OP, WRITE, Ops
from prefetchd.pipeline import COMMIT_BIT, WRITE_TAG, Job, Waiter


class News(IntEnum):
    """What there is to say of a block. All but the first are about no put, but about the block."""

    ENDED = 0  # for the put that waited for it
    LATE = 1  # failed, and nobody waits for it any more, since its put was told that it failed
    CLEAN = 2  # the device has its bytes, so staging need not keep them
    LOST = 3  # it could be read, and cannot any more: it will not be stored
    LEAVING = 4  # the device is done with a block that could be read and will not be stored


@dataclass(frozen=True, slots=True)
class Written:
    """The end of one block's put: its place in the caller's batch, and its block or -1; or other
    news of a block."""

    put: int
    position: int
    block: int
    result: int
    news: News = News.ENDED


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

    @property
    def at_risk(self) -> int:
        """Blocks that are found and would not survive a crash."""
        behind = sum(job is not None and job.behind for job in self._writing)
        return behind + self.commit.at_risk

    def under_way(self, key: bytes) -> bool:
        """Whether a block with this key is on its way to the medium."""
        job = self._job_of.get(key)
        if job is None or job.given_up:
            return False
        # One that was found and is not any more has expired: nobody can wait for that.
        return not job.visible or self.catalog.find(key) == job.block

    def join(self, key: bytes, waiter: Waiter) -> bool:
        """Wait for a block that is already on its way; False if there is nothing to wait for."""
        job = self._job_of[key]
        if job.visible and not waiter.durable:
            return False
        self.in_flight += not job.awaited
        job.waiters.append(waiter)
        return True

    def reserve(
        self, waiter: Waiter, key: bytes, seed: int, extent: int | None = None, moved_from: int = -1
    ) -> Job:
        """A buffer and an extent, or that of an open block, or one for a copy of the block
        `moved_from`: to be filled and then handed to `filled`. The caller checks `full` and
        `under_way`. Raises StoreFullError; the key is then simply not there."""
        number = self._writing.index(None)
        block = self.catalog.reserve() if extent is None else extent
        opened = extent is not None and moved_from < 0
        job = Job(block, key, [waiter], waiter.deadline_ns, number, seed, opened, moved_from)
        self._writing[number] = self._jobs[block] = self._job_of[key] = job
        self.admitted += 1
        self.in_flight += 1
        self.commit.coming += 1
        return job

    def fill(self, job: Job, pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Copy a block, `pages` (layers, page_bytes), into its buffer; its checksums. Needs no
        lock: until it is over the buffer is the caller's alone."""
        payload = self._payload(job)
        return self.catalog.prepare(payload, pages, job.block, job.key, job.seed)

    def _payload(self, job: Job) -> NDArray[np.uint8]:
        shape = self.catalog.superblock
        payload = self._buffers[job.buffer][shape.header_bytes :]
        rows: NDArray[np.uint8] = payload.reshape(shape.layers, shape.slot_bytes)
        return rows

    def payload(self, block: int) -> NDArray[np.uint8] | None:
        """A block that is not written yet, as the medium will have it: (layers, slot_bytes)."""
        job = self._jobs.get(block)
        return None if job is None else self._payload(job)

    def filled(
        self, job: Job, checksums: NDArray[np.uint64] | None, expires_ns: int
    ) -> list[Written]:
        """A reserved block's buffer is to be written; checksums None: it could not be filled, and
        an open block stays open."""
        if checksums is None or job.given_up:
            self._let_go(job)
            if not job.opened:
                self.catalog.give_back(job.block)
            return self._settled(job, -errno.ETIMEDOUT if job.given_up else -errno.ECANCELED)
        self.catalog.record(job.block, job.key, job.seed, checksums, expires_ns)
        if job.opened:
            self.catalog.seal(job.block)
            job.staged = True
        self._outgoing.append(self._operation(job.buffer, job.block))
        return []

    def show(self, job: Job, now_ns: int) -> list[Waiter]:
        """A block just filled can be had from staging: it is found from here on, and those who put
        it fast, returned, wait for it no more."""
        fast = [waiter for waiter in job.waiters if not waiter.durable]
        self.catalog.publish(job.block)
        job.visible = job.staged = True
        job.since_ns = now_ns
        job.waiters = [waiter for waiter in job.waiters if waiter.durable]
        return fast

    def _let_go(self, job: Job) -> None:
        """Its buffer is free."""
        self._writing[job.buffer] = None
        self.commit.coming -= not job.given_up

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
        wrong = 0
        if result != shape.extent_bytes - shape.header_bytes:
            wrong = result or -errno.EIO
        elif job.given_up and (job.staged or self._job_of.get(job.key) is not job):
            wrong = -errno.ETIMEDOUT  # late: its key was put again, or it is lost already
        if wrong:
            if not job.staged:
                self.catalog.give_back(job.block)
            return self._settled(job, wrong)
        self.commit.add(job, now_ns)
        return self._payload_written(job, result)

    def _payload_written(self, job: Job, result: int) -> list[Written]:
        awaited = job.awaited
        job.written = True
        news = [Written(0, 0, job.block, result, News.CLEAN)] if job.staged else []
        fast = [waiter for waiter in job.waiters if not waiter.durable]
        block = job.block
        if fast:
            found = self.catalog.find(job.key)
            if found >= 0:  # an earlier write of its key that was late
                block = found
            else:
                self.catalog.publish(block)
                job.visible = True
            job.waiters = [waiter for waiter in job.waiters if waiter.durable]
        self.in_flight -= awaited and not job.waiters
        return [*news, *_told(fast, block, result)]

    def _settled(self, job: Job, wrong: int) -> list[Written]:
        """A job has ended: on the medium if not `wrong`."""
        del self._jobs[job.block]
        if self._job_of.get(job.key) is job:
            del self._job_of[job.key]
        self.given_up -= job.given_up
        self.in_flight -= job.awaited
        news: list[Written] = []
        block = -1 if wrong else job.block
        if not wrong and not job.visible:
            block = job.rival(self.catalog.find(job.key))
            if block < 0:
                block = job.block
                self.catalog.publish(block)  # even if late: from here on it can be had
            elif job.staged:  # its key was put twice, since the first copy was late
                news = self._lost(job, -errno.ETIMEDOUT)
            else:
                self.commit.remove(np.array([job.block]))
        elif wrong and (job.staged or job.visible):
            news = self._lost(job, wrong)
        if job.waiters:
            return [*news, *_told(job.waiters, block, wrong)]
        return [*news, Written(0, 0, block, wrong, News.LATE)] if wrong else news

    def _lost(self, job: Job, wrong: int) -> list[Written]:
        """A block that can be read will not be stored; its extent is the device's no more."""
        self.catalog.hide(np.array([job.block]))
        self.catalog.busy[job.block] = False
        lost = [] if job.given_up else [Written(0, 0, job.block, wrong, News.LOST)]
        return [*lost, Written(0, 0, job.block, wrong, News.LEAVING)]

    def expire(self, now_ns: int) -> list[Written]:
        """Give up the blocks whose writes have not ended by their deadline."""
        told: list[Written] = []
        for job in self._jobs.values():
            if job.staged and not job.written and not job.given_up and job.deadline_ns <= now_ns:
                told += self._lose(job)
                continue
            over = [waiter for waiter in job.waiters if waiter.deadline_ns <= now_ns]
            if not over:
                continue
            told += _told(over, -1, -errno.ETIMEDOUT)
            job.waiters = [waiter for waiter in job.waiters if waiter.deadline_ns > now_ns]
            if not job.waiters:
                self.in_flight -= 1
                self.overdue.append(job.block)
                if not job.visible:
                    self._give_up(job)
        return told

    def _lose(self, job: Job) -> list[Written]:
        """A staged block is lost at once, though the device still owns its buffer and extent."""
        self.catalog.hide(np.array([job.block]))
        told = _told(job.waiters, -1, -errno.ETIMEDOUT)
        self.in_flight -= job.awaited
        self.overdue.append(job.block)
        self._give_up(job)
        job.visible, job.waiters = False, []
        return [Written(0, 0, job.block, -errno.ETIMEDOUT, News.LOST), *told]

    def _give_up(self, job: Job) -> None:
        """No flush waits for it any more, either."""
        job.given_up = True
        self.given_up += 1
        self.commit.coming -= self._writing[job.buffer] is job


def _told(waiters: Iterable[Waiter], block: int, result: int) -> list[Written]:
    return [Written(waiter.put, waiter.position, block, result) for waiter in waiters]
