"""How many operations are in flight, as a mean over the time when there are any.

Decides nothing; it is told of every change and of the time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DepthMeter:
    """Time-weighted number of operations in flight, over the time when there were any."""

    area_ns: int = 0
    busy_ns: int = 0
    _in_flight: int = 0
    _since_ns: int = 0

    def note(self, in_flight: int, now_ns: int) -> None:
        if self._in_flight:
            elapsed_ns = now_ns - self._since_ns
            self.area_ns += self._in_flight * elapsed_ns
            self.busy_ns += elapsed_ns
        self._in_flight, self._since_ns = in_flight, now_ns

    @property
    def mean(self) -> float:
        return self.area_ns / self.busy_ns if self.busy_ns else 0.0
