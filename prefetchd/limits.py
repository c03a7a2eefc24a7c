"""What bounds the core: everything that could grow or last has its end here.

Decides the defaults and what makes no sense. Refuses to know how the limits are kept.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """`prefetch_depth`: most prefetch reads in flight. `read_timeout_ns`: after it, a read is
    abandoned. `tickets_max`: demands open at once. `attempts_max`: tries of a demanded read.
    `candidates`: guesses asked of the predictor at a time. `retain`: whether a page stays when its
    readers are done; without it every demand reads anew. `filled_share_max`: of the slots, what
    pages may hold that callers brought and the store does not have yet."""

    prefetch_depth: int = 32
    read_timeout_ns: int = 5_000_000_000
    tickets_max: int = 4096
    attempts_max: int = 2
    candidates: int = 1024
    retain: bool = True
    filled_share_max: float = 0.5

    def __post_init__(self) -> None:
        if self.prefetch_depth < 0 or self.candidates < 0:
            raise ValueError(f"prefetch_depth and candidates must be at least 0: {self}")
        if min(self.read_timeout_ns, self.tickets_max, self.attempts_max) < 1:
            raise ValueError(f"read_timeout_ns, tickets_max, attempts_max are at least 1: {self}")
        if not 0 <= self.filled_share_max <= 1:
            raise ValueError(f"filled_share_max is between 0 and 1: {self}")
