"""From what several clients of one daemon saw to the figures of a run, and of each client.

Decides what is told of all together and what of one: times and outcomes are a client's own, the
counters of device and prefetching are the daemon's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from prefetchd import metrics
from prefetchd.bench.decode_loop import Counts, Log
from prefetchd.bench.figures import run_figures
from prefetchd.bench.runs import DecodeSettings, Plan


@dataclass(frozen=True, slots=True)
class Round:
    """What the clients saw, and how much of a processor the daemon took."""

    logs: list[Log]
    daemon_share: float


def crowd_figures(
    plan: Plan, rounds: Sequence[Round], settings: DecodeSettings
) -> tuple[metrics.Run, list[metrics.Run]]:
    """All clients as one run, whose TPOT of a round is the mean of theirs; and, if they are
    several, each."""
    tpots = [float(np.mean([_tpot_ms(log) for log in one.logs])) for one in rounds]
    run = _figures(plan.name, plan, settings, _all(rounds))
    run = msgspec.structs.replace(run, tpot_ms=float(np.median(tpots)), tpot_ms_rounds=tpots)
    if len(rounds[0].logs) == 1:
        return run, []
    each = []
    for number in range(len(rounds[0].logs)):
        logs = [one.logs[number] for one in rounds]
        each.append(_own(_figures(f"{plan.name} client {number}", plan, settings, logs)))
    return run, each


def _tpot_ms(log: Log) -> float:
    return float(np.mean(log.step_ns[log.warmup_steps :])) / 1e6


def _all(rounds: Sequence[Round]) -> list[Log]:
    """The logs of all clients. Counters are the daemon's: of each round's clients one tells them,
    from when the first had warmed up to when the last had ended."""
    found = []
    for one in rounds:
        befores = [log.before for log in one.logs if log.before is not None]
        afters = [log.after for log in one.logs if log.after is not None]
        before = min(befores, key=_read, default=None)
        after = max(afters, key=_read, default=None)
        first, *others = one.logs
        found.append(replace(first, before=before, after=after))
        found += [replace(log, before=None, after=None) for log in others]
    return found


def _read(counts: Counts) -> int:
    return counts.pages_read


def _figures(name: str, plan: Plan, settings: DecodeSettings, logs: Sequence[Log]) -> metrics.Run:
    return run_figures(
        name,
        control=plan.control,
        evict=plan.evict,
        rounds=logs,
        page_bytes=settings.page_bytes,
        seed=settings.seed,
    )


def _own(run: metrics.Run) -> metrics.Run:
    """Without what is the daemon's and not this client's."""
    return msgspec.structs.replace(
        run,
        prefetch=metrics.Prefetch(),
        device_bytes=0,
        achieved_depth=None,
        device_gb_s=None,
        failures={},
    )


def bound(name: str, rounds: Sequence[Round]) -> list[str]:
    """A verdict where processors, not the drive, set the pace."""
    shares = []
    for one in rounds:
        busy = one.daemon_share
        for log in one.logs:
            busy += (log.cpu_ns or 0) / sum(log.step_ns[log.warmup_steps :])
        shares.append(busy)
    busy, there = float(np.median(shares)), len(os.sched_getaffinity(0))
    if busy < 0.9 * there:
        return []
    return [
        f"CLIENT-BOUND: run {name} kept {busy:.1f} of {there} processors busy all the time, clients"
        " and daemon together; its figures say more of this host than of the drive"
    ]
