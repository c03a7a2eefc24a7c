"""Which runs a decode is judged by: controls and predictors, each on its staging.

Decides names, order, eviction and slots of the runs, alike for a replay and for a simulation, and
refuses names that mean nothing. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from prefetchd import metrics, registry
from prefetchd.core import CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.lab.workload import Workload
from prefetchd.options import PredictorFactory
from prefetchd.predictors.oracle import Oracle

CONTROLS = ("resident", "none", "cold", "oracle")


class ReplayError(Exception):
    """A replay cannot be run as asked: why, and what to do."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What is decoded and how. `staging_slots` is for all runs but `resident` and `cold`."""

    page_bytes: int = 65536
    staging_slots: int = 0
    layer_us: float = 600.0
    hints: bool = True
    top_k: int = 16
    predictors: tuple[str, ...] = ("auto",)
    controls: tuple[str, ...] = CONTROLS
    evict: str = "cycle"
    depth: int = 128
    rounds: int = 3
    warmup_steps: int = 16
    seed: int = 1
    demand_timeout_s: float = 10.0
    core: CoreLimits = field(default_factory=CoreLimits)


@dataclass(slots=True)
class Report:
    """Progress in words and steps; either may be ignored."""

    say: Callable[[str], None] = lambda _: None
    steps: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Plan:
    """One line of the result: how its engine is built."""

    name: str
    control: bool
    evict: str
    predictor: str | PredictorFactory
    slots: int
    core: CoreLimits


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


def plans(workload: Workload, settings: DecodeSettings) -> list[Plan]:
    """The runs in their order. Raises ReplayError, RegistryError."""
    pages, slots, limits = workload.geometry.pages, settings.staging_slots, settings.core
    oracle = partial(Oracle, future=workload.future())
    cold = replace(limits, retain=False)
    controls = {
        "resident": Plan("resident", True, "lru", "none", pages, limits),
        "none": Plan("none", True, "lru", "none", slots, limits),
        "cold": Plan("cold", True, "lru", "none", 2 * workload.widest, cold),
        "oracle": Plan("oracle", True, settings.evict, oracle, slots, limits),
    }
    _check_names(settings)
    made = [controls[name] for name in CONTROLS if name in settings.controls]
    for name in settings.predictors:
        known = {plan.name for plan in made}
        shown = Path(name).stem if name.endswith(".py") else name
        shown = f"{shown}+{settings.evict}" if shown in settings.controls else shown
        if shown in known:
            raise ReplayError(f"predictor {name} is named twice")
        made.append(Plan(shown, False, settings.evict, name, slots, limits))
    return made


def _check_names(settings: DecodeSettings) -> None:
    """Now, and not after the runs that come first."""
    unknown = [name for name in settings.controls if name not in CONTROLS]
    if unknown:
        raise ReplayError(f"no control is called {unknown[0]!r}; there are {', '.join(CONTROLS)}")
    if settings.evict not in EVICTIONS:
        known = ", ".join(EVICTIONS)
        raise ReplayError(f"no eviction is called {settings.evict!r}; there are {known}")
    for name in settings.predictors:
        registry.predictor_class(name)


def told_settings(
    workload: Workload, settings: DecodeSettings, more: dict[str, str | int | float | bool]
) -> metrics.Settings:
    """The settings as a result names them; `more` is whatever else they were."""
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
        more=more,
    )


def trace_notes(workload: Workload, *, hints: bool) -> list[str]:
    """What every result says of its trace. `hints`: whether those that it has were given."""
    notes = [f"SYNTHETIC: the trace was {workload.synthetic}"] if workload.synthetic else []
    if hints and not any(hint for step in workload.hints for hint in step):
        notes.append("the trace has no hints: predictors that follow hints saw none")
    return notes
