"""From raw samples and counts to the figures of a result.

Decides the arithmetic, and when there is too little to state a figure: that is None then, never
infinity and never a guess. Refuses to know where samples come from and how figures are shown. The
parts of a result (`prefetchd.result`) can be had from here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from prefetchd.result import (
    SCHEMA,
    Bound,
    Ccdf,
    Device,
    Distribution,
    Far,
    Gpu,
    Kind,
    Outcomes,
    PerLayer,
    Prefetch,
    Result,
    ResultError,
    Run,
    Settings,
    decode,
    encode,
)

__all__ = [
    "SCHEMA",
    "Bound",
    "Ccdf",
    "Device",
    "Distribution",
    "Far",
    "Gpu",
    "Kind",
    "Outcomes",
    "PerLayer",
    "Prefetch",
    "Result",
    "ResultError",
    "Run",
    "Settings",
    "ccdf",
    "decode",
    "distribution",
    "encode",
    "extra_share",
    "find",
    "median",
    "median_round",
    "percentile",
    "prefetch_figures",
    "rates",
    "ratio",
    "relate",
]


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, or None when either is unknown, whole is zero, or the result not finite."""
    if part is None or whole is None or not whole:
        return None
    value = part / whole
    return value if math.isfinite(value) else None


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def median_round(values: Sequence[float]) -> int:
    """Index of the round in the middle; of an even number, the faster of the two."""
    if not values:
        raise ValueError("there is no round to choose from")
    return int(np.argsort(values, kind="stable")[(len(values) - 1) // 2])


def percentile(samples: ArrayLike, p: float) -> float | None:
    """The p-quantile (0..1) by nearest rank: a sample that occurred, never a mean of two.

    None when fewer than 10 samples can be expected beyond it, that is below 10 / (1 - p) samples:
    one slow read more or less would otherwise move it at will.
    """
    values: NDArray[np.float64] = np.asarray(samples, np.float64)
    # The hair's breadth is for binary fractions: 1 - 0.999 is a little more than 0.001.
    if not values.size or values.size * (1 - p) < 10 - 1e-9:
        return None
    return float(np.quantile(values, p, method="inverted_cdf"))


def distribution(samples_us: ArrayLike) -> Distribution:
    """Percentiles of all samples together; give the zeros too, or n and p50 mean nothing."""
    values: NDArray[np.float64] = np.asarray(samples_us, np.float64)
    if not values.size:
        return Distribution()
    return Distribution(
        p50=percentile(values, 0.5),
        p99=percentile(values, 0.99),
        p999=percentile(values, 0.999),
        max=float(values.max()),
        n=values.size,
    )


def ccdf(samples_us: ArrayLike, points: int = 200) -> Ccdf:
    """The share of samples at least as long as each time, thinned to at most `points` for a plot.

    Shares are of all samples; zeros have no place on a logarithmic axis, so the curve starts at
    the share of samples above zero. Points are kept evenly spaced in the logarithm of the rank
    from the slow end, so that the slowest samples, few and telling, all stay.
    """
    values: NDArray[np.float64] = np.sort(np.asarray(samples_us, np.float64))
    times, first = np.unique(values, return_index=True)
    shares = 1 - first / max(1, values.size)
    times, shares = times[times > 0], shares[times > 0]
    if times.size > points:
        ranks = np.geomspace(1, times.size, points).round().astype(np.int64)
        keep = times.size - np.unique(ranks)[::-1]
        times, shares = times[keep], shares[keep]
    return Ccdf(us=times.tolist(), share=shares.tolist())


def rates(outcomes: Outcomes) -> dict[str, float | None]:
    """`hit_rate` (retained + timely), `late_rate` and `miss_rate` of all demanded pages."""
    return {
        "hit_rate": ratio(outcomes.retained + outcomes.timely, outcomes.total),
        "late_rate": ratio(outcomes.late, outcomes.total),
        "miss_rate": ratio(outcomes.miss, outcomes.total),
    }


def prefetch_figures(
    outcomes: Outcomes,
    *,
    issued: int,
    useful: int,
    late: int,
    wasted: int,
    pollution: int,
    page_bytes: int,
    pages_read: int,
) -> Prefetch:
    """Counts and what follows from them.

    accuracy = useful / issued; coverage = (timely + `late`) / (timely + late + miss) of `outcomes`,
    the part of the pages not yet there that prefetching went for: what is late among outcomes may
    have been on its way for another demand.
    """
    unready = outcomes.timely + outcomes.late + outcomes.miss
    return Prefetch(
        issued=issued,
        useful=useful,
        late=late,
        wasted=wasted,
        pollution=pollution,
        accuracy=ratio(useful, issued),
        coverage=ratio(outcomes.timely + late, unready),
        wasted_bytes=wasted * page_bytes,
        reads_per_needed=ratio(pages_read, outcomes.total),
    )


def extra_share(tpot_ms: float, resident_ms: float, none_ms: float) -> float | None:
    """(tpot - resident) / (none - resident): 0 is as fast as DRAM, 1 no better than `none`.

    None when `none` was not slower than `resident`: there was nothing to hide.
    """
    if none_ms <= resident_ms:
        return None
    return ratio(tpot_ms - resident_ms, none_ms - resident_ms)


def find(runs: Sequence[Run], control: str) -> Run | None:
    """The control of this name; the first one if it ran under several evictions."""
    return next((run for run in runs if run.control and run.name == control), None)


def relate(runs: Sequence[Run]) -> list[Run]:
    """The runs with the figures that compare them: to `resident`, and to `none`.

    These are ratios of medians, so that a reader gets them from the table as well.
    """
    resident, none = find(runs, "resident"), find(runs, "none")
    return [msgspec.structs.replace(run, **_compared(run, resident, none)) for run in runs]


def _compared(run: Run, resident: Run | None, none: Run | None) -> dict[str, float | None]:
    if resident is None:
        return {"tpot_ratio": None, "extra_share": None, "effective_latency_ratio": None}
    extra = None
    if none is not None:
        extra = extra_share(run.tpot_ms, resident.tpot_ms, none.tpot_ms)
    return {
        "tpot_ratio": ratio(run.tpot_ms, resident.tpot_ms),
        "extra_share": extra,
        "effective_latency_ratio": ratio(run.effective_latency_us, resident.effective_latency_us),
    }
