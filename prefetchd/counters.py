"""What the core counts. Plain sums that only grow; everything shown to people derives from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Codes, Outcome, Verdict

_OUTCOMES = len(Outcome)
_RETAINED = bytes([Outcome.RETAINED])


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
        if outcomes.tobytes().strip(_RETAINED):  # a fraction of what numpy takes to count them
            self.outcomes += np.bincount(outcomes, minlength=_OUTCOMES)
        else:  # the common case, and much the cheaper one
            self.outcomes[Outcome.RETAINED] += len(outcomes)

    def count_verdicts(self, verdicts: Codes) -> None:
        self.verdicts += np.bincount(verdicts, minlength=len(Verdict))

    def prefetches(self) -> dict[str, int]:
        """Prefetched pages `issued`, what became of them by verdict, and `pollution`."""
        verdicts = {verdict.name.lower(): int(self.verdicts[verdict]) for verdict in Verdict}
        return {"issued": self.prefetch_reads, "pollution": self.pollution, **verdicts}
