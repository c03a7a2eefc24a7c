"""One run of a recorded decode: what happens in which order, and what is noted of it.

Decides the order of demands, hints, hand-overs and compute, alike for a real runtime and for a
simulation, so that the figures of both mean the same. What a decode runs on is a `Stage`, which
has the clock; what the notes mean together is `bench.figures`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.workload import Demand, Workload
from prefetchd.model import Codes, Hint, Mask, PageHint


class Counts(Protocol):
    """What is counted since the start, as in `prefetchd.stats.Stats`."""

    @property
    def engine(self) -> str: ...
    @property
    def prefetch(self) -> Mapping[str, int]: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def abandoned(self) -> int: ...
    @property
    def pages_read(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def achieved_depth(self) -> float: ...
    @property
    def busy_ns(self) -> int: ...
    @property
    def decision_ns(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class Served:
    """One demand as it was answered, and when (ns). `stamps`: those of the pages handed over;
    None where no bytes move."""

    demand: Demand
    outcomes: Codes
    waits_ns: NDArray[np.int64]
    present: Mask
    stamps: NDArray[np.uint8] | None
    asked_ns: int
    readable_ns: int
    handed_ns: int

    @property
    def stalled_ns(self) -> int:
        return self.readable_ns - self.asked_ns

    @property
    def handover_ns(self) -> int:
        return self.handed_ns - self.readable_ns


class Stage(Protocol):
    """What a decode runs on: a runtime in real time, or a core under a virtual clock."""

    def now_ns(self) -> int: ...
    def cpu_ns(self) -> int | None:
        """Processor time used so far; None where that says nothing."""

    def counts(self) -> Counts: ...
    def hint(self, hint: Hint) -> None: ...
    def serve(self, demand: Demand, hint: PageHint | None) -> Served:
        """Demand the pages, wait, hand them over; give the hint for the next layer and release
        the pages."""

    def compute(self, until_ns: int) -> None: ...


@dataclass(slots=True)
class Log:
    """What one round saw: every step's time, every demand in order, counters before and after.

    `verified`: pages whose bytes were compared already, and let go.
    """

    warmup_steps: int
    layers: int
    step_ns: list[int] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    cpu_ns: int | None = None
    before: Counts | None = None
    after: Counts | None = None
    verified: int = 0

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


def follow(
    stage: Stage,
    workload: Workload,
    pace: Pace,
    progress: Callable[[int], None] | None = None,
) -> Log:
    """Run the workload once on a stage; `progress` is told of every step."""
    log = Log(pace.warmup_steps, workload.geometry.layers)
    began_ns: int | None = None
    for step in range(workload.steps):
        if step == pace.warmup_steps:
            log.before, began_ns = stage.counts(), stage.cpu_ns()
        for arrival in workload.arrivals.get(step, ()):
            stage.hint(arrival)
        started_ns = stage.now_ns()
        for layer, demand in enumerate(workload.demands[step]):
            hint = _next_hint(workload, step, layer) if pace.hints else None
            served = stage.serve(demand, hint)
            log.served.append(served)
            stage.compute(served.handed_ns + pace.layer_ns)
        log.step_ns.append(stage.now_ns() - started_ns)
        if progress:
            progress(1)
    ended_ns = stage.cpu_ns()
    if began_ns is not None and ended_ns is not None:
        log.cpu_ns = ended_ns - began_ns
    log.after = stage.counts()
    return log


def _next_hint(workload: Workload, step: int, layer: int) -> PageHint | None:
    """What is said of the next layer when this one starts."""
    step, layer = (step, layer + 1) if layer + 1 < workload.geometry.layers else (step + 1, 0)
    return workload.hints[step][layer] if step < workload.steps else None
