"""Puts in flight: payload first, then the header that makes it findable, then the catalog.

Decides the order of a block's writes and when its key becomes visible. Copies pages into its own
buffers, so that the caller's memory is free at once; moves no bytes to the device itself.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.catalog import Catalog
from prefetchd.device import OP, WRITE, Ops
from prefetchd.format import Header, encode_header, page_checksum

WRITE_TAG = np.uint64(1 << 63)
"""Set in the tag of every write; the low bits are the buffer's number."""


@dataclass(frozen=True, slots=True)
class Written:
    """The end of one block's put: its place in the caller's batch, and its block or -1.

    `late`: the end of one that was given up before, and was told so.
    """

    put: int
    position: int
    block: int
    result: int
    late: bool = False


@dataclass(slots=True)
class _Job:
    put: int
    position: int
    block: int
    header: Header
    deadline_ns: int
    header_written: bool = False
    given_up: bool = False


class Writer:
    """`buffers` rows of the device's arena, one extent each, beginning at byte `start`.

    A write that does not end in time is given up, yet its buffer and its block stay the device's
    until it does end. `in_flight`: blocks that are waited for; `given_up`: the others.
    """

    def __init__(self, catalog: Catalog, buffers: NDArray[np.uint8], start: int) -> None:
        self.catalog = catalog
        self._buffers = buffers
        self._start = start
        self._jobs: list[_Job | None] = [None] * len(buffers)
        self.in_flight = 0
        self.given_up = 0

    @property
    def busy(self) -> bool:
        """Whether the device has any write."""
        return self.in_flight + self.given_up > 0

    @property
    def lost(self) -> bool:
        """Whether no buffer can be had before the device ends what was given up."""
        return self.given_up == len(self._jobs)

    @property
    def full(self) -> bool:
        return None not in self._jobs

    def stage(
        self, put: int, position: int, key: bytes, pages: NDArray[np.uint8], deadline_ns: int
    ) -> Ops:
        """Copy one block, `pages` (layers, page_bytes), into a free buffer; its payload's write.

        The caller checks `full`. Raises StoreFullError; the key is then simply not there.
        """
        number = self._jobs.index(None)
        shape, catalog = self.catalog.superblock, self.catalog
        block = catalog.reserve()
        seed = catalog.binding.seed(key)
        checksums = np.array(
            [page_checksum(page, seed, layer) for layer, page in enumerate(pages)], np.uint64
        )
        catalog.sequence += 1
        header = Header(key, catalog.binding.namespace, catalog.sequence, checksums)
        buffer = self._buffers[number]
        payload = buffer[shape.header_bytes :].reshape(shape.layers, shape.slot_bytes)
        payload[:, : shape.page_bytes] = pages
        payload[:, shape.page_bytes :] = 0
        buffer[: shape.header_bytes] = encode_header(header, shape)
        self._jobs[number] = _Job(put, position, block, header, deadline_ns)
        self.in_flight += 1
        return self._operation(number, block, shape.header_bytes, shape.extent_bytes)

    def _operation(self, number: int, block: int, begin: int, end: int) -> Ops:
        shape = self.catalog.superblock
        op = np.zeros(1, OP)
        op["tag"] = WRITE_TAG | np.uint64(number)
        op["offset"] = shape.extent_offset(block) + begin
        op["memory"] = self._start + number * shape.extent_bytes + begin
        op["length"] = end - begin
        op["kind"] = WRITE
        return op

    def completed(self, tag: int, result: int) -> Ops | Written:
        """One write has ended: the next operation of its block, or the end of its put."""
        number = tag & ~int(WRITE_TAG)
        job = self._jobs[number]
        assert job is not None, f"write buffer {number} completed twice"
        shape = self.catalog.superblock
        payload_bytes = shape.extent_bytes - shape.header_bytes
        expected = shape.header_bytes if job.header_written else payload_bytes
        if result == expected and not job.header_written:
            job.header_written = True
            return self._operation(number, job.block, 0, shape.header_bytes)
        self._jobs[number] = None
        if job.given_up:
            self.given_up -= 1
        else:
            self.in_flight -= 1
        if result != expected:
            self.catalog.give_back(job.block)
            return Written(job.put, job.position, -1, result, job.given_up)
        known = self.catalog.find(job.header.key)
        if known >= 0:  # put twice at once: the first to end is the one that is found
            self.catalog.give_back(job.block)
            return Written(job.put, job.position, known, result, job.given_up)
        self.catalog.publish(job.block, job.header)  # even if late: from here on it can be had
        return Written(job.put, job.position, job.block, result, job.given_up)

    def expire(self, now_ns: int) -> list[Written]:
        """Give up the blocks whose writes have not ended by their deadline."""
        over = [
            job
            for job in self._jobs
            if job is not None and not job.given_up and job.deadline_ns <= now_ns
        ]
        for job in over:
            job.given_up = True
        self.in_flight -= len(over)
        self.given_up += len(over)
        return [Written(job.put, job.position, -1, -errno.ETIMEDOUT) for job in over]
