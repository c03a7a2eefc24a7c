"""The result of a restore replay: its parts, what each figure means, and its JSON.

Decides the schema, and computes the figures of a run from its logs. A figure that cannot be stated
is None. Times are real ones, as measured: at `speed` x the trace's own are x times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd import metrics
from prefetchd.bench.restore import Moved, RestoreLog

Schema = Literal["prefetchd.replay.restore/1", "prefetchd.simulate.restore/1"]
SCHEMA: Schema = "prefetchd.replay.restore/1"
SIMULATED: Schema = "prefetchd.simulate.restore/1"


class RestoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and leads are in the trace's own time; `speed` scales all of them together.

    `limit_blocks_s` 0: the device is not limited. `group_blocks`: of the
    trace, that are one block here.
    `staging_blocks`: of all runs but `resident`. `trace_how`: what was done to times and ids.
    """

    trace: str
    trace_how: str
    requests: int
    blocks: int
    block_bytes: int
    staging_blocks: int
    leads_ms: list[float]
    hints: bool
    limit_blocks_s: float
    consume_blocks_s: float
    group_blocks: int
    speed: float
    evict: str
    depth: int
    rounds: int
    seed: int
    more: dict[str, str | int | float | bool] = {}


class Milliseconds(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of `n` samples; None where n is under 10 / (1 - p)."""

    p50: float | None = None
    p99: float | None = None
    max: float | None = None
    n: int = 0


class RestoreRun(msgspec.Struct, frozen=True, kw_only=True):
    """One control or predictor at one lead.

    `staged_share`: reusable blocks that were readable at their first need; one that was demanded
    when its request was queued counts if it was readable when the request started.
    `at_start_share`: those that were so when their request started (None: nobody looked).
    `reuse_share`: reusable blocks of all that requests need. `waste_share`: prefetched blocks that
    nobody used, of all reads. `time_to_ready_ms`: from a request's intended start to the end of its
    last wait, 0 if it never waited. `demand_wait_ms`: of each demanded block. `lateness_ms`: how
    late requests were started by the replay itself. `unstored`: reusable blocks whose put had not
    ended yet, counted as not staged.
    """

    name: str
    control: bool
    evict: str
    lead_ms: float
    outcomes: metrics.Outcomes
    staged_share: float | None
    staged_share_rounds: list[float]
    at_start_share: float | None = None
    reuse_share: float | None
    waste_share: float | None
    time_to_ready_ms: Milliseconds
    demand_wait_ms: Milliseconds
    lateness_ms: Milliseconds
    ready_ccdf: metrics.Ccdf
    prefetch: metrics.Prefetch
    device_bytes: int
    written_bytes: int
    achieved_depth: float | None
    decision_us: metrics.Distribution
    cpu_share: float | None
    unstored: int
    failures: dict[str, int]
    verified_pages: int


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay or a simulation says; in the latter, figures that only a real clock has are
    None, and nothing is verified, for no bytes move. `clients`: of a replay by several processes,
    what each saw of each run; `runs` are then of all, and tell the counters of the daemon."""

    device: metrics.Device
    settings: RestoreSettings
    runs: list[RestoreRun]
    regime: Literal["restore"] = "restore"
    schema: Schema = SCHEMA
    notes: list[str] = []
    bounds: list[metrics.Bound] = []
    clients: list[RestoreRun] = []


def encode(result: RestoreResult) -> bytes:
    """JSON without NaN or infinity."""
    data = msgspec.json.encode(result)
    decode(data)
    return msgspec.json.format(data, indent=1)


def decode(data: bytes) -> RestoreResult:
    """Read what `encode` wrote. Raises ResultError for anything else."""
    try:
        return msgspec.json.decode(data, type=RestoreResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise metrics.ResultError(
            f"this is not a restore's result ({SCHEMA} or {SIMULATED}): {error}. "
            "Write one with `prefetchd replay restore` or `simulate restore`, TRACE --json FILE."
        ) from error


def run_figures(
    name: str,
    *,
    control: bool,
    evict: str,
    lead_ms: float,
    rounds: Sequence[RestoreLog],
    blocks_needed: int,
    page_bytes: int,
) -> RestoreRun:
    """All rounds together; `blocks_needed`: of all requests of one round, new ones included."""
    counts = np.sum([log.outcomes for log in rounds], axis=0).tolist()
    outcomes = metrics.Outcomes(
        retained=counts[0], timely=counts[1], late=counts[2], miss=counts[3]
    )
    unstored = sum(log.unstored for log in rounds)
    reusable = outcomes.total + unstored
    shares = [share for log in rounds if (share := staged_share(log)) is not None]
    afters = [log.after for log in rounds if log.after]
    fetched = _fetched(afters)
    ready = np.concatenate([log.ready_ns[log.ready_ns >= 0] for log in rounds]) / 1e6
    waits = [wait for log in rounds for wait in log.waits_ns]
    unused = fetched["issued"] - fetched["useful"] - fetched["late"]
    return RestoreRun(
        name=name,
        control=control,
        evict=evict,
        lead_ms=lead_ms,
        outcomes=outcomes,
        staged_share=metrics.median(shares),
        staged_share_rounds=shares,
        at_start_share=_at_start_share(rounds, reusable),
        reuse_share=metrics.ratio(reusable, blocks_needed * len(rounds)),
        waste_share=metrics.ratio(unused, _pages_read(afters)),
        time_to_ready_ms=_milliseconds(ready),
        demand_wait_ms=_milliseconds(_joined(waits) / 1e6),
        lateness_ms=_milliseconds(_joined([log.lateness_ns for log in rounds]) / 1e6),
        ready_ccdf=metrics.ccdf(ready * 1e3),
        prefetch=_prefetch(outcomes, fetched, page_bytes, _pages_read(afters)),
        device_bytes=sum(after.bytes_read for after in afters),
        written_bytes=sum(after.bytes_written for after in afters),
        achieved_depth=metrics.median([after.achieved_depth for after in afters]),
        decision_us=metrics.distribution(_joined([after.decision_ns for after in afters]) / 1e3),
        cpu_share=_cpu_share(rounds),
        unstored=unstored,
        failures=_failures(rounds),
        verified_pages=sum(log.verified for log in rounds),
    )


def _fetched(afters: Sequence[Moved]) -> Counter[str]:
    total: Counter[str] = Counter()
    for after in afters:
        total.update(after.prefetch)
    return total


def _pages_read(afters: Sequence[Moved]) -> int:
    return sum(after.pages_read for after in afters)


def _prefetch(
    outcomes: metrics.Outcomes, fetched: Counter[str], page_bytes: int, pages_read: int
) -> metrics.Prefetch:
    return metrics.prefetch_figures(
        outcomes,
        issued=fetched["issued"],
        useful=fetched["useful"],
        late=fetched["late"],
        wasted=fetched["wasted"],
        pollution=fetched["pollution"],
        page_bytes=page_bytes,
        pages_read=pages_read,
    )


def _failures(rounds: Sequence[RestoreLog]) -> dict[str, int]:
    failures: Counter[str] = Counter()
    for log in rounds:
        if log.after:
            failures.update(log.after.failures)
        if log.missing:
            failures["blocks that could not be had"] += log.missing
        if log.failed_puts:
            failures["puts that failed"] += len(log.failed_puts)
    return dict(failures)


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *arrays])


def _at_start_share(rounds: Sequence[RestoreLog], reusable: int) -> float | None:
    found = [log.at_start for log in rounds if log.at_start is not None]
    return metrics.ratio(sum(found), reusable) if len(found) == len(rounds) else None


def _cpu_share(rounds: Sequence[RestoreLog]) -> float | None:
    spent = [log.cpu_ns for log in rounds if log.cpu_ns is not None]
    if len(spent) < len(rounds):
        return None
    return metrics.ratio(sum(spent) / 1e9, sum(log.seconds for log in rounds))


def staged_share(log: RestoreLog) -> float | None:
    reusable = int(log.outcomes.sum()) + log.unstored
    return metrics.ratio(int(log.outcomes[:2].sum()) + log.early, reusable)


def _milliseconds(samples: NDArray[np.float64]) -> Milliseconds:
    if not len(samples):
        return Milliseconds()
    return Milliseconds(
        p50=metrics.percentile(samples, 0.5),
        p99=metrics.percentile(samples, 0.99),
        max=float(samples.max()),
        n=len(samples),
    )
