"""The storage device `threads`: a pool of threads in preadv and pwritev, where io_uring is not.

Decides how many threads work and when they end. aiofiles runs the workers from one private
event loop; each worker takes operations off a queue until the device is closed, so that a
batch of 32 is 32 reads at once and no operation costs any asyncio. (Measured with random 64 KiB
reads at depth 32: one asyncio task per operation or small batch reached 0.77 of the rate of 32
plain threads in preadv, long-lived workers 0.97.) Files keep their flags, O_DIRECT among them, and
data goes straight to and from the arena; preadv, pwritev and fdatasync release the GIL.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any

import aiofiles.os
import numpy as np
from numpy.typing import NDArray

from prefetchd.device import (
    READ,
    SYNC,
    Arena,
    Completions,
    DeviceError,
    File,
    Op,
    Ops,
    StorageDevice,
    refusal,
)
from prefetchd.devices.memory import Mailbox

WORKERS_MAX = 32  # more threads than this cost more in switches than they add in depth


class _Daemons(Executor):
    """One daemon thread a call. The interpreter joins the threads of a ThreadPoolExecutor at exit,
    and these wait for work that never comes when nobody has closed their device."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._threads.append(threading.Thread(target=run, name="prefetchd-worker", daemon=True))
        self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for thread in self._threads:
            if wait and thread.ident is not None:  # else it could not be started
                thread.join()


def _limit_of(why: BaseException) -> str:
    return "open files (ulimit -n)" if isinstance(why, OSError) else "threads (ulimit -u)"


class Threads(StorageDevice):
    """Accepts up to `depth` operations; the first 32 of them are on the device at once."""

    name = "threads"

    def __init__(self, files: Sequence[File], arena: Arena, depth: int) -> None:
        super().__init__(files, arena, depth)
        self.workers = min(depth, WORKERS_MAX)
        self.engine = f"aiofiles, {self.workers} threads in preadv and pwritev"
        if depth > self.workers:
            self.notes = (
                f"depth {depth} was asked for, but {self.workers} operations run at once",
            )
        self._bytes = arena.data
        self._mailbox = Mailbox()
        self._in_flight = 0
        self._closed = False
        self._queue: SimpleQueue[Op | None] = SimpleQueue()  # None ends one worker
        # Nobody goes on before all have begun: no thread can be started while a process ends.
        self._begun = threading.Barrier(self.workers + 1)
        self._all_begun = False
        self._start_error: BaseException | None = None
        self._loop_thread = threading.Thread(
            target=self._run_loop, name="prefetchd-loop", daemon=True
        )
        try:
            self._loop_thread.start()
            self._begun.wait()
        except RuntimeError as error:  # of the start, or of a barrier that was given up
            if self._loop_thread.ident is not None:
                self._loop_thread.join()
            self._mailbox.close()
            why = self._start_error or error
            raise DeviceError(
                f"device threads: {self.workers} threads cannot be had: {why}; "
                f"raise the limit of {_limit_of(why)}, or ask for less depth"
            ) from why

    def _run_loop(self) -> None:
        """The constructor waits for the workers, so it is told when not even a loop can be had."""
        runner = asyncio.Runner()
        try:
            runner.get_loop()
        except OSError as error:
            self._give_up(error)
            return
        with runner:
            runner.run(self._run_workers())

    async def _run_workers(self) -> None:
        work = aiofiles.os.wrap(self._work)
        with _Daemons() as pool:
            try:
                await asyncio.gather(*(work(executor=pool) for _ in range(self.workers)))
            except RuntimeError as error:
                if self._all_begun:
                    raise
                self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._start_error = error
        self._begun.abort()

    def _end_workers(self) -> None:
        for _ in range(self.workers):
            self._queue.put(None)

    def _work(self) -> None:
        self._begun.wait()
        self._all_begun = True
        while (op := self._queue.get()) is not None:
            try:
                result = self._carry_out(op)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            self._mailbox.post([(op[0], result)])

    def _carry_out(self, op: Op) -> int:
        refused = refusal(op, len(self.files), len(self._bytes))
        if refused:
            return refused
        _, offset, memory, length, file, kind = op
        descriptor = self.files[file].fd
        if kind == SYNC:
            os.fdatasync(descriptor)
            return 0
        move = os.preadv if kind == READ else os.pwritev
        return move(descriptor, [self._bytes[memory : memory + length]], offset)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, ops: Ops) -> int:
        ops = ops[: self.depth - self._in_flight]
        self._in_flight += len(ops)
        for op in ops.tolist():
            self._queue.put(op)
        return len(ops)

    def reap(self) -> Completions:
        done = self._mailbox.take()
        self._in_flight -= len(done)
        return done

    def change_file(self, number: int, file: File) -> None:
        self._put_file(number, file)

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Take what no worker has begun off the queue; what is in a system call runs on."""
        unwanted = set(tags.tolist())
        queued = self._take_queued()
        for op in queued:
            if op[0] not in unwanted:
                self._queue.put(op)
        self._mailbox.post([(op[0], -errno.ECANCELED) for op in queued if op[0] in unwanted])

    def _take_queued(self) -> list[Op]:
        queued: list[Op] = []
        try:
            while (op := self._queue.get_nowait()) is not None:
                queued.append(op)
        except Empty:
            pass
        return queued

    def fileno(self) -> int:
        return self._mailbox.fileno()

    def close(self) -> None:
        """Drop what has not begun and wait for what has: no system call outlives this."""
        if self._closed:
            return
        self._closed = True
        self._take_queued()
        self._end_workers()
        self._loop_thread.join()
        self._mailbox.close()
        self._bytes.release()
        self._in_flight = 0
