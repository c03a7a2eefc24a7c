"""The core under a virtual clock as the stage of a decode (see `prefetchd.bench.decode_loop`).

Decides how long a hand-over takes and when, within it, a hint is given. No bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.bench.decode_loop import Served
from prefetchd.core import Core
from prefetchd.drive_model import DriveModel
from prefetchd.lab.dpu import Dpu
from prefetchd.lab.virtual import Record, VirtualEngine
from prefetchd.lab.workload import Demand
from prefetchd.model import Demanded, Hint, Ids, PageHint, Ready, Released

_NEVER_NS = 1 << 62
_PRELOAD_PAGES = 1024


@dataclass(frozen=True, slots=True)
class VirtualCounts:
    """Counts since the start; what a modelled drive never does is not among them."""

    engine: str
    prefetch: dict[str, int]
    failures: dict[str, int]
    abandoned: int
    pages_read: int
    bytes_read: int
    achieved_depth: float
    busy_ns: int
    decision_ns: NDArray[np.int64]


class VirtualStage:
    """`slot_bytes`: what a page takes on the drive and on the link to the GPU."""

    def __init__(
        self,
        core: Core,
        drive: DriveModel,
        dpu: Dpu,
        *,
        slot_bytes: int,
        depth: int,
        timeout_ns: int,
        record: Record | None = None,
    ) -> None:
        self._dpu = dpu
        self._slot_bytes = slot_bytes
        self._timeout_ns = timeout_ns
        self._decision_ns = int(dpu.decision_us * 1e3)
        self._answers: dict[int, Ready] = {}
        self._number = 0
        self.engine = VirtualEngine(
            core,
            drive,
            self._on_ready,
            page_bytes=slot_bytes,
            depth=depth,
            decision_ns=self._decision_ns,
            cores=dpu.cores,
            record=record,
        )

    def preload(self, pages: int) -> None:
        """Demand all pages once, some at a time, so that they are there."""
        every: Ids = np.arange(pages, dtype=np.int64)
        for first in range(0, pages, _PRELOAD_PAGES):
            self._demand(every[first : first + _PRELOAD_PAGES], None)
            self.engine.handle(Released(self._number))

    def now_ns(self) -> int:
        return self.engine.now_ns

    def cpu_ns(self) -> None:
        return None

    def counts(self) -> VirtualCounts:
        counters = self.engine.core.counters
        decided = self.engine.decisions if self._decision_ns else 0
        return VirtualCounts(
            engine="virtual clock",
            prefetch=counters.prefetches(),
            failures={},
            abandoned=counters.abandoned,
            pages_read=counters.demand_reads + counters.prefetch_reads,
            bytes_read=self.engine.bytes_read,
            achieved_depth=self.engine.depth.mean,
            busy_ns=self.engine.depth.busy_ns,
            decision_ns=np.full(decided, self._decision_ns),
        )

    def hint(self, hint: Hint) -> None:
        self.engine.hint(hint)

    def serve(self, demand: Demand, hint: PageHint | None) -> Served:
        engine, asked_ns = self.engine, self.engine.now_ns
        ready = self._demand(demand.pages, demand)
        readable_ns = engine.now_ns
        present = ready.slots >= 0
        handed_bytes = int(np.count_nonzero(present)) * self._slot_bytes
        handed_ns = readable_ns + self._dpu.handover_ns(handed_bytes)
        if hint is not None:  # the copy needs no processor, so the hint does not wait for it
            engine.hint(hint)
        if handed_ns > readable_ns:
            engine.run_until(handed_ns)
        engine.handle(Released(self._number))
        return Served(
            demand=demand,
            outcomes=ready.outcomes,
            waits_ns=ready.waits_ns,
            present=present,
            stamps=None,
            asked_ns=asked_ns,
            readable_ns=readable_ns,
            handed_ns=handed_ns,
        )

    def _demand(self, pages: Ids, demand: Demand | None) -> Ready:
        self._number += 1
        number, engine = self._number, self.engine
        scores = None if demand is None else demand.scores
        engine.handle(Demanded(number, pages, engine.now_ns + self._timeout_ns, 0, scores))
        engine.run_until(_NEVER_NS, lambda: number in self._answers)
        return self._answers.pop(number)

    def _on_ready(self, ready: Ready) -> None:
        self._answers[ready.ticket] = ready

    def compute(self, until_ns: int) -> None:
        self.engine.run_until(until_ns)
