"""One run of a recorded decode against a runtime, in real time: the measuring loop.

Decides what is timed and what is counted. Policy, device and pages are the runtime's; what the
figures mean together is the replay's.

A layer's time: demand its pages, wait until they are readable, hand them to the GPU device; then
its compute is a real wait of `layer_ns`, at whose start the hint for the next layer is given (or
before it, while the GPU copies) and the previous layer's pins are released. What was seen is only
noted down then; it is checked and counted after the run, so that measuring costs the run nothing.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.bench.content import STAMP_BYTES, stamped
from prefetchd.lab.workload import Demand, Workload
from prefetchd.model import Codes, Mask, PageHint
from prefetchd.runtime import Runtime
from prefetchd.stats import Stats
from prefetchd.tickets import Ticket

_PR_SET_TIMERSLACK = 29


class WrongBytes(Exception):  # noqa: N818  (nobody catches it: it is the end)
    """A page was handed over that is not the one demanded. This must never happen."""


@dataclass(frozen=True, slots=True)
class Served:
    """One demand as it was answered (times in ns); `stamps` are those of the pages handed over."""

    demand: Demand
    outcomes: Codes
    waits_ns: NDArray[np.int64]
    present: Mask
    stamps: NDArray[np.uint8]
    stalled_ns: int
    handover_ns: int


@dataclass(slots=True)
class Log:
    """What one round saw: every step's time, every demand in order, counters before and after."""

    warmup_steps: int
    layers: int
    step_ns: list[int] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    cpu_ns: int = 0
    before: Stats | None = None
    after: Stats | None = None

    @property
    def measured(self) -> list[Served]:
        return self.served[self.warmup_steps * self.layers :]


@dataclass(frozen=True, slots=True)
class Pace:
    """`layer_ns` of compute a layer, hints or not, how many first steps are not measured.

    `tend`: the host thread, waiting for its GPU, gives the runtime its time; else it only sleeps.
    """

    layer_ns: int
    hints: bool
    warmup_steps: int
    tend: bool = True


def run_decode(
    runtime: Runtime,
    workload: Workload,
    pace: Pace,
    progress: Callable[[int], None] | None = None,
) -> Log:
    """Replay the workload once, in real time.

    The garbage collector rests meanwhile: what it would search through is the replay's own notes.
    """
    _sharpen_sleep()
    gc.collect()
    gc.disable()
    try:
        return _run(runtime, workload, pace, progress)
    finally:
        gc.enable()


def _run(
    runtime: Runtime,
    workload: Workload,
    pace: Pace,
    progress: Callable[[int], None] | None,
) -> Log:
    log = Log(pace.warmup_steps, workload.geometry.layers)
    buffer = runtime.buffer(workload.widest)
    previous: Ticket | None = None
    for step in range(workload.steps):
        if step == pace.warmup_steps:
            log.before, log.cpu_ns = runtime.stats(), time.process_time_ns()
        for arrival in workload.arrivals.get(step, ()):
            runtime.hint(arrival)
        started_ns = time.monotonic_ns()
        for layer, demand in enumerate(workload.demands[step]):
            asked_ns = time.monotonic_ns()
            ticket = runtime.demand(demand.pages, scores=demand.scores).wait()
            readable_ns = time.monotonic_ns()
            hint = _next_hint(workload, step, layer) if pace.hints else None
            handed_ns = _hand_over(runtime, ticket, buffer, hint)
            if previous is not None:
                previous.release()
            previous = ticket
            log.served.append(
                _served(runtime, buffer, demand, ticket, (asked_ns, readable_ns, handed_ns))
            )
            end_ns = handed_ns + pace.layer_ns
            if pace.tend:
                runtime.engine.tend(end_ns)
            else:
                _sleep_until(end_ns)
        log.step_ns.append(time.monotonic_ns() - started_ns)
        if progress:
            progress(1)
    if previous is not None:
        previous.release()
    log.cpu_ns = time.process_time_ns() - log.cpu_ns
    log.after = runtime.stats()
    return log


def _hand_over(runtime: Runtime, ticket: Ticket, buffer: Any, hint: PageHint | None) -> int:
    """Push the pages; when that was done. The hint comes after it, or while the GPU copies."""
    push = ticket.push(buffer, skip_missing=True)
    copying = not push.done()
    if hint is not None and copying:
        runtime.hint(hint)
    push.wait()
    handed_ns = time.monotonic_ns()
    if hint is not None and not copying:
        runtime.hint(hint)
    return handed_ns


def _next_hint(workload: Workload, step: int, layer: int) -> PageHint | None:
    """What is said of the next layer when this one starts."""
    step, layer = (step, layer + 1) if layer + 1 < workload.geometry.layers else (step + 1, 0)
    return workload.hints[step][layer] if step < workload.steps else None


def _served(
    runtime: Runtime,
    buffer: Any,
    demand: Demand,
    ticket: Ticket,
    times_ns: tuple[int, int, int],
) -> Served:
    present = ticket.slots >= 0
    stamps = runtime.peek(buffer, int(np.count_nonzero(present)), STAMP_BYTES)
    asked_ns, readable_ns, handed_ns = times_ns
    return Served(
        demand=demand,
        outcomes=ticket.outcomes,
        waits_ns=ticket.waits_ns,
        present=present,
        stamps=stamps,
        stalled_ns=readable_ns - asked_ns,
        handover_ns=handed_ns - readable_ns,
    )


def check_stamps(log: Log, seed: int) -> int:
    """Compare the stamp of every page handed over with the page that was asked for.

    Returns how many were compared. Raises WrongBytes.
    """
    verified = 0
    for served in log.served:
        pages = served.demand.pages[served.present]
        good = stamped(served.stamps, pages, seed)
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
