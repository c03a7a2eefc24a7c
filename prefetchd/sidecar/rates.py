"""Figures that follow from counters, for everybody who shows them: metrics, page and terminal.

Decides their definitions, those of every report. A figure with nothing behind it is None.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.stats import Stats
from prefetchd.waits import WaitCounts


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def coverage(outcomes: Mapping[str, int]) -> float | None:
    """Of the pages that were not retained, those that a prefetch had begun to bring."""
    brought = outcomes["timely"] + outcomes["late"]
    return share(brought, brought + outcomes["miss"])


def accuracy(prefetch: Mapping[str, int]) -> float | None:
    """Useful of all that was prefetched."""
    return share(prefetch["useful"], prefetch["issued"])


def write_amplification(stats: Stats) -> float | None:
    """Bytes written per byte of blocks, by this program: what the drive adds it does not tell."""
    return share(stats.bytes_written, stats.store_writes.payload_bytes)


class Rates(msgspec.Struct, frozen=True):
    """What happened between two pictures of a namespace; `_s` in a name: a second."""

    seconds: float
    read_bytes_s: float
    written_bytes_s: float
    demanded_pages_s: float
    prefetched_pages_s: float
    in_time: float | None
    coverage: float | None
    accuracy: float | None
    late: float | None
    wasted: float | None
    pollution_pages: int
    wait_p50_s: float | None
    wait_p99_s: float | None


def rates(before: Stats, now: Stats, seconds: float) -> Rates:
    outcomes = _grown(before.outcomes, now.outcomes)
    prefetch = _grown(before.prefetch, now.prefetch)
    demanded = sum(outcomes.values())
    counts = _summed(now.waits) - _summed(before.waits)
    return Rates(
        seconds,
        (now.bytes_read - before.bytes_read) / seconds,
        (now.bytes_written - before.bytes_written) / seconds,
        demanded / seconds,
        prefetch["issued"] / seconds,
        share(outcomes["retained"] + outcomes["timely"], demanded),
        coverage(outcomes),
        accuracy(prefetch),
        share(prefetch["late"], prefetch["issued"]),
        share(prefetch["wasted"], prefetch["issued"]),
        prefetch["pollution"],
        percentile_s(counts, now.waits.bounds_ns, 0.5),
        percentile_s(counts, now.waits.bounds_ns, 0.99),
    )


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in now.items()}


def _summed(waits: WaitCounts) -> NDArray[np.int64]:
    return np.array(waits.totals(), np.int64)


def percentile_s(counts: NDArray[np.int64], bounds_ns: list[int], part: float) -> float | None:
    """Of the pages that were not here: the bound of the bucket in which this part of the waits is
    reached, the last one for what is behind it. None if all were here. `counts`: one a bucket."""
    sofar = np.cumsum(counts[1:])
    if len(sofar) == 0 or sofar[-1] == 0:
        return None
    bucket = 1 + int(np.searchsorted(sofar, part * sofar[-1]))
    return bounds_ns[min(bucket, len(bounds_ns) - 1)] / 1e9
