"""`prefetchd replay restore`: controls and predictors over recorded requests, lead by lead.

Decides which runs are made, on which store and staging, in which order. One run is
`bench.restore`'s, figures are `bench.restore_result`'s.

Every run has a store of its own, empty at first, that is erased after it: what a request may find
there is what earlier requests of the same run have put.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefetchd import metrics, registry, store_making
from prefetchd.bench.content import block_names
from prefetchd.bench.emulation import Emulation, limit_profile
from prefetchd.bench.replay import ReplayError, Report
from prefetchd.bench.restore import Pace, RestoreLog, RestoreRun
from prefetchd.bench.restore_result import RestoreResult, RestoreSettings, run_figures
from prefetchd.bench.restore_result import RestoreRun as RestoreFigures
from prefetchd.bench.seen import Seen, mark
from prefetchd.core import CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.lab.requests import Requests
from prefetchd.layout import Layout, uniform
from prefetchd.opening import open_runtime
from prefetchd.options import Options, PredictorFactory

CONTROLS = ("resident", "none")
_RUN_FOLDER = "prefetchd-restore-run"
_WRITE_BUFFERS = 64
_TIMEOUT_S = 120.0
_ALL_KEPT = CoreLimits(filled_share_max=1.0)  # whatever is put stays, written yet or not
_UNSTORED_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """One line of the result."""

    name: str
    control: bool
    predictor: str | PredictorFactory
    lead_ms: float
    staging_blocks: int


def plans(
    settings: RestoreSettings,
    predictors: Sequence[str],
    controls: Sequence[str],
) -> list[Plan]:
    """Controls at the first lead, predictors at each; `resident` keeps all that was ever put.

    Raises ReplayError, RegistryError.
    """
    unknown = [name for name in controls if name not in CONTROLS]
    if unknown:
        raise ReplayError(f"no control is called {unknown[0]!r}; there are {', '.join(CONTROLS)}")
    if settings.evict not in EVICTIONS:
        policies = ", ".join(EVICTIONS)
        raise ReplayError(f"no eviction is called {settings.evict!r}; there are {policies}")
    leads_ms, slots = settings.leads_ms, settings.staging_blocks
    held = {"resident": settings.blocks, "none": slots}
    found = [
        Plan(name, True, "none", leads_ms[0], held[name]) for name in CONTROLS if name in controls
    ]
    for name in predictors:
        registry.predictor_class(name)
        shown = Path(name).stem if name.endswith(".py") else name
        found += [Plan(shown, False, name, lead, slots) for lead in leads_ms]
    keys = [(plan.name, plan.lead_ms, plan.control) for plan in found]
    if len(set(keys)) < len(keys):
        raise ReplayError("a predictor or lead is named twice")
    return found


def replay_restore(
    directory: Path,
    requests: Requests,
    settings: RestoreSettings,
    lines: Sequence[Plan],
    *,
    device: str = "uring",
    idle_s: float = 0.5,
    report: Report | None = None,
    runner: Runner | None = None,
) -> RestoreResult:
    """Run everything and say how it went. `requests` are at the replay's speed already; `runner`:
    what they are replayed on, if not a runtime in this process.

    Raises ReplayError, StoreError, WrongBytes ...
    """
    report = report or Report()
    logs: dict[Plan, list[list[RestoreLog]]] = {plan: [] for plan in lines}
    emulation = emulation_of(settings, device)
    if runner is None:
        runner = Alone(directory, requests, settings, emulation or device, Seen("host"))
    for number in range(settings.rounds):
        for plan in lines if number % 2 == 0 else reversed(lines):
            report.say(f"round {number + 1}: {plan.name}, {plan.lead_ms:g} ms ahead")
            time.sleep(idle_s)
            logs[plan].append(runner.run(plan, report.steps))
    flat = {plan: [log for one in rounds for log in one] for plan, rounds in logs.items()}
    return RestoreResult(
        device=runner.seen.described(),
        settings=settings,
        runs=[_figures(plan.name, plan, flat[plan], requests, settings) for plan in lines],
        clients=[run for plan in lines for run in _each(plan, logs[plan], requests, settings)],
        notes=[*_notes(lines, flat), *runner.notes, *(emulation.notes() if emulation else ())],
    )


def emulation_of(settings: RestoreSettings, device: str) -> Emulation | None:
    """The device held back to the limit, where there is one, once it is told to."""
    if not settings.limit_blocks_s:
        return None
    bytes_s = settings.limit_blocks_s * settings.speed * settings.block_bytes
    return Emulation(limit_profile(bytes_s), inner=device, held=False, writes=False)


def _figures(
    name: str,
    plan: Plan,
    logs: Sequence[RestoreLog],
    requests: Requests,
    settings: RestoreSettings,
) -> RestoreFigures:
    return run_figures(
        name,
        control=plan.control,
        evict=settings.evict,
        lead_ms=plan.lead_ms,
        rounds=logs,
        blocks_needed=len(requests.blocks),
        page_bytes=settings.block_bytes,
    )


def _each(
    plan: Plan,
    rounds: Sequence[Sequence[RestoreLog]],
    requests: Requests,
    settings: RestoreSettings,
) -> list[RestoreFigures]:
    """What each client saw, if they are several, without the counters of all."""
    if len(rounds[0]) == 1:
        return []
    found = []
    for number in range(len(rounds[0])):
        logs = [replace(one[number], after=None) for one in rounds]
        found.append(_figures(f"{plan.name} client {number}", plan, logs, requests, settings))
    return found


def _notes(lines: Sequence[Plan], logs: dict[Plan, list[RestoreLog]]) -> list[str]:
    notes = []
    for plan in lines:
        late = np.concatenate([log.lateness_ns for log in logs[plan]])
        p99 = metrics.percentile(late / 1e6, 0.99)
        if p99 is not None and p99 > 20:
            notes.append(
                f"CLIENT-BOUND: {plan.name} at {plan.lead_ms:g} ms: the replay itself started one"
                f" request in a hundred {p99:.0f} ms late or more; use a lower --speed"
            )
        unstored = sum(log.unstored for log in logs[plan])
        needed = unstored + sum(int(log.outcomes.sum()) for log in logs[plan])
        if unstored > _UNSTORED_MAX * needed:
            notes.append(
                f"BEHIND: {plan.name} at {plan.lead_ms:g} ms: {unstored / needed:.0%} of the blocks"
                " to restore had not been put yet when they were needed; use a lower --speed, or"
                " larger blocks (--group-blocks)"
            )
    return notes


class Runner(Protocol):
    """What requests are replayed on."""

    seen: Seen
    notes: list[str]

    def run(self, plan: Plan, progress: Callable[[int], None]) -> list[RestoreLog]:
        """What was seen, by each client there was."""


def options_of(plan: Plan, settings: RestoreSettings, device: str | Emulation) -> Options:
    """How the runtime of a run is opened, here or in a daemon."""
    return Options(
        staging_bytes=plan.staging_blocks * settings.block_bytes,
        device=device,
        predictor=plan.predictor,
        evict=settings.evict,
        depth=settings.depth,
        write_buffers=_WRITE_BUFFERS,
        demand_timeout_s=_TIMEOUT_S,
        core=_ALL_KEPT if plan.name == "resident" and plan.control else CoreLimits(),
    )


def pace_of(plan: Plan, settings: RestoreSettings) -> Pace:
    return Pace(
        lead_ns=int(plan.lead_ms * 1e6 / settings.speed),
        block_ns=int(1e9 / settings.consume_blocks_s / settings.speed),
        hints=settings.hints,
    )


@contextmanager
def new_store(directory: Path, settings: RestoreSettings, blocks: int) -> Iterator[Path]:
    """An empty one, which lasts as long as the context."""
    folder, layout = directory / _RUN_FOLDER, layout_of(settings)
    shutil.rmtree(folder, ignore_errors=True)
    store_making.create(folder, layout, blocks, fill=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def layout_of(settings: RestoreSettings) -> Layout:
    return uniform(1, settings.block_bytes, name="restore")


def names_of(requests: Requests, seed: int) -> NDArray[np.uint8]:
    """The key of every block."""
    joined = b"".join(block_names(requests.distinct, seed))
    return np.frombuffer(joined, np.uint8).reshape(-1, 16)


@dataclass(slots=True)
class Alone:
    """A runtime in this process."""

    directory: Path
    requests: Requests
    settings: RestoreSettings
    device: str | Emulation
    seen: Seen
    notes: list[str] = field(default_factory=list)
    names: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.names = names_of(self.requests, self.settings.seed)

    def run(self, plan: Plan, progress: Callable[[int], None]) -> list[RestoreLog]:
        settings, requests = self.settings, self.requests
        pace = pace_of(plan, settings)
        options = options_of(plan, settings, self.device)
        with (
            new_store(self.directory, settings, requests.distinct) as folder,
            open_runtime(folder, layout_of(settings), options=options) as runtime,
        ):
            if isinstance(self.device, Emulation):
                self.device.hold()  # from here on: opening is not what is measured
            before = mark(runtime)
            log = RestoreRun(runtime, requests, self.names, pace, settings.seed, progress).run()
            self.seen.note(runtime, before)
        return [log]
