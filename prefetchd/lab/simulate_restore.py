"""`prefetchd simulate restore`: a replay's controls and predictors, under a virtual clock.

Decides which runs are made on which staging, and what the result says of the device. Life of a
request and figures are the replay's own; the core is the one that runs live. Nothing here reads a
clock: the same call gives the same result, in any process.

Staging holds nothing at first. `resident` has room for all blocks, so it reads only what was put
while too much was being written. Held to a rate, reads are served one after another and writes
take no time, as by a replay's `limited` device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd import metrics
from prefetchd.assembly import build_core
from prefetchd.bench.restore import Pace, RestoreLog
from prefetchd.bench.restore_replay import Plan
from prefetchd.bench.restore_result import SIMULATED, RestoreResult, RestoreSettings, run_figures
from prefetchd.bench.runs import Report
from prefetchd.core import Core, CoreLimits
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.bound_figures import read_spacing_ns, restore_bounds
from prefetchd.lab.dpu import NO_DPU, Dpu
from prefetchd.lab.modelled import AT_DEPTH, IN_TURN, described, told_dpu
from prefetchd.lab.requests import Requests
from prefetchd.lab.restore_run import TIMEOUT_NS, SimulatedRestore
from prefetchd.lab.virtual import Record, VirtualEngine
from prefetchd.model import Geometry, Mask
from prefetchd.options import Options
from prefetchd.resting import collector_rests

_LIMITS = CoreLimits(read_timeout_ns=TIMEOUT_NS)
_NO_TIME_GB_S = 1e5


@dataclass(frozen=True, slots=True)
class Counted:
    """What a run moved; see `bench.restore.Moved`."""

    prefetch: dict[str, int]
    pages_read: int
    bytes_read: int
    bytes_written: int
    achieved_depth: float
    failures: dict[str, int]
    decision_ns: NDArray[np.int64]


def simulate_restore(
    requests: Requests,
    settings: RestoreSettings,
    lines: Sequence[Plan],
    profile: DriveProfile,
    dpu: Dpu = NO_DPU,
    report: Report | None = None,
    take_blocks: int = 1,
) -> RestoreResult:
    """Run everything and say how it went. Round r draws the drive's slow reads from `seed` + r;
    with `limit_blocks_s` the profile counts for nothing. `settings.speed` must be 1. `take_blocks`:
    how many a request asks for at a time, at its rate all the same.

    Raises RegistryError, PredictorError.
    """
    report = report or Report()
    drive = limited(settings) if settings.limit_blocks_s else profile
    runs = []
    for plan in lines:
        rounds = []
        for number in range(settings.rounds):
            report.say(f"{plan.name}, {plan.lead_ms:g} ms ahead")
            model = DriveModel(drive, settings.seed + number)
            rounds.append(run_plan(requests, settings, plan, model, dpu, report.steps, take_blocks))
        runs.append(
            run_figures(
                plan.name,
                control=plan.control,
                evict=settings.evict,
                lead_ms=plan.lead_ms,
                rounds=rounds,
                blocks_needed=len(requests.blocks),
                page_bytes=settings.block_bytes,
            )
        )
    return RestoreResult(
        schema=SIMULATED,
        device=described(drive, dpu, IN_TURN if settings.limit_blocks_s else AT_DEPTH),
        settings=msgspec.structs.replace(
            settings, more={"take_blocks": take_blocks, **told_dpu(dpu)}
        ),
        runs=runs,
        bounds=bounds(requests, settings, drive),
    )


def limited(settings: RestoreSettings) -> DriveProfile:
    """A device that serves so many blocks a second, one after another, and writes in no time."""
    rate = settings.limit_blocks_s
    return DriveProfile(
        name=f"{rate:g}-blocks-per-s",
        read_gb_s=rate * settings.block_bytes / 1e9,
        write_gb_s=_NO_TIME_GB_S,
        read_us=0,
        units=1,
    )


def run_plan(
    requests: Requests,
    settings: RestoreSettings,
    plan: Plan,
    drive: DriveModel,
    dpu: Dpu = NO_DPU,
    progress: Callable[[int], None] = lambda count: None,
    take_blocks: int = 1,
    seen: Callable[[Core], Record | None] = lambda core: None,
) -> RestoreLog:
    """One run on a drive that has done nothing yet. `seen` is shown the core before it begins, and
    returns who is to see events and commands, if anybody."""
    geometry = Geometry(1, requests.distinct)
    visible: Mask = np.zeros(requests.distinct, np.bool_)
    limits = _LIMITS
    if plan.control and plan.name == "resident":  # what is put need not wait for room either
        limits = replace(limits, filled_share_max=1.0)
    options = Options(predictor=plan.predictor, evict=settings.evict, core=limits)
    core, _ = build_core(geometry, plan.staging_blocks, options, lambda pages: visible[pages])
    pace = Pace(
        lead_ns=int(plan.lead_ms * 1e6),
        block_ns=int(1e9 / settings.consume_blocks_s),
        hints=settings.hints,
    )
    run = SimulatedRestore(
        requests,
        core,
        drive,
        visible,
        pace,
        block_bytes=settings.block_bytes,
        depth=settings.depth,
        take_blocks=take_blocks,
        dpu=dpu,
        progress=progress,
        record=seen(core),
    )
    with collector_rests():
        log = run.run()
    log.after = _counted(core, run.engine)
    return log


def _counted(core: Core, engine: VirtualEngine) -> Counted:
    counters = core.counters
    return Counted(
        prefetch=counters.prefetches(),
        pages_read=counters.demand_reads + counters.prefetch_reads,
        bytes_read=engine.bytes_read,
        bytes_written=engine.bytes_written,
        achieved_depth=engine.depth.mean,
        failures={},
        decision_ns=np.empty(0, np.int64),
    )


def bounds(
    requests: Requests, settings: RestoreSettings, drive: DriveProfile
) -> list[metrics.Bound]:
    """What nothing can beat on that drive."""
    return restore_bounds(
        requests,
        slots=settings.staging_blocks,
        block_ns=int(1e9 / settings.consume_blocks_s),
        page_ns=read_spacing_ns(drive, settings.block_bytes),
    )
