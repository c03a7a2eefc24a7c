"""Where the cells of a scorecard are simulated: processes of this machine, or a Dask cluster.

Decides how workers are started and how their loss is told. Knows no cell.
"""

from __future__ import annotations

import multiprocessing
import re
import socket
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager


class WorkersError(Exception):
    """There are no workers, or no longer: which, why, and what to do."""


@contextmanager
def workers(jobs: int, cluster: str | None = None, timeout_s: float = 10.0) -> Iterator[Executor]:
    """`jobs` processes (1: this one), or all workers of the cluster whose scheduler is at
    `cluster`. They end with the context, but for the cluster's. Raises WorkersError."""
    try:
        if cluster is not None:
            with _dask(cluster, timeout_s) as executor:
                yield executor
        elif jobs == 1:
            with ThreadPoolExecutor(1) as thread:
                yield thread
        else:
            # Processes begin anew: a copy of this one would take the threads' locks with it.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(jobs, mp_context=context) as processes:
                yield processes
    except BrokenExecutor as error:
        raise WorkersError(
            "a worker process ended before its work; was it out of memory? Use fewer --jobs"
        ) from error


def abandon(executor: Executor) -> None:
    """Let go of all that has not begun. (To cancel futures one by one would break the thread that
    tells of a process that has died.)"""
    if isinstance(executor, ProcessPoolExecutor | ThreadPoolExecutor):
        executor.shutdown(wait=False, cancel_futures=True)
    else:
        executor.shutdown(wait=False)


@contextmanager
def _dask(address: str, timeout_s: float) -> Iterator[Executor]:
    try:
        from distributed import Client
        from distributed.scheduler import KilledWorker
    except ImportError as error:
        raise WorkersError(
            "--cluster needs Dask's distributed, which is not installed: "
            "pip install prefetchd[cluster]"
        ) from error
    _listens(address, timeout_s)
    try:
        client = Client(address, timeout=timeout_s, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise _silent(address, error) from error
    with client:
        if not client.scheduler_info(n_workers=-1)["workers"]:
            raise WorkersError(
                f"the Dask scheduler at {address} has no workers; start some with "
                f"`dask worker {address}`"
            )
        try:
            with client.get_executor(pure=False) as executor:  # type: ignore[no-untyped-call]
                yield executor
        except KilledWorker as error:
            raise WorkersError(f"the cluster lost its workers: {error}") from error


def _listens(address: str, timeout_s: float) -> None:
    """Raises WorkersError if nothing does: told here at once, before Dask has begun anything that
    it would have to end."""
    form = re.fullmatch(r"\w+://\[?([^\s/\]]+)\]?:(\d{1,5})", address)
    if form is None or int(form[2]) > 0xFFFF:
        raise WorkersError(
            f"--cluster {address} is no address of a Dask scheduler; write it as in tcp://HOST:8786"
        )
    try:
        socket.create_connection((form[1], int(form[2])), timeout_s).close()
    except OSError as error:
        raise _silent(address, error) from error


def _silent(address: str, error: Exception) -> WorkersError:
    return WorkersError(
        f"no Dask scheduler answers at {address}: {error}. Start one with `dask scheduler`, and "
        "give its address, as in tcp://HOST:8786"
    )
