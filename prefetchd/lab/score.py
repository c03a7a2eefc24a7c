"""The scorecard: predictors x evictions x staging sizes x leads x traces, each simulated once.

Decides the cells of a grid, what one of them yields, and how much of the gap between `none` and
`oracle` it closes. Any `concurrent.futures` executor runs the cells; they share nothing but files.
Figures are a simulation's and repeat exactly, but for what deciding costs, which is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from prefetchd import metrics
from prefetchd.bench import decode_options
from prefetchd.bench.figures import run_figures
from prefetchd.bench.runs import plans
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.decision_clock import DecisionClock
from prefetchd.lab.simulate_decode import SimulateSettings, plan_core, run_plan
from prefetchd.lab.watch import EDGES_MS, Watch
from prefetchd.lab.workload import Workload

SCHEMA: Literal["prefetchd.score/1"] = "prefetchd.score/1"
CONTROLS = ("resident", "none", "oracle")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. `lead_ms`: of decode the compute time of a layer, of restore the time from a
    request's announcement to its start. `control`: `predictor` names a control."""

    regime: Literal["decode", "restore"]
    trace: str
    predictor: str
    control: bool
    evict: str
    staging: str
    lead_ms: float
    hints: bool


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What deciding took on this machine: measured, so it differs from run to run."""

    us_per_page: float | None = None
    us_per_demand: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and its figures. `time_ms` is what the gap is measured in: of decode the time of a
    step, of restore the mean wait of a block. `gap_closed`: the part of the way from `none` to
    `oracle` (at the same trace, staging and lead); None where there is no gap. `timeliness`: pages
    by slack, see `prefetchd.lab.watch.EDGES_MS`."""

    cell: Cell
    name: str
    hit_rate: float | None
    late_rate: float | None
    miss_rate: float | None
    stalled_share: float | None
    time_ms: float
    prefetch: metrics.Prefetch
    timeliness: list[int]
    device_bytes: int
    gap_closed: float | None = None
    cost: Cost = Cost()


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared. Traces are paths, "" the embedded one."""

    decode: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    predictors: tuple[str, ...] = ("auto",)
    evicts: tuple[str, ...] = ("cycle",)
    stagings: tuple[str, ...] = ("25%",)
    layer_us: tuple[float, ...] = (600.0,)
    hints: tuple[bool, ...] = (True,)
    steps: int | None = None
    warmup_steps: int = 16
    top_k: int = 16
    page_bytes: int = 65536
    seed: int = 1


class Score(msgspec.Struct, frozen=True, kw_only=True):
    grid: Grid
    device: metrics.Device
    rows: list[Row]
    bounds: dict[str, list[metrics.Bound]] = {}
    edges_ms: tuple[float, ...] = EDGES_MS
    notes: list[str] = []
    schema: Literal["prefetchd.score/1"] = SCHEMA


def cells(grid: Grid) -> list[Cell]:
    """All simulations of a grid, controls first, each once, in the order of its options."""
    found: list[Cell] = []
    evict_of = {"resident": "lru", "none": "lru", "oracle": grid.evicts[0]}
    wanted = [(name, evict_of[name], True) for name in CONTROLS]
    wanted += [(name, evict, False) for name in grid.predictors for evict in grid.evicts]
    places = product(grid.decode, grid.stagings, grid.layer_us, grid.hints)
    for (trace, staging, layer_us, hints), (name, evict, control) in product(places, wanted):
        found.append(
            Cell(
                regime="decode",
                trace=trace,
                predictor=name,
                control=control,
                evict=evict,
                staging=staging,
                lead_ms=layer_us / 1e3,
                hints=hints,
            )
        )
    return list(dict.fromkeys(found))


@lru_cache(maxsize=4)
def _workload(trace: str, top_k: int, steps: int | None, warmup: int) -> Workload:
    path = Path(trace) if trace else None
    return decode_options.recorded(
        path, top_k=top_k, steps=steps, warmup=warmup, requests=1, shared="0%"
    )


def run_cell(cell: Cell, grid: Grid, profile: DriveProfile) -> Row:
    """Simulate one cell. Raises TraceError, ReplayError, RegistryError."""
    workload = _workload(cell.trace, grid.top_k, grid.steps, grid.warmup_steps)
    settings = SimulateSettings(
        page_bytes=grid.page_bytes,
        staging_slots=decode_options.slots(workload, cell.staging, grid.page_bytes),
        layer_us=cell.lead_ms * 1e3,
        hints=cell.hints,
        top_k=grid.top_k,
        predictors=() if cell.control else (cell.predictor,),
        controls=(cell.predictor,) if cell.control else (),
        evict=cell.evict,
        warmup_steps=grid.warmup_steps,
        seed=grid.seed,
    )
    (plan,) = plans(workload, settings)
    core = plan_core(workload, plan)
    watch, clock = Watch(workload.geometry, plan.slots), DecisionClock(core)
    log = run_plan(
        workload, settings, plan, DriveModel(profile, grid.seed), record=watch, core=core
    )
    run = run_figures(
        plan.name,
        control=cell.control,
        evict=cell.evict,
        rounds=[log],
        page_bytes=grid.page_bytes,
        seed=grid.seed,
    )
    return Row(
        cell=cell,
        name=plan.name,
        hit_rate=run.hit_rate,
        late_rate=run.late_rate,
        miss_rate=run.miss_rate,
        stalled_share=run.stalled_share,
        time_ms=run.tpot_ms,
        prefetch=run.prefetch,
        timeliness=watch.counts.tolist(),
        device_bytes=run.device_bytes,
        cost=Cost(
            us_per_page=metrics.ratio(clock.spent_ns / 1e3, clock.pages),
            us_per_demand=metrics.ratio(clock.spent_ns / 1e3, clock.demands),
        ),
    )


def score(
    grid: Grid,
    profile: DriveProfile,
    executor: Executor,
    told: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """Run every cell; rows in the order of `cells`, whichever ends first. `told`: of each as it
    ends. Raises what `run_cell` raises."""
    wanted = cells(grid)
    futures = {executor.submit(run_cell, cell, grid, profile): cell for cell in wanted}
    rows: dict[Cell, Row] = {}
    try:
        for future in as_completed(futures):
            rows[futures[future]] = future.result()
            told(rows[futures[future]])
    finally:
        for future in futures:
            future.cancel()
    return related([rows[cell] for cell in wanted])


def related(rows: Sequence[Row]) -> list[Row]:
    """The rows with the share of the gap that each closes."""
    times = {
        (_place(row.cell), row.cell.predictor): row.time_ms for row in rows if row.cell.control
    }

    def closed(row: Row) -> float | None:
        none = times.get((_place(row.cell), "none"))
        oracle = times.get((_place(row.cell), "oracle"))
        if none is None or oracle is None or none <= oracle:
            return None
        return (none - row.time_ms) / (none - oracle)

    return [msgspec.structs.replace(row, gap_closed=closed(row)) for row in rows]


def _place(cell: Cell) -> tuple[str, str, str, float, bool]:
    return cell.regime, cell.trace, cell.staging, cell.lead_ms, cell.hints
