"""One cell of a scorecard: a simulation, watched, and its figures in the words of both regimes.

Decides how the figures of a decode and of a restore become one row, and how an error names its
cell. Traces are kept, for cells that follow in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import numpy as np

from prefetchd import metrics
from prefetchd.bench import decode_options
from prefetchd.bench.figures import run_figures
from prefetchd.bench.restore import RestoreLog
from prefetchd.bench.restore_options import read_trace
from prefetchd.bench.restore_replay import Plan as RestorePlan
from prefetchd.bench.restore_result import RestoreSettings
from prefetchd.bench.restore_result import run_figures as restore_figures
from prefetchd.bench.runs import ReplayError, Report, checked_slots, plans
from prefetchd.core import Core
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.guarded import PredictorError
from prefetchd.lab import simulate_decode, simulate_restore
from prefetchd.lab.bound_figures import due
from prefetchd.lab.decision_clock import DecisionClock
from prefetchd.lab.requests import Requests
from prefetchd.lab.score_grid import Grid
from prefetchd.lab.score_oracle import DueOracle
from prefetchd.lab.score_result import Bounds, Cell, Cost, Place, Row
from prefetchd.lab.simulate_decode import SimulateSettings
from prefetchd.lab.trace_format import TraceError
from prefetchd.lab.watch import Watch
from prefetchd.lab.workload import Workload
from prefetchd.model import Geometry
from prefetchd.registry import RegistryError, plugin_fault
from prefetchd.units import parse_bytes, parse_share

_STAGING_MIN = 64  # blocks


class ScoreError(ReplayError):
    """A cell cannot be simulated: which, why, and what to do."""


def named(place: Place) -> str:
    """A place in words, for errors and headings."""
    return f"{place.trace}, staging {place.staging}, {place.condition}"


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Errors in words, here and not by whoever asked: what a plug-in's frames tell ends at the
    border of a process."""
    try:
        yield
    except (ReplayError, TraceError, RegistryError, ValueError, PredictorError) as error:
        raise ScoreError(f"{what}: {plugin_fault(error) or error}") from error
    except Exception as error:
        if fault := plugin_fault(error):
            raise ScoreError(f"{what}: {fault}") from error
        error.add_note(f"while simulating {what}")
        raise


def run_cell(cell: Cell, grid: Grid, profile: DriveProfile) -> Row:
    """Simulate one cell. Raises ScoreError."""
    run = _decode if cell.place.regime == "decode" else _restore
    with _naming(f"{cell.name} ({cell.evict}) on {named(cell.place)}"):
        return run(cell, grid, profile)


def run_bounds(place: Place, grid: Grid, profile: DriveProfile) -> Bounds:
    """What nothing can beat there. Raises ScoreError."""
    with _naming(named(place)):
        if place.regime == "decode":
            workload = _workload(grid, place.trace)
            settings = _decode_settings(place, grid, workload)
            slots = settings.staging_slots
            bounds = simulate_decode.bounds(workload, settings, profile)
        else:
            requests = _requests(grid, place.trace)
            restore = _restore_settings(place, grid, requests, "lru")
            slots, drive = restore.staging_blocks, _drive(restore, profile)
            bounds = simulate_restore.bounds(requests, restore, drive)
    return Bounds(place=place, staging_slots=slots, bounds=bounds)


# --- decode ---


@lru_cache(maxsize=4)
def _workload(grid: Grid, trace: str) -> Workload:
    return decode_options.recorded(
        grid.trace_path(trace),
        top_k=grid.top_k,
        steps=grid.steps,
        warmup=grid.warmup_steps,
        requests=1,
        shared="0%",
    )


def _decode_settings(
    place: Place, grid: Grid, workload: Workload, cell: Cell | None = None
) -> SimulateSettings:
    staging = place.staging
    if staging.isdecimal():
        slots = checked_slots(workload, int(staging))
    else:
        slots = decode_options.slots(workload, staging, grid.page_bytes)
    names = (grid.found(cell.predictor),) if cell else ()
    is_control = cell is not None and cell.kind == "control"
    return SimulateSettings(
        page_bytes=grid.page_bytes,
        staging_slots=slots,
        layer_us=place.lead_ms * 1e3,
        hints=place.hints,
        top_k=grid.top_k,
        predictors=() if is_control else names,
        controls=names if is_control else (),
        evict=cell.evict if cell else "lru",
        depth=grid.depth,
        warmup_steps=grid.warmup_steps,
        seed=grid.seed,
    )


def _decode(cell: Cell, grid: Grid, profile: DriveProfile) -> Row:
    workload = _workload(grid, cell.place.trace)
    settings = _decode_settings(cell.place, grid, workload, cell)
    (plan,) = plans(workload, settings)
    core = simulate_decode.plan_core(workload, plan)
    watch, clock = Watch(workload.geometry, plan.slots), DecisionClock(core)
    drive = DriveModel(profile, grid.seed)
    steps = iter(range(1, workload.steps + 1))

    def stepped(count: int) -> None:
        if next(steps) == grid.warmup_steps:
            watch.counts[:] = 0

    report = Report(steps=stepped)
    log = simulate_decode.run_plan(workload, settings, plan, drive, report, watch, core)
    run = run_figures(
        plan.name,
        control=plan.control,
        evict=cell.evict,
        rounds=[log],
        page_bytes=grid.page_bytes,
        seed=grid.seed,
    )
    return Row(
        cell=cell,
        hit_rate=run.hit_rate,
        late_rate=run.late_rate,
        miss_rate=run.miss_rate,
        stalled_share=run.stalled_share,
        time_ms=run.tpot_ms,
        prefetch=run.prefetch,
        timeliness=watch.counts.tolist(),
        device_bytes=run.device_bytes,
        cost=_cost(clock),
    )


def _cost(clock: DecisionClock) -> Cost:
    return Cost(
        us_per_page=metrics.ratio(clock.spent_ns / 1e3, clock.pages),
        us_per_demand=metrics.ratio(clock.spent_ns / 1e3, clock.demands),
    )


# --- restore ---


@lru_cache(maxsize=4)
def _requests(grid: Grid, trace: str) -> Requests:
    return read_trace(grid.trace_path(trace), grid.requests)


def _restore_settings(place: Place, grid: Grid, requests: Requests, evict: str) -> RestoreSettings:
    return RestoreSettings(
        trace=requests.name,
        trace_how=requests.how,
        requests=len(requests),
        blocks=requests.distinct,
        block_bytes=grid.block_bytes,
        group_blocks=1,
        staging_blocks=_staging_blocks(place.staging, grid, requests),
        leads_ms=[place.lead_ms],
        hints=place.hints,
        limit_blocks_s=grid.limit_blocks_s,
        consume_blocks_s=grid.consume_blocks_s,
        speed=1.0,
        evict=evict,
        depth=grid.depth,
        rounds=1,
        seed=grid.seed,
    )


def _staging_blocks(staging: str, grid: Grid, requests: Requests) -> int:
    share = parse_share(staging)
    if share is not None:
        blocks = int(share * requests.distinct)
    elif staging.isdecimal():
        blocks = int(staging)
    else:
        blocks = parse_bytes(staging) // grid.block_bytes
    if blocks < min(_STAGING_MIN, requests.distinct):
        raise ReplayError(f"staging of {blocks} blocks is too small; give it {_STAGING_MIN}")
    return min(blocks, requests.distinct)


def _drive(settings: RestoreSettings, profile: DriveProfile) -> DriveProfile:
    return simulate_restore.limited(settings) if settings.limit_blocks_s else profile


def _restore(cell: Cell, grid: Grid, profile: DriveProfile) -> Row:
    requests = _requests(grid, cell.place.trace)
    settings = _restore_settings(cell.place, grid, requests, cell.evict)
    drive = _drive(settings, profile)
    plan = _restore_plan(cell, grid, settings, requests)
    seen: list[tuple[Watch, DecisionClock]] = []

    def look(core: Core) -> Callable[..., None]:
        watch = Watch(Geometry(1, requests.distinct), plan.staging_blocks)
        seen.append((watch, DecisionClock(core)))
        return watch

    model = DriveModel(drive, grid.seed)
    log = simulate_restore.run_plan(requests, settings, plan, model, seen=look)
    run = restore_figures(
        cell.name,
        control=plan.control,
        evict=cell.evict,
        lead_ms=plan.lead_ms,
        rounds=[log],
        blocks_needed=len(requests.blocks),
        page_bytes=settings.block_bytes,
    )
    ((watch, clock),) = seen
    late = metrics.ratio(run.outcomes.late, run.outcomes.total + run.unstored)
    hit = run.staged_share
    waits_ms = _waits_ms(log)
    return Row(
        cell=cell,
        hit_rate=hit,
        late_rate=late,
        miss_rate=None if hit is None or late is None else max(0.0, 1 - hit - late),
        stalled_share=float(np.mean(waits_ms > 0)) if len(waits_ms) else None,
        time_ms=float(np.mean(waits_ms)) if len(waits_ms) else 0.0,
        prefetch=run.prefetch,
        timeliness=watch.counts.tolist(),
        device_bytes=run.device_bytes,
        cost=_cost(clock),
    )


def _restore_plan(
    cell: Cell, grid: Grid, settings: RestoreSettings, requests: Requests
) -> RestorePlan:
    control = cell.kind == "control"
    lead_ms = cell.place.lead_ms
    plan = partial(RestorePlan, cell.name, control, lead_ms=lead_ms)
    if not control:
        return plan(predictor=grid.found(cell.predictor), staging_blocks=settings.staging_blocks)
    if cell.name == "resident":
        return plan(predictor="none", staging_blocks=settings.blocks)
    if cell.name == "none":
        return plan(predictor="none", staging_blocks=settings.staging_blocks)
    pages, due_ns = due(requests, int(1e9 / settings.consume_blocks_s))
    # A run begins with the first announcement, a lead before the first arrival.
    oracle = partial(DueOracle, pages=pages, due_ns=due_ns + int(lead_ms * 1e6))
    return plan(predictor=oracle, staging_blocks=settings.staging_blocks)


def _waits_ms(log: RestoreLog) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.concatenate([np.empty(0), *log.waits_ns]) / 1e6
