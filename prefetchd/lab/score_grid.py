"""Which simulations a scorecard takes: predictors x evictions x staging sizes x leads x traces.

Decides the cells, their order and their names, which of them are one and the same simulation, and
refuses names that mean nothing before anything is run. Runs nothing.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import msgspec

from prefetchd import registry
from prefetchd.bench.runs import ReplayError
from prefetchd.eviction import EVICTIONS
from prefetchd.lab.score_result import Cell, Kind, Place, Regime, TraceFile

CONTROLS = ("resident", "none", "oracle")
PREDICTORS: dict[Regime, tuple[str, ...]] = {
    "decode": ("auto", "attention"),
    "restore": ("auto", "cross_request"),
}
STAGINGS = ("10%", "15%", "25%")
EVICTS: dict[Regime, tuple[str, ...]] = {"decode": ("cycle",), "restore": ("lru",)}


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared. `predictors` and `evicts` empty: those of each regime above.

    `layer_us` are the leads of a decode, `lead_ms` those of a restore; `limit_blocks_s` holds a
    restore's drive to a rate, whatever its profile (0: not). Paths are seen from `folder`, since a
    worker may stand elsewhere.
    """

    traces: tuple[TraceFile, ...]
    predictors: tuple[str, ...] = ()
    evicts: tuple[str, ...] = ()
    stagings: tuple[str, ...] = STAGINGS
    layer_us: tuple[float, ...] = (600.0,)
    lead_ms: tuple[float, ...] = (500.0,)
    hints: tuple[bool, ...] = (True,)
    steps: int | None = None
    requests: int | None = None
    warmup_steps: int = 16
    top_k: int = 16
    page_bytes: int = 65536
    block_bytes: int = 4 << 20
    limit_blocks_s: float = 0.0
    consume_blocks_s: float = 200.0
    depth: int = 128
    seed: int = 1
    folder: str = "."

    def trace_path(self, name: str) -> Path | None:
        """None for a trace that ships with the package."""
        path = next(one.path for one in self.traces if one.name == name)
        return Path(self.folder) / path if path else None

    def found(self, predictor: str) -> str:
        """The name by which a predictor is loaded, wherever that is."""
        return str(Path(self.folder) / predictor) if predictor.endswith(".py") else predictor


def places(grid: Grid) -> list[Place]:
    """Everything under which predictors are compared, in the order of the grid."""
    found: list[Place] = []
    for trace in grid.traces:
        leads = [us / 1e3 for us in grid.layer_us] if trace.regime == "decode" else grid.lead_ms
        for staging, lead_ms, hints in product(grid.stagings, leads, grid.hints):
            found.append(
                Place(
                    regime=trace.regime,
                    trace=trace.name,
                    staging=staging,
                    lead_ms=lead_ms,
                    hints=hints,
                )
            )
    return list(dict.fromkeys(found))


def cells(grid: Grid) -> list[Cell]:
    """All simulations, place by place, controls first. Raises ReplayError, RegistryError."""
    wanted = {regime: _lines(grid, regime) for regime in EVICTS}
    return [
        Cell(place=place, name=name, kind=kind, predictor=predictor, evict=evict)
        for place in places(grid)
        for name, kind, predictor, evict in wanted[place.regime]
    ]


_Line = tuple[str, Kind, str, str]


def _lines(grid: Grid, regime: Regime) -> list[_Line]:
    evicts = grid.evicts or EVICTS[regime]
    for evict in evicts:
        if evict not in EVICTIONS:
            known = ", ".join(EVICTIONS)
            raise ReplayError(f"no eviction is called {evict!r}; there are {known}")
    lines: list[_Line] = [
        ("resident", "control", "resident", "lru"),
        ("none", "control", "none", "lru"),
        ("oracle", "control", "oracle", evicts[0]),
    ]
    predictors = grid.predictors or PREDICTORS[regime]
    # What an eviction alone does, so that no predictor is credited with it; of LRU `none` tells.
    alone = () if "none" in predictors else tuple(evict for evict in evicts if evict != "lru")
    lines += [(f"none+{evict}", "predictor", "none", evict) for evict in alone]
    for predictor, evict in product(predictors, evicts):
        shown = Path(predictor).stem if predictor.endswith(".py") else predictor
        if len(evicts) > 1 or shown in CONTROLS:
            shown = f"{shown}+{evict}"
        lines.append((shown, "predictor", predictor, evict))
    twice = [name for name, count in Counter(line[0] for line in lines).items() if count > 1]
    if twice:
        raise ReplayError(f"{twice[0]} is named twice; name each predictor and eviction once")
    return lines


def check_names(grid: Grid) -> None:
    """Whether all predictors can be had at all. Raises RegistryError."""
    for trace in grid.traces:
        for predictor in grid.predictors or PREDICTORS[trace.regime]:
            registry.predictor_class(grid.found(predictor))


def same(cell: Cell, grid: Grid) -> Cell:
    """The cell that stands for all with the same figures, so that it is run once.

    `resident` has room for everything, whatever the staging, and hears no hints; without them a
    restore demands its first blocks at the announcement, so there its lead still counts.
    """
    place = cell.place
    if cell.predictor not in ("resident", "none") or cell.kind != "control":
        return cell
    if cell.predictor == "resident":
        place = msgspec.structs.replace(place, staging=grid.stagings[0])
    if place.regime == "decode":
        place = msgspec.structs.replace(place, hints=grid.hints[0])
    elif place.hints:
        place = msgspec.structs.replace(place, lead_ms=grid.lead_ms[0])
    return msgspec.structs.replace(cell, place=place)
