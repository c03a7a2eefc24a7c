"""`prefetchd bench ring`: what the ring gives on a file, beside fio on the same file.

Decides how a raw device is driven (random reads, a full queue, batches) and how its rate is
compared: interleaved rounds, the same idle gap before each run, ratios of pairs, medians.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.arena import aligned_arena
from prefetchd.device import OP, READ, File, Ops, StorageDevice
from prefetchd.devices.uring import Uring
from prefetchd.hostinfo import errno_name, medium_of
from prefetchd.registry import storage_device_class

_CREATE_CHUNK_BYTES = 1 << 24
_OFFSETS = 1 << 16
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
        return f"{self.block_bytes / 1024:g} KiB, depth {self.depth}"


@dataclass(frozen=True, slots=True)
class Rate:
    """What one run achieved."""

    operations_s: float
    cpu_us_per_operation: float


def check_shapes(shapes: Sequence[Shape]) -> None:
    """Raises ValueError for blocks that no drive reads directly."""
    for shape in shapes:
        if shape.block_bytes < 512 or shape.block_bytes % 512:
            raise ValueError(
                f"blocks of {shape.block_bytes} bytes cannot be read directly; use whole sectors "
                "of 512 bytes, better 4 KiB"
            )


def create_file(path: Path, size_bytes: int, progress: Callable[[int], None]) -> None:
    """A file full of random bytes, written once. Raises BenchError."""
    random = np.random.Generator(np.random.SFC64(1))
    try:
        with path.open("xb") as file:
            for start in range(0, size_bytes, _CREATE_CHUNK_BYTES):
                length = min(_CREATE_CHUNK_BYTES, size_bytes - start)
                file.write(random.bytes(length))
                progress(length)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if not isinstance(error, FileExistsError):
            path.unlink(missing_ok=True)
        raise BenchError(f"{path} cannot be made: {errno_name(error.errno or 0)}") from error


def open_file(path: Path, shapes: list[Shape]) -> File:
    """Open for direct reads. Raises BenchError: missing, no O_DIRECT, too small, sparse."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        name = errno_name(error.errno or 0)
        raise BenchError(
            f"{path} cannot be opened for direct reads: {name}; name a regular file on a local "
            "disk that you may read, or a new name there to have one made"
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
    largest = max(shape.block_bytes for shape in shapes)
    if size < 64 * largest:
        raise BenchError(f"{path} has {size} bytes, too few; use at least {64 * largest}")
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
    time; its rate and what it really was."""
    with _loaded(name, file, shape) as (device, load):
        cpu_s = time.process_time()
        operations_s = load.run(turn, seconds)
        cpu_s = time.process_time() - cpu_s
        return Rate(operations_s, cpu_s / max(1, load.done) * 1e6), device.engine


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
    blocks = file.size_bytes // shape.block_bytes
    random = np.random.Generator(np.random.SFC64(2))
    offsets = random.integers(0, blocks, _OFFSETS) * shape.block_bytes
    ops = np.zeros(shape.depth, OP)
    ops["tag"] = np.arange(shape.depth)
    ops["memory"] = np.arange(shape.depth) * shape.block_bytes
    ops["length"] = shape.block_bytes
    ops["kind"] = READ
    ops["offset"] = offsets[: shape.depth]
    return _Load(device, file, shape, ops, offsets)


class _Load:
    """A queue kept full of random reads."""

    def __init__(
        self,
        device: StorageDevice,
        file: File,
        shape: Shape,
        ops: Ops,
        offsets: NDArray[np.int64],
    ) -> None:
        self._device, self._file, self._shape = device, file, shape
        self._ops, self._offsets = ops, offsets
        self._at = shape.depth
        self.done = 0
        device.submit(ops)

    def run(self, wanted: int, seconds: float) -> float:
        """Read for a while, waiting for `wanted` completions at a time; operations a second."""
        start_s, before = time.perf_counter(), self.done
        while (elapsed_s := time.perf_counter() - start_s) < seconds:
            completions = self._device.reap_some(wanted)
            if (completions["result"] != self._shape.block_bytes).any():
                raise BenchError(
                    f"{self._file.path}: reads failed or came short; see the kernel log"
                )
            again = self._ops.take(completions["tag"].view(np.int64))
            if self._at + len(again) > _OFFSETS:
                self._at = 0
            again["offset"] = self._offsets[self._at : self._at + len(again)]
            self._at += len(again)
            self.done += len(again)
            self._device.submit(again)
        return (self.done - before) / elapsed_s


def run_fio(path: Path, shape: Shape, seconds: float) -> Rate:
    """The same load by fio's io_uring engine with fixed buffers and files. Raises BenchError."""
    # In milliseconds: fio reads "0.5" as no limit at all.
    limit = f"--runtime={max(1, round(seconds * 1000))}ms"
    job, cpu_s = _fio_reads(path, shape, limit, "--time_based")
    operations_s, operations = float(job["read"]["iops"]), int(job["read"]["total_ios"])
    cpu_s = max(0.0, cpu_s - _fio_start_cpu_s(path, shape))
    return Rate(operations_s, cpu_s / operations * 1e6 if operations else 0.0)


@functools.cache
def _fio_start_cpu_s(path: Path, shape: Shape) -> float:
    """What fio needs to come up and to end: the CPU time of a run of one read."""
    return _fio_reads(path, shape, "--number_ios=1")[1]


def _fio_reads(path: Path, shape: Shape, *arguments: str) -> tuple[Any, float]:
    """One run and its CPU seconds, the kernel's workers for it included as they are in ours: what
    fio itself says of its processor is without them."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    job = fio_job(
        "--name=ring",
        f"--filename={path}",
        "--rw=randread",
        "--fixedbufs",
        "--registerfiles",
        f"--bs={shape.block_bytes}",
        f"--iodepth={shape.depth}",
        "--readonly",
        *arguments,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return job, cpu_s


def fio_job(*arguments: str) -> Any:
    """What fio's io_uring engine says of its first job, in its own JSON. Raises BenchError."""
    # The engine first: it brings options of its own.
    command = ["fio", "--ioengine=io_uring", "--direct=1", "--output-format=json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"fio failed ({done.returncode}): {done.stderr.strip()[:300]}")
    # It may say something before the JSON.
    return json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]


def has_fio() -> bool:
    return shutil.which("fio") is not None
