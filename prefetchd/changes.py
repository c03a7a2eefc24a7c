"""Options that can be changed while a runtime serves, and those that cannot.

Decides which are which, and in words what came of a change. Applies nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from prefetchd.options import Options

LIVE = frozenset(
    {
        "predictor",
        "evict",
        "demand_timeout_s",
        "cap_bytes",
        "quota_bytes",
        "lease_s",
        "floor_bytes",
        "ttl_s",
        "admission",
        "planner",
        "core",
        "drain",
    }
)
LIVE_OF_CORE = frozenset({"prefetch_depth", "candidates", "attempts_max", "read_timeout_ns"})


@dataclass(frozen=True, slots=True)
class Changes:
    """What was changed, and what will be when the store is opened anew, each in words."""

    applied: tuple[str, ...]
    later: tuple[str, ...]

    def __str__(self) -> str:
        parts = []
        if self.applied:
            parts.append(f"changed: {', '.join(self.applied)}")
        if self.later:
            parts.append(f"needs a restart: {', '.join(self.later)}")
        return "; ".join(parts) or "nothing has changed"


def sorted_out(old: Options, new: Options, depth_max: int) -> tuple[Options, Changes]:
    """The options as far as they can be changed now. `depth_max`: of the device."""
    taken: dict[str, Any] = {}
    applied, later = [], []
    for name in (field.name for field in fields(Options)):
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        words = f"{name} from {_word(before)} to {_word(after)}"
        if name == "core":
            kept = {n: getattr(after, n) for n in LIVE_OF_CORE}
            now = replace(before, **kept)
            if now != after:
                later.append(f"{name} beyond {', '.join(sorted(LIVE_OF_CORE))}")
            if now == before:
                continue
            after = now
        if name in LIVE or (name == "depth" and after <= depth_max):
            taken[name] = after
            applied.append(words)
        else:
            later.append(words)
    return replace(old, **taken), Changes(tuple(applied), tuple(later))


def _word(value: Any) -> str:
    return str(getattr(value, "__name__", value))
