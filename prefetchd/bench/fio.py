"""What fio says of the same loads, on the same file.

Decides its options, so that it does what our devices do, and how its own figures are read.
"""

from __future__ import annotations

import functools
import json
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

from prefetchd.bench.ring import LATENCY_SHARES, BenchError, Rate, Shape, stated


def run_fio(path: Path, shape: Shape, seconds: float) -> Rate:
    """The same load by fio's io_uring engine with fixed buffers and files. Raises BenchError."""
    # In milliseconds: fio reads "0.5" as no limit at all.
    limit = f"--runtime={max(1, round(seconds * 1000))}ms"
    job, cpu_s = _fio_reads(path, shape, limit, "--time_based")
    operations_s, operations = float(job["read"]["iops"]), int(job["read"]["total_ios"])
    cpu_s = max(0.0, cpu_s - _fio_start_cpu_s(path, shape))
    found = job["read"]["lat_ns"].get("percentile", {})
    latency = stated(
        [found.get(f"{100 * share:.6f}", 0) / 1e3 for share in LATENCY_SHARES], operations
    )
    return Rate(operations_s, cpu_s / max(1, operations) * 1e6, latency, operations)


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
        file_option(path),
        "--rw=randread",
        # As ours: other offsets in every run, each drawn from all blocks.
        "--randrepeat=0",
        "--norandommap",
        # From before the submission, as ours, and not from after it.
        "--lat_percentiles=1",
        "--clat_percentiles=0",
        f"--percentile_list={':'.join(f'{100 * share:g}' for share in LATENCY_SHARES)}",
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
    done = subprocess.run(
        command, capture_output=True, text=True, errors="surrogateescape", check=False
    )
    said, brace, rest = done.stdout.partition("{")  # it says what failed on either stream
    if done.returncode != 0 or not brace:
        why = " ".join(f"{done.stderr} {said}".split())[:300] or "it does not say why"
        raise BenchError(f"fio failed ({done.returncode}): {why}; --no-fio leaves it out")
    return json.loads(brace + rest, strict=False)["jobs"][0]  # names stand there as they are


def file_option(path: Path) -> str:
    """A bare colon would make two files of it: fio would read, or write, others."""
    return "--filename=" + str(path).replace(":", r"\:")


def has_fio() -> bool:
    """Whether it is installed."""
    return shutil.which("fio") is not None
