"""The eviction policies there are, by name."""

from __future__ import annotations

from prefetchd.arc import Arc
from prefetchd.cycle import Cycle
from prefetchd.lru import Lru
from prefetchd.policy import Eviction

__all__ = ["EVICTIONS", "Arc", "Cycle", "Eviction", "Lru"]

EVICTIONS: dict[str, type[Eviction]] = {policy.name: policy for policy in (Lru, Arc, Cycle)}
"""Every policy, by the name it is chosen and reported by."""
