"""What no prefetcher can do better, even one that knows all demands: a bound on late and missing.

Decides which of the device's and the staging's limits are counted, so that the bound holds for
whatever issues the reads. Knows no policy and no predictor. It is a lower bound, not always to be
reached.

The terms. The device starts at most one read every `page_ns`, none takes less time. A demand comes
at its time, whatever happened before it. All its pages have slots from then on, as the core gives
them; a page is on time if it is there by then, otherwise it is late or missing, and counts one. How
long before its demand a page may be read is not bounded: who knows all need not wait until told.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.belady import Demands, belady_misses


def fewest_late(
    demands: Demands,
    times_ns: NDArray[np.int64],
    slots: int,
    page_ns: float,
    *,
    first_is_put: bool = False,
    first: int = 0,
) -> int:
    """How many demanded pages at least are late or missing, staging empty at first.

    `times_ns` (int64, one a demand) never falls. `page_ns`: time from one read to the next at the
    device's full rate, 1e9 / (pages/s). With `first_is_put` the first use of a page brings it.
    `first`: only demands from this one on count, whatever was staged before it.
    Raises ValueError for times that fall, or a demand of more pages than there are slots.
    """
    if len(times_ns) and (np.diff(times_ns) < 0).any():
        raise ValueError(f"times fall at demand {int(np.argmax(np.diff(times_ns) < 0)) + 1}")
    misses = belady_misses(demands, slots, first_is_put=first_is_put)
    return _beyond_bucket(
        misses[first:], times_ns[first:], slots, page_ns, filled=slots if first else 0
    )


def _beyond_bucket(
    misses: NDArray[np.int64],
    times_ns: NDArray[np.int64],
    slots: int,
    page_ns: float,
    filled: float,
) -> int:
    """Reads that no schedule can have made in time, when no more than `slots` are made ahead.

    Between two demands no eviction can do with fewer reads than Belady less what was there at the
    beginning, which is a page a slot at most: a bucket of so many, filled at the device's rate.
    """
    late = 0
    ahead = np.diff(times_ns, prepend=times_ns[:1]) / page_ns
    for gained, taken in zip(ahead.tolist(), misses.tolist(), strict=True):
        filled = min(float(slots), filled + gained) - taken
        if filled < 0:
            short = int(np.ceil(-filled - 1e-6))
            late += short
            filled += short
    return late
