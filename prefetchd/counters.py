"""What the core counts. Plain sums that only grow; everything shown to people derives from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Codes, Outcome, Verdict


@dataclass(slots=True)
class Counters:
    """All in pages. `outcomes` by Outcome, `verdicts` by Verdict (of prefetched pages)."""

    outcomes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Outcome), np.int64))
    verdicts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Verdict), np.int64))
    demand_reads: int = 0
    prefetch_reads: int = 0
    pollution: int = 0  # demand misses on pages that a prefetch had pushed out
    retried: int = 0  # reads repeated after a failure
    failed: int = 0  # reads given up after their retries
    expired: int = 0  # demanded pages answered as a miss at the deadline
    abandoned: int = 0  # reads that never ended in time; their slots wait for the device
    stale: int = 0  # completions of reads given up earlier

    def count_outcomes(self, outcomes: Codes) -> None:
        _count(self.outcomes, outcomes)

    def count_verdicts(self, verdicts: Codes) -> None:
        _count(self.verdicts, verdicts)

    def prefetches(self) -> dict[str, int]:
        """Prefetched pages `issued`, what became of them by verdict, and `pollution`."""
        verdicts = {verdict.name.lower(): int(self.verdicts[verdict]) for verdict in Verdict}
        return {"issued": self.prefetch_reads, "pollution": self.pollution, **verdicts}


def _count(counts: NDArray[np.int64], codes: Codes) -> None:
    """Add how often each code is there. Nearly all are the first one; bytes are counted in a
    fraction of the time that numpy takes."""
    some = codes.tobytes()
    left = len(some)
    for code in range(len(counts) - 1, 0, -1):
        found = some.count(code)
        counts[code] += found
        left -= found
    counts[0] += left
