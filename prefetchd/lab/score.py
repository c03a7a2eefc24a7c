"""The scorecard: every cell of a grid simulated once, by any `concurrent.futures` executor.

Decides which tasks there are, in which order rows stand (never the one in which they end), and how
much of the gap between `none` and `oracle` each closes. Tasks share nothing but files. All figures
repeat exactly, but for what deciding costs, which is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed

import msgspec

from prefetchd import metrics
from prefetchd.drive_profile import DriveProfile, seed_notes
from prefetchd.lab.dpu import NO_DPU
from prefetchd.lab.modelled import AT_DEPTH, IN_TURN, described
from prefetchd.lab.score_cell import run_bounds, run_cell
from prefetchd.lab.score_grid import Grid, cells, places, same
from prefetchd.lab.score_result import Bounds, Cell, Place, Row, Score
from prefetchd.lab.score_workers import abandon

Told = Callable[[str, int], None]


def count_tasks(grid: Grid) -> int:
    """How many simulations and bounds a grid takes."""
    return len({same(cell, grid) for cell in cells(grid)}) + len(places(grid))


def score(
    grid: Grid,
    profile: DriveProfile,
    executor: Executor,
    told: Told = lambda name, count: None,
) -> Score:
    """Run everything. `told`: what has ended, and how many tasks that were.

    Raises ScoreError, and what the executor raises.
    """
    wanted, all_places = cells(grid), places(grid)
    tasks: list[Cell | Place] = [*dict.fromkeys(same(cell, grid) for cell in wanted), *all_places]
    rows: dict[Cell, Row] = {}
    bounds: dict[Place, Bounds] = {}
    futures = {executor.submit(run_task, task, grid, profile): task for task in tasks}
    try:
        for future in as_completed(futures):
            found = future.result()
            if isinstance(found, Row):
                rows[found.cell] = found
                told(found.cell.name, 1)
            else:
                bounds[found.place] = found
                told("bounds", 1)
    except BaseException:
        abandon(executor)
        raise
    every = [msgspec.structs.replace(rows[same(cell, grid)], cell=cell) for cell in wanted]
    return Score(
        device=_device(grid, profile),
        traces=list(grid.traces),
        settings=_settings(grid),
        rows=related(every),
        bounds=[bounds[place] for place in all_places],
        notes=[*_notes(grid), *seed_notes(profile, grid.seed, 1)],
    )


def run_task(task: Cell | Place, grid: Grid, profile: DriveProfile) -> Row | Bounds:
    """A cell's simulation, or the bounds of a place. Raises ScoreError."""
    if isinstance(task, Cell):
        return run_cell(task, grid, profile)
    return run_bounds(task, grid, profile)


def related(rows: Sequence[Row]) -> list[Row]:
    """The rows with the share of the gap that each closes."""
    times = {
        (row.cell.place, row.cell.name): row.time_ms for row in rows if row.cell.kind == "control"
    }

    def closed(row: Row) -> float | None:
        none = times.get((row.cell.place, "none"))
        oracle = times.get((row.cell.place, "oracle"))
        if none is None or oracle is None or none <= oracle:
            return None
        return (none - row.time_ms) / (none - oracle)

    return [msgspec.structs.replace(row, gap_closed=closed(row)) for row in rows]


def _device(grid: Grid, profile: DriveProfile) -> metrics.Device:
    restores = all(trace.regime == "restore" for trace in grid.traces)
    return described(profile, NO_DPU, IN_TURN if grid.limit_blocks_s and restores else AT_DEPTH)


def _settings(grid: Grid) -> dict[str, int | float | bool | None]:
    """What a reader needs to repeat the runs and does not see in the rows."""
    plain = msgspec.structs.asdict(grid)
    kinds = int | float | bool | None
    return {name: value for name, value in plain.items() if isinstance(value, kinds)}


def _notes(grid: Grid) -> list[str]:
    made = [trace.name for trace in grid.traces if trace.synthetic]
    notes = [f"SYNTHETIC: {name} was generated, not recorded" for name in made]
    if True in grid.hints:
        notes += [
            f"{trace.name} has no hints: predictors that follow hints saw none"
            for trace in grid.traces
            if not trace.hints
        ]
    if grid.limit_blocks_s and any(trace.regime == "restore" for trace in grid.traces):
        notes.append(
            f"restores were held to {grid.limit_blocks_s:g} blocks/s, one after another, and not "
            "to the drive profile"
        )
    return notes
