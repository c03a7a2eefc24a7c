"""Processes that do the same thing at the same time, for replays with many clients.

Decides that all begin together, how they tell of their progress, and how the loss of one is told.
Refuses to know what they do.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any, Protocol, TypeVar, cast

from prefetchd.bench.runs import ReplayError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_START_TIMEOUT_S = 120.0


class Work(Protocol[T_co]):
    """What each process does: it is pickled, so it is a plain class at the top of a module."""

    def __call__(
        self, number: int, begin: Callable[[], None], progress: Callable[[int], None]
    ) -> T_co:
        """`begin` returns once every process has called it."""


def log_level() -> int:
    """For processes that begin anew: what is told here is told there."""
    return logging.getLogger("prefetchd").getEffectiveLevel()


class _HeldUpError(ReplayError):
    """Of a process that is well, but another one is not."""


def together(work: Work[T], count: int, progress: Callable[[int], None]) -> list[T]:
    """What `count` processes returned, in the order of their numbers. Raises ReplayError when one
    ended without a word, and whatever one of them raised."""
    # Processes begin anew: a copy of this one would take its threads' locks with it.
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    crowd: list[tuple[BaseProcess, Connection]] = []
    try:
        for number in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(work, number, barrier, theirs, log_level())
            )
            process.start()
            theirs.close()  # so that its end is heard
            crowd.append((process, ours))
        return _collect(crowd, progress)
    except BaseException:
        for running, _ in crowd:
            running.kill()  # they have nothing to lose
        raise
    finally:
        for ended, connection in crowd:
            ended.join()
            ended.close()
            connection.close()


def _run(work: Work[T], number: int, barrier: Barrier, out: Connection, level: int) -> None:
    logging.basicConfig(level=level)

    def begin() -> None:
        try:
            barrier.wait(_START_TIMEOUT_S)
        except BrokenBarrierError:
            raise _HeldUpError("the clients did not get ready together") from None

    try:
        result = work(number, begin, out.send)
    except BaseException as error:
        out.send(error)
        barrier.abort()
    else:
        out.send([result])


def _collect(
    crowd: list[tuple[BaseProcess, Connection]], progress: Callable[[int], None]
) -> list[T]:
    """A number is progress, an error the end of all, a list of one what was returned."""
    waiting = {connection: number for number, (_, connection) in enumerate(crowd)}
    returned: dict[int, T] = {}
    held_up: _HeldUpError | None = None
    while waiting:
        for connection in cast("list[Connection]", wait(waiting)):
            number = waiting[connection]
            told = _told(connection, number, crowd[number][0])
            if isinstance(told, _HeldUpError):
                held_up = told  # whose fault it is comes from another
                del waiting[connection]
            elif isinstance(told, BaseException):
                raise told
            elif isinstance(told, list):
                returned[number] = told[0]
                del waiting[connection]
            else:
                progress(told)
    if held_up is not None:
        raise held_up
    return [returned[number] for number in range(len(crowd))]


def _told(connection: Connection, number: int, process: BaseProcess) -> Any:
    try:
        return connection.recv()
    except EOFError:
        process.join()
        raise ReplayError(
            f"client {number} ended before its work, with exit code {process.exitcode}; was it out "
            "of memory? Use fewer --clients"
        ) from None
