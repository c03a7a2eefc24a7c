"""Eviction policies and predictors, made by name. Decides what is said of a name that is none."""

from __future__ import annotations

from collections.abc import Callable

from prefetchd import registry
from prefetchd.eviction import EVICTIONS, Eviction
from prefetchd.guarded import made
from prefetchd.model import Geometry
from prefetchd.predictor import Predictor


def check_eviction(name: str) -> None:
    """Raises RegistryError."""
    if name not in EVICTIONS:
        there = ", ".join(EVICTIONS)
        raise registry.RegistryError(f"no eviction policy is {name!r}; there are {there}")


def eviction_of(name: str, geometry: Geometry, slots: int) -> Eviction:
    """Raises RegistryError."""
    check_eviction(name)
    return EVICTIONS[name](slots, geometry)


def predictor_of(
    named: str | Callable[[Geometry, int], Predictor], geometry: Geometry, slots: int
) -> tuple[Predictor, str]:
    """A predictor and its name. Raises RegistryError, and what its `__init__` raises."""
    factory = registry.predictor_class(named) if isinstance(named, str) else named
    predictor = made(factory, geometry, slots)
    return predictor, predictor.name or type(predictor).__name__.lower()
