"""What sparse decoding was served, noted as the replays note it, so that figures mean the same.

Decides what a step is: one pass for a single token whose layers choose their far blocks. Counts
nothing itself; `bench.figures` does.
"""

from __future__ import annotations

import time

import numpy as np

from prefetchd import metrics
from prefetchd.bench.decode_loop import Log, Served
from prefetchd.bench.figures import run_figures
from prefetchd.lab.workload import Demand
from prefetchd.model import Scores
from prefetchd.runtime import Runtime
from prefetchd.tickets import Ticket


class Meter:
    """`warmup_steps`: first steps that are not measured."""

    def __init__(self, runtime: Runtime, layers: int, warmup_steps: int = 16) -> None:
        self.log = Log(warmup_steps, layers)
        self._runtime = runtime
        self._began_ns = 0
        self._cpu_ns = 0

    def begin(self) -> None:
        """A pass begins."""
        self._began_ns = time.monotonic_ns()
        if len(self.log.step_ns) == self.log.warmup_steps and self.log.before is None:
            self.log.before, self._cpu_ns = self._runtime.stats(), time.process_time_ns()

    def served(self, ticket: Ticket, mass: Scores, asked_ns: int) -> None:
        """One layer's far blocks have come."""
        now_ns = time.monotonic_ns()
        demand = Demand(ticket.pages, mass, np.ones(len(mass), np.bool_))
        served = Served(
            demand=demand,
            outcomes=ticket.outcomes,
            waits_ns=ticket.waits_ns,
            present=~ticket.missing,
            stamps=None,
            asked_ns=asked_ns,
            readable_ns=now_ns,
            handed_ns=now_ns,
        )
        self.log.served.append(served)

    def passed(self) -> None:
        """A pass has ended. It was a step if every layer chose."""
        if len(self.log.served) == (len(self.log.step_ns) + 1) * self.log.layers:
            self.log.step_ns.append(time.monotonic_ns() - self._began_ns)

    def figures(self, name: str) -> metrics.Run:
        """The figures of all steps after the warm-up, as a replay gives them. Raises ValueError
        when there are none."""
        log, runtime = self.log, self._runtime
        if log.before is None or len(log.step_ns) <= log.warmup_steps:
            raise ValueError(
                f"{len(log.step_ns)} sparse steps, of which {log.warmup_steps} warm up, tell "
                "nothing: decode more tokens, or measure with fewer warm-up steps"
            )
        log.after = runtime.stats()
        log.cpu_ns = time.process_time_ns() - self._cpu_ns
        return run_figures(
            name,
            control=False,
            evict=runtime.options.evict,
            rounds=[log],
            page_bytes=runtime.page_bytes,
            seed=0,
        )
