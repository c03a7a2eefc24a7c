"""One run of a recorded decode against a runtime, in real time: the measuring stage.

Decides what is timed and how the host thread spends a layer's compute. Policy, device and pages are
the runtime's; the order of what happens is `bench.decode_loop`'s.

A layer's time: demand its pages, wait until they are readable, hand them to the GPU device; then
its compute is a real wait, at whose start the hint for the next layer is given (or before it, while
the GPU copies) and the pins are released, since the GPU has copies of its own. What was seen is
only noted down then; it is checked and counted after the run, so that measuring costs the run
nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from prefetchd.bench.content import STAMP_BYTES, stamped
from prefetchd.bench.decode_loop import Log, Pace, Served, follow
from prefetchd.bench.served import Serving
from prefetchd.lab.workload import Demand, Workload
from prefetchd.model import Hint, Ids, PageHint
from prefetchd.resting import collector_rests
from prefetchd.stats import Stats
from prefetchd.tickets import Ticket

_PR_SET_TIMERSLACK = 29


class WrongBytes(Exception):  # noqa: N818  (nobody catches it: it is the end)
    """A page was handed over that is not the one demanded. This must never happen."""


def run_decode(
    runtime: Serving,
    workload: Workload,
    pace: Pace,
    progress: Callable[[int], None] | None = None,
) -> Log:
    """Replay the workload once, in real time.

    The garbage collector rests meanwhile: what it would search through is the replay's own notes.
    """
    _sharpen_sleep()
    with collector_rests():
        stage = _Live(runtime, runtime.buffer(workload.widest), tend=pace.tend)
        return follow(stage, workload, pace, progress)


class _Live:
    """A runtime, its GPU buffer and the real clock."""

    def __init__(self, runtime: Serving, buffer: Any, *, tend: bool) -> None:
        self._runtime = runtime
        self._buffer = buffer
        self._tend = tend

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def cpu_ns(self) -> int:
        return time.process_time_ns()

    def counts(self) -> Stats:
        return self._runtime.stats()

    def hint(self, hint: Hint) -> None:
        self._runtime.hint(hint)

    def serve(self, demand: Demand, hint: PageHint | None) -> Served:
        asked_ns = time.monotonic_ns()
        ticket = self._runtime.demand(demand.pages, scores=demand.scores).wait()
        readable_ns = time.monotonic_ns()
        handed_ns = self._hand_over(ticket, hint)
        present = ticket.slots >= 0
        ticket.release()
        return Served(
            demand=demand,
            outcomes=ticket.outcomes,
            waits_ns=ticket.waits_ns,
            present=present,
            stamps=self._runtime.peek(self._buffer, int(np.count_nonzero(present)), STAMP_BYTES),
            asked_ns=asked_ns,
            readable_ns=readable_ns,
            handed_ns=handed_ns,
        )

    def _hand_over(self, ticket: Ticket, hint: PageHint | None) -> int:
        """Push the pages; when that was done. The hint comes after it, or while the GPU copies."""
        push = ticket.push(self._buffer, skip_missing=True)
        copying = not push.done()
        if hint is not None and copying:
            self._runtime.hint(hint)
        push.wait()
        handed_ns = time.monotonic_ns()
        if hint is not None and not copying:
            self._runtime.hint(hint)
        return handed_ns

    def compute(self, until_ns: int) -> None:
        if self._tend:
            self._runtime.tend(max(0, until_ns - time.monotonic_ns()) / 1e9)
        else:
            _sleep_until(until_ns)


def check_stamps(log: Log, seed: int, stamped_as: Ids | None = None) -> int:
    """Compare the stamp of every page handed over with the page that was asked for, which by its
    id is stamped as `stamped_as` says (None: as itself).

    Returns how many were compared. Raises WrongBytes.
    """
    verified = 0
    for served in log.served:
        if served.stamps is None:
            continue
        pages = served.demand.pages[served.present]
        named = pages if stamped_as is None else stamped_as[pages]
        good = stamped(served.stamps, named, seed)
        if not good.all():
            bad = pages[~good].tolist()
            raise WrongBytes(f"pages {bad} were handed over with other pages' bytes")
        verified += len(pages)
    return verified


def _sharpen_sleep() -> None:
    """Ask for wake-ups without the default 50 us of slack, for this thread (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _sleep_until(when_ns: int) -> None:
    left_ns = when_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
