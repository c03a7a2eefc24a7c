"""Measured values, kept whole so that percentiles can be had later.

Decides how many are kept. Refuses to know what they mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SAMPLES = 1 << 16


class Samples:
    """The last 65,536 values of something (int64)."""

    def __init__(self) -> None:
        self._values = np.zeros(_SAMPLES, np.int64)
        self.count = 0

    def add(self, value: int) -> None:
        self._values[self.count % _SAMPLES] = value
        self.count += 1

    def values(self) -> NDArray[np.int64]:
        return self._values[: min(self.count, _SAMPLES)].copy()
