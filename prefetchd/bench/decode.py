"""One run of a recorded decode against a runtime, in real time: the measuring loop.

Decides what is timed and what is counted. Policy, device and pages are the runtime's; what the
figures mean together is the replay's.

A layer's time: demand its pages, wait, hand them to the GPU device; then its compute is a real
wait of `layer_ns`, during which the hint for the next layer is given (as on a GPU, where the host
runs ahead of the kernel), stamps are checked and the previous layer's pins are released.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.bench.content import STAMP_BYTES, stamped
from prefetchd.lab.workload import Demand, Workload
from prefetchd.model import Outcome
from prefetchd.runtime import Runtime
from prefetchd.stats import Stats
from prefetchd.tickets import Ticket

_PR_SET_TIMERSLACK = 29


class WrongBytes(Exception):  # noqa: N818
    """A page was handed over that is not the one demanded. This must never happen."""


@dataclass(slots=True)
class Sums:
    """What one round measured, over its measured steps (times in ns, counts in pages)."""

    step_ns: list[int] = field(default_factory=list)  # every step, warm-up included
    stall_ns: list[int] = field(default_factory=list)  # one a demand
    outcomes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(4, np.int64))
    latency_ns: float = 0.0  # sum over pages of wait + hand-over
    pages: int = 0
    far_pages: int = 0
    far_misses: int = 0
    layer_miss: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    layer_late: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    missing: int = 0
    verified: int = 0
    cpu_ns: int = 0
    before: Stats | None = None
    after: Stats | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """`layer_ns` of compute a layer, hints or not, how many first steps are not measured."""

    layer_ns: int
    hints: bool
    warmup_steps: int


def run_decode(
    runtime: Runtime,
    workload: Workload,
    pace: Pace,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Sums:
    """Replay the workload once. Raises WrongBytes if a page's stamp is not its own."""
    _sharpen_sleep()
    layers = workload.geometry.layers
    sums = Sums(layer_miss=np.zeros(layers, np.int64), layer_late=np.zeros(layers, np.int64))
    buffer = runtime.buffer(workload.widest)
    previous: Ticket | None = None
    for step in range(workload.steps):
        if step == pace.warmup_steps:
            sums.before, sums.cpu_ns = runtime.stats(), time.process_time_ns()
        measured = step >= pace.warmup_steps
        for arrival in workload.arrivals.get(step, ()):
            runtime.hint(arrival)
        started_ns = time.monotonic_ns()
        for layer, demand in enumerate(workload.demands[step]):
            asked_ns = time.monotonic_ns()
            ticket = runtime.demand(demand.pages, scores=demand.scores).wait()
            readable_ns = time.monotonic_ns()
            ticket.push(buffer, skip_missing=True).wait()
            handed_ns = time.monotonic_ns()
            _foresee(runtime, workload, step, layer, hints=pace.hints)
            if previous is not None:
                previous.release()
            previous = ticket
            sums.verified += _check(runtime, buffer, demand, ticket, seed)
            if measured:
                _count(sums, layer, demand, ticket, handed_ns - readable_ns)
                stalled = bool((ticket.outcomes >= Outcome.LATE).any())
                sums.stall_ns.append(readable_ns - asked_ns if stalled else 0)
            _sleep_until(handed_ns + pace.layer_ns)
        sums.step_ns.append(time.monotonic_ns() - started_ns)
        if progress:
            progress(1)
    if previous is not None:
        previous.release()
    sums.cpu_ns = time.process_time_ns() - sums.cpu_ns
    sums.after = runtime.stats()
    return sums


def _foresee(runtime: Runtime, workload: Workload, step: int, layer: int, *, hints: bool) -> None:
    """Give the hint for the next layer now that this one starts."""
    if not hints:
        return
    step, layer = (step, layer + 1) if layer + 1 < workload.geometry.layers else (step + 1, 0)
    if step < workload.steps and (hint := workload.hints[step][layer]) is not None:
        runtime.hint(hint)


def _check(runtime: Runtime, buffer: Any, demand: Demand, ticket: Ticket, seed: int) -> int:
    """Compare the stamp of every page handed over with the page that was asked for."""
    here = ~ticket.missing
    pages = demand.pages[here]
    rows = runtime.peek(buffer, len(pages), STAMP_BYTES)
    if not stamped(rows, pages, seed).all():
        bad = pages[~stamped(rows, pages, seed)]
        raise WrongBytes(f"pages {bad.tolist()} were handed over with other pages' bytes")
    return len(pages)


def _count(sums: Sums, layer: int, demand: Demand, ticket: Ticket, handover_ns: int) -> None:
    outcomes = ticket.outcomes
    sums.outcomes += np.bincount(outcomes, minlength=4)
    sums.pages += len(outcomes)
    sums.latency_ns += float(ticket.waits_ns.sum()) + handover_ns * len(outcomes)
    missed = outcomes == Outcome.MISS
    sums.layer_miss[layer] += int(np.count_nonzero(missed))
    sums.layer_late[layer] += int(np.count_nonzero(outcomes == Outcome.LATE))
    sums.far_pages += int(np.count_nonzero(demand.far))
    sums.far_misses += int(np.count_nonzero(missed & demand.far))
    sums.missing += int(np.count_nonzero(ticket.missing))


def _sharpen_sleep() -> None:
    """Ask for wake-ups without the default 50 us of slack, for this thread (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _sleep_until(when_ns: int) -> None:
    left_ns = when_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
