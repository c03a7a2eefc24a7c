"""`prefetchd bench ring`: what a device gives on a file under a full queue of random reads.

Decides how it is driven (batches, offsets that no run shares with another) and what counts as a
read's latency. Knows neither fio nor how runs are compared.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.arena import aligned_arena
from prefetchd.device import OP, READ, File, Ops, StorageDevice
from prefetchd.devices.uring import Uring
from prefetchd.hostinfo import errno_name, medium_of
from prefetchd.registry import storage_device_class

_CREATE_CHUNK_BYTES = 1 << 24
_DRAWN = 1 << 16  # offsets, and waits, that are dealt with at a time
_STEPS = 64  # of a histogram's octave: a percentile is right to 1.1 %
_TRIALS, _TRIAL_S, _CLEARLY = 5, 0.05, 1.05


class BenchError(Exception):
    """A benchmark cannot be run as asked: why, and what to do."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of load: random reads of `block_bytes` at `depth`."""

    block_bytes: int
    depth: int

    @property
    def words(self) -> str:
        return f"{self.block_bytes / 1024:.10g}KiB@{self.depth}"


class Latency(msgspec.Struct, frozen=True):
    """Microseconds from before a read's submission until the caller had it, others of its batch
    waited for. One with fewer than 10 reads beyond it is None."""

    p50: float | None
    p99: float | None
    p999: float | None


LATENCY_SHARES = (0.5, 0.99, 0.999)


def stated(percentiles_us: Sequence[float], reads: int) -> Latency:
    """Those of `LATENCY_SHARES` that have enough reads beyond them."""
    pairs = zip(LATENCY_SHARES, percentiles_us, strict=True)
    # Counted in whole reads: 0.001 of 10,000 is not quite 10 in binary.
    return Latency(*(us if round(reads * (1 - share), 6) >= 10 else None for share, us in pairs))


@dataclass(frozen=True, slots=True)
class Rate:
    """What one run achieved."""

    operations_s: float
    cpu_us_per_operation: float
    latency_us: Latency
    operations: int


def check_shapes(shapes: Sequence[Shape]) -> None:
    """Raises ValueError for blocks that no drive reads directly."""
    for shape in shapes:
        if shape.block_bytes < 512 or shape.block_bytes % 512:
            raise ValueError(
                f"blocks of {shape.block_bytes} bytes cannot be read directly; use whole sectors "
                "of 512 bytes, better 4 KiB"
            )


def check_size(path: Path, size_bytes: int, shapes: Sequence[Shape]) -> None:
    """Raises BenchError for a file too small to be read at random."""
    needed = 64 * max(shape.block_bytes for shape in shapes)
    if size_bytes < needed:
        raise BenchError(f"{path} has {size_bytes} bytes, too few; use at least {needed}")


def create_file(path: Path, size_bytes: int, progress: Callable[[int], None]) -> None:
    """A file full of random bytes, written once. Raises BenchError, of a file system without room
    before anything is written."""
    # Under its name it is whole: what is allocated and not written reads as zeros, and no drive
    # is asked for them.
    making = path.with_name(f"{path.name}.making")
    made = path if os.path.lexists(path) else making  # what is there already is refused
    try:
        with made.open("xb") as file:
            try:
                _fill(file, size_bytes, progress)
                making.rename(path)
            except BaseException:
                making.unlink(missing_ok=True)
                raise
    except OSError as error:
        remedy = {
            errno.ENOSPC: "; free space or ask for a smaller --size",
            errno.EEXIST: "; if no other run is making it, remove it",
        }.get(error.errno or 0, "")
        raise BenchError(
            f"{made} cannot be made: {errno_name(error.errno or 0)}{remedy}"
        ) from error


def _fill(file: BinaryIO, size_bytes: int, progress: Callable[[int], None]) -> None:
    random = np.random.Generator(np.random.SFC64(1))
    os.posix_fallocate(file.fileno(), 0, size_bytes)
    for start in range(0, size_bytes, _CREATE_CHUNK_BYTES):
        length = min(_CREATE_CHUNK_BYTES, size_bytes - start)
        file.write(random.bytes(length))
        progress(length)
    file.flush()
    os.fsync(file.fileno())


def open_file(path: Path, shapes: list[Shape]) -> File:
    """Open for direct reads. Raises BenchError: missing, no O_DIRECT, too small, sparse."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # opening it would wait for a writer
            raise OSError(errno.EINVAL, "a pipe")
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        name = errno_name(error.errno or 0)
        raise BenchError(
            f"{path} cannot be opened for direct reads: {name}; name a block device, a regular "
            "file on a local disk that you may read, or a new name there to have one made"
        ) from error
    try:
        size = os.lseek(fd, 0, os.SEEK_END)  # a block device has no other size
        medium = medium_of(fd, str(path))
        _check_file(path, os.fstat(fd), size, shapes, medium.offset_alignment_bytes)
    except BaseException:
        os.close(fd)
        raise
    return File(fd, str(path), size, medium.alignment_bytes)


def _check_file(
    path: Path, status: os.stat_result, size: int, shapes: list[Shape], alignment_bytes: int
) -> None:
    check_size(path, size, shapes)
    if stat.S_ISREG(status.st_mode) and status.st_blocks * 512 < 0.99 * size:
        raise BenchError(f"{path} is sparse: reads would not touch the drive; fill it first")
    for shape in shapes:
        if alignment_bytes and shape.block_bytes % alignment_bytes:
            raise BenchError(
                f"{path} lies on a device that wants multiples of {alignment_bytes} bytes; "
                f"blocks of {shape.block_bytes} bytes cannot be read from it"
            )


def run_device(
    name: str, file: File, shape: Shape, seconds: float, turn: int = 1
) -> tuple[Rate, str]:
    """Keep a device's queue full of random reads for a while, waiting for `turn` completions at a
    time; its rate, and what it really was and had to do without."""
    with _loaded(name, file, shape) as (device, load):
        cpu_s = time.process_time()
        operations_s = load.run(turn, seconds)
        cpu_s = time.process_time() - cpu_s
        cpu_us = cpu_s / max(1, load.done) * 1e6
        words = "; ".join([device.engine, *device.notes])
        return Rate(operations_s, cpu_us, load.latency(), load.done), words


def best_turn(name: str, file: File, shape: Shape) -> int:
    """How many completions to wait for at a time: too few wake too often, too many let the queue
    run dry, and which is which depends on the medium.

    A quarter of the queue, unless another is clearly better. Tried out before anything is measured,
    since it takes from what a drive bursts to after a pause; and several times, since the first to
    try has most of that.
    """
    quarter, *others = (max(1, shape.depth // part) for part in (4, 2, 8))
    turns = [quarter, *sorted({*others, 1} - {quarter})]
    with _loaded(name, file, shape) as (_, load):
        rates = [[load.run(turn, _TRIAL_S) for turn in turns] for _ in range(_TRIALS)]
    medians = np.median(rates, axis=0)
    medians[0] *= _CLEARLY
    return turns[int(medians.argmax())]


@contextmanager
def _loaded(name: str, file: File, shape: Shape) -> Iterator[tuple[StorageDevice, _Load]]:
    arena = aligned_arena(shape.depth * shape.block_bytes, max(4096, file.alignment_bytes))
    device = _open(name, file, arena, shape.depth)
    try:
        yield device, _load(device, file, shape)
    finally:
        device.close()


def _open(name: str, file: File, arena: np.ndarray, depth: int) -> StorageDevice:
    if name == "uring":
        return Uring([file], arena, depth, single_issuer=True)
    return storage_device_class(name)([file], arena, depth)


def _load(device: StorageDevice, file: File, shape: Shape) -> _Load:
    ops = np.zeros(shape.depth, OP)
    ops["tag"] = np.arange(shape.depth)
    ops["memory"] = np.arange(shape.depth) * shape.block_bytes
    ops["length"] = shape.block_bytes
    ops["kind"] = READ
    return _Load(device, file, shape, ops)


class _Load:
    """A queue kept full of random reads.

    Offsets are drawn anew as they are used up, and differently in every run: a drive is not to find
    in its cache what the run before it has read.
    """

    def __init__(self, device: StorageDevice, file: File, shape: Shape, ops: Ops) -> None:
        self._device, self._file, self._shape = device, file, shape
        self._ops = ops
        self._random = np.random.Generator(np.random.SFC64())
        self._offsets = self._draw()
        self._at = 0
        self.done = 0
        self._submitted_ns = np.zeros(shape.depth, np.int64)  # by tag
        self._waits_ns = np.zeros(_DRAWN, np.int64)
        self._waits = 0
        self._histogram = np.zeros(64 * _STEPS, np.int64)
        self._submit(ops)

    def _draw(self) -> NDArray[np.int64]:
        blocks = self._file.size_bytes // self._shape.block_bytes
        return self._random.integers(0, blocks, _DRAWN) * self._shape.block_bytes

    def _submit(self, ops: Ops) -> None:
        if self._at + len(ops) > _DRAWN:
            self._offsets, self._at = self._draw(), 0
        ops["offset"] = self._offsets[self._at : self._at + len(ops)]
        self._at += len(ops)
        self._submitted_ns[ops["tag"].view(np.int64)] = time.perf_counter_ns()
        self._device.submit(ops)

    def run(self, wanted: int, seconds: float) -> float:
        """Read for a while, waiting for `wanted` completions at a time; operations a second."""
        start_s, before = time.perf_counter(), self.done
        while (elapsed_s := time.perf_counter() - start_s) < seconds:
            completions = self._device.reap_some(wanted)
            now_ns = time.perf_counter_ns()
            if (completions["result"] != self._shape.block_bytes).any():
                raise BenchError(
                    f"{self._file.path}: reads failed or came short; see the kernel log"
                )
            tags = completions["tag"].view(np.int64)
            self._note(now_ns - self._submitted_ns[tags])
            self.done += len(tags)
            self._submit(self._ops.take(tags))
        return (self.done - before) / elapsed_s

    def _note(self, waits_ns: NDArray[np.int64]) -> None:
        if self._waits + len(waits_ns) > _DRAWN:
            self._count()
        self._waits_ns[self._waits : self._waits + len(waits_ns)] = waits_ns
        self._waits += len(waits_ns)

    def _count(self) -> None:
        """Put the waits that were noted into the histogram, whose steps are equal in ratio."""
        steps = np.log2(np.maximum(1, self._waits_ns[: self._waits])) * _STEPS
        self._histogram += np.bincount(steps.astype(np.int64), minlength=len(self._histogram))
        self._waits = 0

    def latency(self) -> Latency:
        self._count()
        reached = np.cumsum(self._histogram)
        steps = np.searchsorted(reached, np.array(LATENCY_SHARES) * reached[-1])
        middles_us = 2 ** ((steps + 0.5) / _STEPS) / 1e3
        return stated(middles_us.tolist(), int(reached[-1]))
