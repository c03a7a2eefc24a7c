"""`prefetchd simulate decode`: a replay's controls and predictors, under a virtual clock.

Decides how a run is put together: core, modelled drive, stage. Runs, loop, figures and words are
the replay's own (`prefetchd.bench`); the core is the one that runs live. Nothing here reads a
clock: the same call gives the same result, in any process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefetchd import metrics
from prefetchd.assembly import build_core
from prefetchd.bench.decode_loop import Log, Pace, follow
from prefetchd.bench.figures import run_figures
from prefetchd.bench.runs import (
    DecodeSettings,
    Plan,
    Report,
    plans,
    told_settings,
    trace_notes,
)
from prefetchd.core import Core
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.bound_figures import decode_bounds, read_spacing_ns
from prefetchd.lab.decode_stage import VirtualStage
from prefetchd.lab.dpu import NO_DPU, Dpu
from prefetchd.lab.modelled import described, told_dpu
from prefetchd.lab.virtual import Record
from prefetchd.lab.workload import Workload
from prefetchd.options import Options
from prefetchd.resting import collector_rests

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
        device=described(profile, settings.dpu),
        settings=told_settings(workload, settings, told_dpu(settings.dpu)),
        runs=metrics.relate(runs),
        bounds=bounds(workload, settings, profile),
        notes=trace_notes(workload, hints=settings.hints),
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
    core: Core | None = None,
) -> Log:
    """One run on a drive that has done nothing yet; `record` sees events and commands. `core`: a
    new one of `plan_core`'s that somebody looks into."""
    stage = VirtualStage(
        core or plan_core(workload, plan),
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
    with collector_rests():
        return follow(stage, workload, pace, report.steps if report else None)


def bounds(
    workload: Workload, settings: SimulateSettings, profile: DriveProfile
) -> list[metrics.Bound]:
    """What nothing can beat on that drive."""
    return decode_bounds(
        workload,
        slots=settings.staging_slots,
        warmup_steps=settings.warmup_steps,
        layer_us=settings.layer_us,
        page_ns=read_spacing_ns(profile, padded(settings.page_bytes)),
    )
