"""`prefetchd replay decode`: controls and predictors over one recorded decode, interleaved.

Decides which runs are made, on what staging, in which order, and what their figures are. One run
is `bench.decode`'s; words, tables and plots are `bench.tables`' and `bench.report`'s.

Rounds are interleaved and every run is preceded by the same idle gap, since shared disks burst
after idling: only figures of one replay may be compared, by medians and ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from prefetchd import metrics, registry, store_making, store_opening
from prefetchd.assembly import DeviceFactory, GpuFactory, Options, PredictorFactory
from prefetchd.bench.content import block_names, block_pages
from prefetchd.bench.decode import Log, Pace, run_decode
from prefetchd.bench.figures import client_bound, run_figures
from prefetchd.bench.seen import Seen, mark
from prefetchd.core import CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.lab.workload import Workload
from prefetchd.layout import Layout, uniform
from prefetchd.opening import open_runtime
from prefetchd.predictors.oracle import Oracle
from prefetchd.runtime import Runtime

CONTROLS = ("resident", "none", "cold", "oracle")
_PRELOAD_PAGES = 1024
_WRITING_SLOTS = 16  # of staging, while the store is written and nothing is read


class ReplayError(Exception):
    """A replay cannot be run as asked: why, and what to do."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is replayed and how. `staging_slots` is for all runs but `resident` and `cold`."""

    page_bytes: int = 65536
    staging_slots: int = 0
    layer_us: float = 600.0
    hints: bool = True
    tend: bool = True
    top_k: int = 16
    predictors: tuple[str, ...] = ("auto",)
    controls: tuple[str, ...] = CONTROLS
    evict: str = "cycle"
    device: str | DeviceFactory = "uring"
    gpu: str | GpuFactory = "host"
    depth: int = 128
    rounds: int = 3
    warmup_steps: int = 16
    idle_s: float = 0.5
    seed: int = 1
    demand_timeout_s: float = 10.0
    core: CoreLimits = field(default_factory=CoreLimits)


@dataclass(slots=True)
class Report:
    """Progress in words and steps; either may be ignored."""

    say: Callable[[str], None] = lambda _: None
    steps: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Plan:
    """One line of the result: how its runtime is built."""

    name: str
    control: bool
    evict: str
    predictor: str | PredictorFactory
    slots: int


def staging_slots(workload: Workload, share: float) -> int:
    """Slots for a share of all pages. Raises ReplayError if one layer and the next do not fit."""
    slots = int(share * workload.geometry.pages)
    return checked_slots(workload, slots)


def checked_slots(workload: Workload, slots: int) -> int:
    if slots < 2 * workload.widest:
        raise ReplayError(
            f"staging of {slots} pages is too small: one layer needs up to {workload.widest} at "
            f"once, and the layer before it is still held; give it at least {2 * workload.widest}"
        )
    return min(slots, workload.geometry.pages)


def prepare_store(
    directory: Path, workload: Workload, settings: ReplaySettings, report: Report
) -> None:
    """Create the store unless it is there, and put whatever blocks it lacks."""
    layout = _layout(workload, settings)
    names = block_names(workload.geometry.blocks, settings.seed)
    if not store_opening.exists(directory):
        store_making.create(directory, layout, workload.geometry.blocks, fill=False)
    options = Options(
        device=settings.device,
        predictor="none",
        evict="lru",
        staging_bytes=_WRITING_SLOTS * _slot_bytes(directory, layout),
        evict_blocks=False,  # another trace's blocks are not ours to throw away
    )

    def scanning(done: int, whole: int) -> None:
        report.say(f"reading {done} of {whole} headers")

    with open_runtime(directory, layout, options=options, progress=scanning) as runtime:
        if len(runtime.lookup(names)) == len(names):
            return
        report.say("writing the store")
        shape = (workload.geometry.blocks, workload.geometry.layers, settings.page_bytes)
        pending = []
        for first, pages in block_pages(*shape, settings.seed):
            pending.append(runtime.put(names[first : first + len(pages)], pages))
            report.steps(len(pages))
        failed = [words for ticket in pending for words in ticket.wait().failures]
        if failed:
            raise ReplayError(
                f"the store in {directory} could not be written: {failed[0]}; if it was made for "
                "another trace, seed or number of requests, name a new folder"
            )


def _slot_bytes(directory: Path, layout: Layout) -> int:
    """Bytes of a page with its padding: the store's alignment decides, not this process."""
    opened = store_opening.open_store(directory, layout)
    slot_bytes = opened.superblock.slot_bytes
    opened.release()
    return slot_bytes


def _layout(workload: Workload, settings: ReplaySettings) -> Layout:
    return uniform(workload.geometry.layers, settings.page_bytes, name="replay")


def replay_decode(
    directory: Path, workload: Workload, settings: ReplaySettings, report: Report | None = None
) -> metrics.Result:
    """Run everything and say how it went. Raises ReplayError, StoreError, WrongBytes ..."""
    report = report or Report()
    plans = _plans(workload, settings)
    logs: dict[str, list[Log]] = {plan.name: [] for plan in plans}
    seen = Seen(settings.gpu if isinstance(settings.gpu, str) else settings.gpu.__name__)
    for number in range(settings.rounds):
        # Every other round runs backwards, so that no run is always first after the pause.
        for plan in plans if number % 2 == 0 else reversed(plans):
            report.say(f"round {number + 1}: {plan.name}")
            time.sleep(settings.idle_s)
            logs[plan.name].append(_one(directory, workload, settings, plan, seen, report))
    runs = [
        run_figures(
            plan.name,
            control=plan.control,
            evict=plan.evict,
            rounds=logs[plan.name],
            page_bytes=settings.page_bytes,
            seed=settings.seed,
        )
        for plan in plans
    ]
    said = [client_bound(name, rounds) for name, rounds in logs.items()]
    if workload.synthetic:
        said.insert(0, f"SYNTHETIC: the trace was {workload.synthetic}")
    return metrics.Result(
        device=seen.described(),
        settings=_settings(workload, settings),
        runs=metrics.relate(runs),
        notes=[words for words in said if words],
    )


def _plans(workload: Workload, settings: ReplaySettings) -> list[_Plan]:
    pages, slots = workload.geometry.pages, settings.staging_slots
    future = workload.future()
    controls = {
        "resident": _Plan("resident", True, "lru", "none", pages),
        "none": _Plan("none", True, "lru", "none", slots),
        "cold": _Plan("cold", True, "lru", "none", 2 * workload.widest),
        "oracle": _Plan("oracle", True, settings.evict, partial(Oracle, future=future), slots),
    }
    _check_names(settings)
    plans = [controls[name] for name in CONTROLS if name in settings.controls]
    for name in settings.predictors:
        known = {plan.name for plan in plans}
        shown = Path(name).stem if name.endswith(".py") else name
        shown = f"{shown}+{settings.evict}" if shown in settings.controls else shown
        if shown in known:
            raise ReplayError(f"predictor {name} is named twice")
        plans.append(_Plan(shown, False, settings.evict, name, slots))
    return plans


def _check_names(settings: ReplaySettings) -> None:
    """Now, and not after the runs that come first."""
    unknown = [name for name in settings.controls if name not in CONTROLS]
    if unknown:
        raise ReplayError(f"no control is called {unknown[0]!r}; there are {', '.join(CONTROLS)}")
    if settings.evict not in EVICTIONS:
        known = ", ".join(EVICTIONS)
        raise ReplayError(f"no eviction is called {settings.evict!r}; there are {known}")
    for name in settings.predictors:
        registry.predictor_class(name)


def _one(
    directory: Path,
    workload: Workload,
    settings: ReplaySettings,
    plan: _Plan,
    seen: Seen,
    report: Report,
) -> Log:
    layout = _layout(workload, settings)
    options = Options(
        staging_bytes=plan.slots * _slot_bytes(directory, layout),
        device=settings.device,
        gpu=settings.gpu,
        predictor=plan.predictor,
        evict=plan.evict,
        depth=settings.depth,
        demand_timeout_s=settings.demand_timeout_s,
        core=replace(settings.core, retain=plan.name != "cold"),
    )
    layer_ns = int(settings.layer_us * 1000)
    pace = Pace(layer_ns, settings.hints, settings.warmup_steps, settings.tend)
    # Whatever happens in a run, the next one finds the store as this one did.
    with open_runtime(directory, layout, options=options, read_only=True) as runtime:
        _check_blocks(runtime, workload, settings.seed)
        if plan.name == "resident":
            _preload(runtime, workload.geometry.pages)
        before = mark(runtime)
        log = run_decode(runtime, workload, pace, report.steps)
        seen.note(runtime, before)
    return log


def _check_blocks(runtime: Runtime, workload: Workload, seed: int) -> None:
    found = runtime.lookup(block_names(workload.geometry.blocks, seed))
    if len(found) < workload.geometry.blocks or (found != np.arange(len(found))).any():
        raise ReplayError("the store does not hold this trace's blocks; use a new folder")


def _preload(runtime: Runtime, count: int) -> None:
    pages = np.arange(count, dtype=np.int64)
    for first in range(0, count, _PRELOAD_PAGES):
        with runtime.demand(pages[first : first + _PRELOAD_PAGES]) as ticket:
            if ticket.missing.any():
                raise ReplayError("the store could not be read whole for the resident control")


def _settings(workload: Workload, settings: ReplaySettings) -> metrics.Settings:
    geometry = workload.geometry
    return metrics.Settings(
        trace=workload.name,
        steps=workload.steps,
        warmup_steps=settings.warmup_steps,
        rounds=settings.rounds,
        layers=geometry.layers,
        blocks=geometry.blocks,
        page_bytes=settings.page_bytes,
        staging_share=settings.staging_slots / geometry.pages,
        staging_slots=settings.staging_slots,
        top_k=settings.top_k,
        layer_us=settings.layer_us,
        hints=settings.hints,
        evict=settings.evict,
        depth=settings.depth,
        seed=settings.seed,
        more={"idle_s": settings.idle_s, "tend": settings.tend},
    )
