"""Agents at work side by side: recorded sessions, so many of them live at any time.

Decides how sessions, which tell only their own time, are laid over one another, and what their live
contexts are. Knows no device and no policy.

A session begins `gap_s` after the one before it while fewer than `live` have begun, and later as
soon as one has ended; it keeps its own times, its thinking and its sub-agents'. A session's context
is what its latest request needed; it lives from its first request to its last.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.requests import Requests
from prefetchd.model import Ids


def interleaved(
    requests: Requests, live: int, *, gap_s: float = 1.0, limit: int | None = None
) -> Requests:
    """The first `limit` requests when so many sessions are live; blocks numbered anew.

    Raises ValueError if there are no sessions, or fewer than `live`.
    """
    sessions = np.unique(requests.session)
    if not 1 <= live <= len(sessions):
        raise ValueError(f"{len(sessions)} sessions cannot be {live} live ones")
    first = np.array([requests.arrival_ns[requests.session == one].min() for one in sessions])
    last = np.array([requests.arrival_ns[requests.session == one].max() for one in sessions])
    begins = _begins(last - first, live, int(gap_s * 1e9))
    place = np.searchsorted(sessions, requests.session)
    times = requests.arrival_ns - first[place] + begins[place]
    order = np.argsort(times, kind="stable")[:limit]
    words = f"{requests.how}; then {live} sessions live at a time, the first {gap_s:g} s apart"
    chains = [requests.chain(number) for number in order.tolist()]
    return _chosen(requests, order, times, chains, words)


def _begins(lasts_ns: NDArray[np.int64], live: int, gap_ns: int) -> NDArray[np.int64]:
    """When each session begins, by how long each lasts."""
    begins = np.zeros(len(lasts_ns), np.int64)
    ends: list[int] = []
    for number, lasts in enumerate(lasts_ns.tolist()):
        begins[number] = number * gap_ns if number < live else heapq.heappop(ends)
        heapq.heappush(ends, int(begins[number]) + lasts)
    return begins


def _chosen(
    requests: Requests,
    order: NDArray[np.int64],
    times: NDArray[np.int64],
    chains: list[Ids],
    how: str,
) -> Requests:
    """Those requests, in that order, with these blocks, numbered in the order of first need."""
    every = np.concatenate(chains)
    _, first, where = np.unique(every, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))

    def told(column: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        return None if column is None else column[order]

    return replace(
        requests,
        arrival_ns=times[order] - times[order[0]],
        starts=np.cumsum([0, *(len(chain) for chain in chains)]),
        blocks=rank[where],
        session=requests.session[order],
        stops=tuple(requests.stops[number] for number in order.tolist()),
        think_ns=requests.think_ns[order],
        how=how,
        input_tokens=told(requests.input_tokens),
        output_tokens=told(requests.output_tokens),
        agent=told(requests.agent),
    )


def live_contexts(requests: Requests) -> NDArray[np.int64]:
    """At each arrival the blocks of all live sessions' contexts (int64, one a request).

    A block that two sessions share would count twice; recorded sessions share none.
    """
    sizes = np.diff(requests.starts)
    ends = {int(one): number for number, one in enumerate(requests.session.tolist())}
    context: dict[int, int] = {}
    found = np.zeros(len(requests), np.int64)
    total = 0
    for number, session in enumerate(requests.session.tolist()):
        total += int(sizes[number]) - context.get(session, 0)
        context[session] = int(sizes[number])
        found[number] = total
        if ends[session] == number:
            total -= context.pop(session)
    return found
