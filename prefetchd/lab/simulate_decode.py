"""`prefetchd simulate decode`: a replay's controls and predictors, under a virtual clock.

Decides what a simulation's result says of its device. Runs, loop, figures and words are the
replay's own (`prefetchd.bench`); the core is the one that runs live. Nothing here reads a clock:
the same call gives the same result, in any process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from prefetchd import metrics
from prefetchd.assembly import Options, build_core
from prefetchd.bench.decode_loop import Log, Pace, follow
from prefetchd.bench.figures import run_figures
from prefetchd.bench.runs import DecodeSettings, Plan, Report, plans, told_settings
from prefetchd.core import Core
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.belady import belady_misses
from prefetchd.lab.decode_stage import VirtualStage
from prefetchd.lab.dpu import NO_DPU, Dpu
from prefetchd.lab.virtual import Record
from prefetchd.lab.workload import Workload
from prefetchd.model import Ids

SCHEMA: Literal["prefetchd.simulate.decode/1"] = "prefetchd.simulate.decode/1"
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SimulateSettings(DecodeSettings):
    """A decode under a virtual clock. Round r draws the drive's slow reads from `seed` + r."""

    rounds: int = 1
    dpu: Dpu = NO_DPU


def padded(page_bytes: int) -> int:
    """Bytes of a page in a store, as of most devices."""
    return -(-page_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def simulate_decode(
    workload: Workload,
    settings: SimulateSettings,
    profile: DriveProfile,
    report: Report | None = None,
) -> metrics.Result:
    """Run everything and say how it went. Raises ReplayError, RegistryError, PredictorError."""
    report = report or Report()
    runs: list[metrics.Run] = []
    for plan in plans(workload, settings):
        rounds: list[Log] = []
        for number in range(settings.rounds):
            report.say(f"round {number + 1}: {plan.name}")
            drive = DriveModel(profile, settings.seed + number)
            rounds.append(run_plan(workload, settings, plan, drive, report))
        runs.append(
            run_figures(
                plan.name,
                control=plan.control,
                evict=plan.evict,
                rounds=rounds,
                page_bytes=settings.page_bytes,
                seed=settings.seed,
            )
        )
    return metrics.Result(
        schema=SCHEMA,
        device=_described(profile, settings.dpu),
        settings=told_settings(workload, settings, _more(settings.dpu)),
        runs=metrics.relate(runs),
        bounds=_bounds(workload, settings),
    )


def plan_core(workload: Workload, plan: Plan) -> Core:
    """The core of one run, as a runtime would build it."""
    options = Options(predictor=plan.predictor, evict=plan.evict, core=plan.core)
    return build_core(workload.geometry, plan.slots, options)[0]


def run_plan(
    workload: Workload,
    settings: SimulateSettings,
    plan: Plan,
    drive: DriveModel,
    report: Report | None = None,
    record: Record | None = None,
) -> Log:
    """One run on a drive that has done nothing yet; `record` sees events and commands."""
    stage = VirtualStage(
        plan_core(workload, plan),
        drive,
        settings.dpu,
        slot_bytes=padded(settings.page_bytes),
        depth=settings.depth,
        timeout_ns=int(settings.demand_timeout_s * 1e9),
        record=record,
    )
    if plan.name == "resident":
        stage.preload(workload.geometry.pages)
    pace = Pace(int(settings.layer_us * 1000), settings.hints, settings.warmup_steps)
    return follow(stage, workload, pace, report.steps if report else None)


def _described(profile: DriveProfile, dpu: Dpu) -> metrics.Device:
    link = f"at {dpu.link_gb_s:g} GB/s" if dpu.link_gb_s else "in no time"
    reads = f"reads {profile.read_us:g} us alone, {profile.read_gb_s:.3g} GB/s at depth"
    return metrics.Device(
        name=profile.name,
        engine=f"drive model under a virtual clock, {reads}",
        file_system="none",
        kind="SIMULATED",
        gpu=metrics.Gpu(name="modelled", engine=link),
    )


def _more(dpu: Dpu) -> dict[str, str | int | float | bool]:
    return {
        "dpu": dpu.name,
        "decision_us": dpu.decision_us,
        "cores": dpu.cores,
        "link_gb_s": dpu.link_gb_s,
    }


def _bounds(workload: Workload, settings: SimulateSettings) -> list[metrics.Bound]:
    demands = workload.future()
    first = settings.warmup_steps * workload.geometry.layers
    needed = sum(len(demand) for demand in demands[first:])
    return [_belady(demands, settings.staging_slots, first, needed)]


def _belady(demands: list[Ids], slots: int, first: int, needed: int) -> metrics.Bound:
    misses = belady_misses(demands, slots)[first:]
    missed = metrics.ratio(int(misses.sum()), needed)
    return metrics.Bound(
        name="belady",
        meaning="Belady's optimum: fewest misses of any eviction, without prefetch",
        hit_rate=None if missed is None else 1 - missed,
        late_rate=0.0,
        miss_rate=missed,
        stalled_share=float(np.mean(misses > 0)),
        reads_per_needed=missed,
    )
