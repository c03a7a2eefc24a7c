"""From the logs of a replay's runs to their figures: counting, after everything has been timed.

Decides how rounds are summed and what each figure of a run means. Runs and prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from prefetchd import metrics
from prefetchd.bench.decode import check_stamps
from prefetchd.bench.decode_loop import Log
from prefetchd.model import Outcome


def run_figures(
    name: str, *, control: bool, evict: str, rounds: Sequence[Log], page_bytes: int, seed: int
) -> metrics.Run:
    """One run's figures over all its rounds. Raises WrongBytes if any page was another's."""
    tpots = [float(np.mean(log.step_ns[log.warmup_steps :])) / 1e6 for log in rounds]
    codes = np.concatenate([served.outcomes for log in rounds for served in log.measured])
    outcomes = _outcomes(codes)
    rates = metrics.rates(outcomes)
    stall_us = _stalls_us(rounds)
    middle = rounds[metrics.median_round(tpots)]
    return metrics.Run(
        name=name,
        control=control,
        evict=evict,
        outcomes=outcomes,
        tpot_ms=float(np.median(tpots)),
        tpot_ms_rounds=tpots,
        hit_rate=rates["hit_rate"],
        miss_rate=rates["miss_rate"],
        late_rate=rates["late_rate"],
        stalled_share=float(np.mean(stall_us > 0)),
        effective_latency_us=metrics.median([_latency_us(log) for log in rounds]),
        stall_us=metrics.distribution(stall_us),
        prefetch=_prefetch(outcomes, rounds, page_bytes),
        device_bytes=sum(_grown(log, "bytes_read") for log in rounds),
        achieved_depth=metrics.median([depth for log in rounds for depth in _depth(log)]),
        device_gb_s=metrics.ratio(
            sum(_grown(log, "bytes_read") for log in rounds),
            sum(_grown(log, "busy_ns") for log in rounds),
        ),
        decision_us=_decisions(rounds),
        cpu_us_per_page=metrics.ratio(_cpu_us(rounds), len(codes)),
        step_ms=[ns / 1e6 for ns in middle.step_ns],
        stall_ccdf=metrics.ccdf(stall_us),
        per_layer=_per_layer(rounds),
        far=_far(rounds),
        failures=_failures(rounds),
        verified_pages=sum(log.verified + check_stamps(log, seed) for log in rounds),
    )


def _outcomes(codes: NDArray[np.uint8]) -> metrics.Outcomes:
    counts = np.bincount(codes, minlength=len(Outcome)).tolist()
    return metrics.Outcomes(retained=counts[0], timely=counts[1], late=counts[2], miss=counts[3])


def _stalls_us(rounds: Sequence[Log]) -> NDArray[np.float64]:
    """One sample a demand: how long it waited, 0 if all its pages were there."""
    return np.array(
        [
            served.stalled_ns / 1e3 if served.outcomes.max(initial=0) >= Outcome.LATE else 0.0
            for log in rounds
            for served in log.measured
        ]
    )


def _latency_us(log: Log) -> float:
    """Mean over pages of the page's wait and its batch's hand-over."""
    waits = sum(int(s.waits_ns.sum()) + s.handover_ns * len(s.waits_ns) for s in log.measured)
    return waits / 1e3 / sum(len(s.waits_ns) for s in log.measured)


def _per_layer(rounds: Sequence[Log]) -> metrics.PerLayer:
    layers = rounds[0].layers
    counts = np.zeros((len(Outcome), layers), np.int64)
    for log in rounds:
        for number, served in enumerate(log.measured):
            counts[:, number % layers] += np.bincount(served.outcomes, minlength=len(Outcome))
    return metrics.PerLayer(miss=counts[Outcome.MISS].tolist(), late=counts[Outcome.LATE].tolist())


def _far(rounds: Sequence[Log]) -> metrics.Far:
    far = np.concatenate([s.demand.far for log in rounds for s in log.measured])
    missed = np.concatenate([s.outcomes == Outcome.MISS for log in rounds for s in log.measured])
    pages = int(np.count_nonzero(far))
    misses = float(np.count_nonzero(far & missed))
    return metrics.Far(pages=pages, miss_rate=metrics.ratio(misses, float(pages)))


def _cpu_us(rounds: Sequence[Log]) -> float | None:
    used = [log.cpu_ns for log in rounds if log.cpu_ns is not None]
    return sum(used) / 1e3 if used else None


def _grown(log: Log, name: str) -> int:
    if log.before is None or log.after is None:
        return 0  # of several clients of one daemon, one tells the counters
    return int(getattr(log.after, name)) - int(getattr(log.before, name))


def _depth(log: Log) -> Iterator[float]:
    """Mean operations in flight, of the time when there were any after the warm-up, if any."""
    if log.before and log.after and (busy_ns := _grown(log, "busy_ns")):
        ends = ((log.after, 1), (log.before, -1))
        yield sum(end.achieved_depth * end.busy_ns * sign for end, sign in ends) / busy_ns


def _prefetch(
    outcomes: metrics.Outcomes, rounds: Sequence[Log], page_bytes: int
) -> metrics.Prefetch:
    """Of the measured steps. A prefetch may end long after its issue, so what the warm-up left
    undecided counts as issued too: no verdict is given on what was not."""
    total: Counter[str] = Counter()
    for log in rounds:
        if log.before and log.after:
            total.update(log.after.prefetch)
            before = Counter(log.before.prefetch)
            told = before["useful"] + before["late"] + before["wasted"]
            before["issued"] = told
            total.subtract(before)
    return metrics.prefetch_figures(
        outcomes,
        issued=total["issued"],
        useful=total["useful"],
        late=total["late"],
        wasted=total["wasted"],
        pollution=total["pollution"],
        page_bytes=page_bytes,
        pages_read=sum(_grown(log, "pages_read") for log in rounds),
    )


def _decisions(rounds: Sequence[Log]) -> metrics.Distribution:
    samples = [log.after.decision_ns for log in rounds if log.after]
    return metrics.distribution(np.concatenate([np.empty(0, np.int64), *samples]) / 1e3)


def _failures(rounds: Sequence[Log]) -> dict[str, int]:
    failures: Counter[str] = Counter()
    for log in rounds:
        if log.after:
            failures.update(log.after.failures)
            if log.after.abandoned:
                failures["reads that did not end in time"] += log.after.abandoned
        missing = sum(int(np.count_nonzero(~served.present)) for served in log.served)
        if missing:
            failures["pages that could not be had"] += missing
    return dict(failures)


def client_bound(name: str, rounds: Sequence[Log]) -> str | None:
    """A verdict in words where the processor, not the drive, set the pace of a run."""
    cpu_us = _cpu_us(rounds)
    if cpu_us is None:
        return None
    wall_ns = sum(sum(log.step_ns[log.warmup_steps :]) for log in rounds)
    busy = cpu_us * 1e3 / wall_ns
    polls = any(log.after and "polling" in log.after.engine for log in rounds)
    if busy < 0.9 + polls:  # a polling thread is busy by design
        return None
    return (
        f"CLIENT-BOUND: run {name} kept {busy:.1f} processors busy all the time; its figures say "
        "more of this host than of the drive"
    )
