"""A day of traffic out of recorded sessions: when each begins, and which of its blocks are kept.

Decides the layout of a day. Session k begins `k * gap` after the first and keeps its own times;
sessions are taken in the file's order, over and over with fresh block ids, until the day is full,
and what would come after its end is cut off. Blocks are sampled by number: one in `sample` is kept
wherever it is needed, so that reuse and order stay what they were while a day takes minutes
(spatial sampling, Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.requests import Requests
from prefetchd.model import Ids

HOUR_NS = 3_600_000_000_000


def lay_out(requests: Requests, hours: float, gap_s: float, sample: int) -> Requests:
    """Requests of one day, by arrival. Those that are left without a block are left out."""
    requests = _sampled(requests, sample)
    end_ns, gap_ns = int(hours * HOUR_NS), int(gap_s * 1e9)
    of_session = _by_session(requests)
    numbers: list[Ids] = []
    times: list[NDArray[np.int64]] = []
    sessions: list[Ids] = []
    for session in range(-(-end_ns // gap_ns)):
        mine = of_session[session % len(of_session)]
        at_ns = requests.arrival_ns[mine] - requests.arrival_ns[mine[0]] + session * gap_ns
        mine, at_ns = mine[at_ns < end_ns], at_ns[at_ns < end_ns]
        numbers.append(mine)
        times.append(at_ns)
        sessions.append(np.full(len(mine), session))
    every, at_ns, session_of = map(np.concatenate, (numbers, times, sessions))
    order = np.argsort(at_ns, kind="stable")
    words = f"session k begins {gap_s:g} s x k; one block in {sample}; cut after {hours:g} h"
    rounds = session_of[order] // len(of_session)
    return _taken(requests, every[order], rounds, at_ns[order], session_of[order], words)


def _sampled(requests: Requests, sample: int) -> Requests:
    kept = requests.blocks % sample == 0
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return replace(requests, blocks=requests.blocks[kept] // sample, starts=before[requests.starts])


def _by_session(requests: Requests) -> list[Ids]:
    """Of each session its requests that have a block; sessions without any are left out."""
    some = np.flatnonzero(np.diff(requests.starts) > 0)
    order = some[np.argsort(requests.session[some], kind="stable")]
    first = np.flatnonzero(np.diff(requests.session[order])) + 1
    return np.split(order, first)


def _taken(
    requests: Requests,
    numbers: Ids,
    rounds: Ids,
    at_ns: NDArray[np.int64],
    session: Ids,
    words: str,
) -> Requests:
    """These requests at these times; `rounds` tells how often their session was taken before."""
    fresh = rounds * requests.distinct
    chains = [
        requests.chain(number) + offset
        for number, offset in zip(numbers.tolist(), fresh.tolist(), strict=True)
    ]
    sizes = np.array([len(chain) for chain in chains], np.int64)
    return Requests(
        name=requests.name,
        arrival_ns=at_ns,
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        blocks=np.concatenate(chains),
        session=session,
        stops=tuple(requests.stops[number] for number in numbers.tolist()),
        think_ns=requests.think_ns[numbers],
        quantum_ns=requests.quantum_ns,
        how=words,
    )
