"""`prefetchd replay decode`: controls and predictors over one recorded decode, interleaved.

Decides how a store is prepared, in which order runs are made on it, and what stands behind their
figures. Which runs there are is `bench.runs`', one run `bench.decode`'s; words, tables and plots
are `bench.tables`' and `bench.report`'s. What the runs share can be had from here too.

Rounds are interleaved and every run is preceded by the same idle gap, since shared disks burst
after idling: only figures of one replay may be compared, by medians and ratios.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefetchd import metrics, store_making, store_opening
from prefetchd.bench.content import block_names, block_pages
from prefetchd.bench.decode import run_decode
from prefetchd.bench.decode_loop import Log, Pace
from prefetchd.bench.figures import client_bound, run_figures
from prefetchd.bench.runs import (
    CONTROLS,
    DecodeSettings,
    Plan,
    ReplayError,
    Report,
    checked_slots,
    plans,
    staging_slots,
    told_settings,
    trace_notes,
)
from prefetchd.bench.seen import Seen, mark
from prefetchd.bench.served import Serving
from prefetchd.lab.workload import Workload
from prefetchd.layout import Layout, uniform
from prefetchd.model import Geometry
from prefetchd.opening import open_runtime
from prefetchd.options import DeviceFactory, GpuFactory, Options
from prefetchd.runtime import Runtime

__all__ = [
    "CONTROLS",
    "ReplayError",
    "ReplaySettings",
    "Report",
    "checked_slots",
    "prepare_store",
    "replay_decode",
    "staging_slots",
]

_PRELOAD_PAGES = 1024
_WRITING_SLOTS = 16  # of staging, while the store is written and nothing is read


@dataclass(frozen=True, slots=True)
class ReplaySettings(DecodeSettings):
    """A decode in real time. `tend`: see `Pace`; `idle_s`: the gap before every run."""

    tend: bool = True
    device: str | DeviceFactory = "uring"
    gpu: str | GpuFactory = "host"
    idle_s: float = 0.5


def prepare_store(
    directory: Path, workload: Workload, settings: ReplaySettings, report: Report
) -> None:
    """Create the store unless it is there, and put whatever blocks it lacks."""
    layout = layout_of(workload, settings)
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
        if failed := fill(runtime, workload.geometry, settings.seed, report):
            raise ReplayError(
                f"the store in {directory} could not be written: {failed}; if it was made for "
                "another trace, seed or number of requests, name a new folder"
            )


def fill(runtime: Serving, geometry: Geometry, seed: int, report: Report) -> str:
    """Put the blocks of a replay, unless all are there; why one could not be, or nothing."""
    names = block_names(geometry.blocks, seed)
    if len(runtime.lookup(names)) == len(names):
        return ""
    report.say("writing the store")
    pending = []
    shape = (geometry.blocks, geometry.layers, runtime.page_bytes)
    for first, pages in block_pages(*shape, seed):
        pending.append(runtime.put(names[first : first + len(pages)], pages))
        report.steps(len(pages))
    failed = [words for ticket in pending for words in ticket.wait().failures]
    return failed[0] if failed else ""


def _slot_bytes(directory: Path, layout: Layout) -> int:
    """Bytes of a page with its padding: the store's alignment decides, not this process."""
    opened = store_opening.open_store(directory, layout)
    slot_bytes = opened.superblock.slot_bytes
    opened.release()
    return slot_bytes


def layout_of(workload: Workload, settings: ReplaySettings) -> Layout:
    return uniform(workload.geometry.layers, settings.page_bytes, name="replay")


def replay_decode(
    directory: Path, workload: Workload, settings: ReplaySettings, report: Report | None = None
) -> metrics.Result:
    """Run everything and say how it went. Raises ReplayError, StoreError, WrongBytes ..."""
    report = report or Report()
    planned = plans(workload, settings)
    logs: dict[str, list[Log]] = {plan.name: [] for plan in planned}
    seen = Seen(settings.gpu if isinstance(settings.gpu, str) else settings.gpu.__name__)
    for number in range(settings.rounds):
        # Every other round runs backwards, so that no run is always first after the pause.
        for plan in planned if number % 2 == 0 else reversed(planned):
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
        for plan in planned
    ]
    said = [client_bound(name, rounds) for name, rounds in logs.items()]
    return metrics.Result(
        device=seen.described(),
        settings=told_settings(
            workload, settings, {"idle_s": settings.idle_s, "tend": settings.tend}
        ),
        runs=metrics.relate(runs),
        notes=[*trace_notes(workload, hints=settings.hints), *(words for words in said if words)],
    )


def _one(
    directory: Path,
    workload: Workload,
    settings: ReplaySettings,
    plan: Plan,
    seen: Seen,
    report: Report,
) -> Log:
    layout, options = layout_of(workload, settings), options_of(directory, workload, settings, plan)
    pace = pace_of(settings)
    # Whatever happens in a run, the next one finds the store as this one did.
    with open_runtime(directory, layout, options=options, read_only=True) as runtime:
        _check_blocks(runtime, workload, settings.seed)
        if plan.name == "resident":
            preload(runtime, workload.geometry.pages)
        before = mark(runtime)
        log = run_decode(runtime, workload, pace, report.steps)
        seen.note(runtime, before)
    return log


def options_of(
    directory: Path, workload: Workload, settings: ReplaySettings, plan: Plan
) -> Options:
    """How the runtime of a run is opened, here or in a daemon."""
    return Options(
        staging_bytes=plan.slots * _slot_bytes(directory, layout_of(workload, settings)),
        device=settings.device,
        gpu=settings.gpu,
        predictor=plan.predictor,
        evict=plan.evict,
        depth=settings.depth,
        demand_timeout_s=settings.demand_timeout_s,
        core=plan.core,
    )


def pace_of(settings: ReplaySettings) -> Pace:
    layer_ns = int(settings.layer_us * 1000)
    return Pace(layer_ns, settings.hints, settings.warmup_steps, settings.tend)


def _check_blocks(runtime: Runtime, workload: Workload, seed: int) -> None:
    found = runtime.lookup(block_names(workload.geometry.blocks, seed))
    if len(found) < workload.geometry.blocks or (found != np.arange(len(found))).any():
        raise ReplayError("the store does not hold this trace's blocks; use a new folder")


def preload(runtime: Serving, count: int) -> None:
    pages = np.arange(count, dtype=np.int64)
    for first in range(0, count, _PRELOAD_PAGES):
        with runtime.demand(pages[first : first + _PRELOAD_PAGES]) as ticket:
            if ticket.missing.any():
                raise ReplayError("the store could not be read whole for the resident control")
