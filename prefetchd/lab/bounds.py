"""What no prefetcher can do better, even one that knows all demands: a bound on late and missing.

Decides which of the device's and the staging's limits are counted, so that the bound holds for
whatever issues the reads. Knows no policy and no predictor. It is a lower bound, not always to be
reached: a page that is read ahead takes a slot until its demand, which only `fewest_late` without a
lead counts.

The terms. The device starts at most one read every `page_ns`, none takes less time. A demand comes
at its time, whatever happened before it. All its pages have slots from then on, as the core gives
them; a page is on time if it is there by then, otherwise it is late or missing, and counts one.
With a lead, a page is read ahead for a demand no sooner than that long before it, but may be kept
from its use before, and be read for that one as late as one likes, at no cost.

Why it holds. Take any consecutive demands, and the pages among them that are not kept from their
use before: those that are on time were read in the time from the lead before the first to the last
of these demands, so no more than fit into it. Groups of demands with no demand in common add up, so
what is late is at least what cannot be read of each group less what can be kept for it at best. The
latter is at most what Belady keeps of all uses in groups that lack anything. And it is at most what
can be kept if each page frees its slot as soon as the group of its next use begins: then of the
pages kept for a group the ones with the latest use before take the fewest slots, so only as many of
those as the group lacks need to be considered, and Belady's rule keeps the most of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.belady import (
    NEVER,
    Demands,
    belady_kept,
    belady_misses,
    columns,
    first_uses,
    next_uses,
)
from prefetchd.model import Ids, Mask

_SPANS = 6
"""Lengths of time, each a quarter of the one before, by which demands are put into groups."""


def fewest_late(
    demands: Demands,
    times_ns: NDArray[np.int64],
    slots: int,
    page_ns: float,
    *,
    lead_ns: int | None = None,
    first_is_put: bool = False,
    first: int = 0,
) -> int:
    """How many demanded pages at least are late or missing, staging empty at first.

    `times_ns` (int64, one a demand) never falls. `page_ns`: time from one read to the next at the
    device's full rate, 1e9 / (pages/s). `lead_ns`: how long before its demand a page can be asked
    for; None: from the first demand on. With `first_is_put` the first use of a page brings it.
    `first`: without a lead, only demands from this one on count, whatever was staged before it.
    Raises ValueError for times that fall, or a demand of more pages than there are slots.
    """
    if len(times_ns) and (np.diff(times_ns) < 0).any():
        raise ValueError(f"times fall at demand {int(np.argmax(np.diff(times_ns) < 0)) + 1}")
    if len(times_ns) == 0:
        return 0
    if lead_ns is None:
        misses = belady_misses(demands, slots, first_is_put=first_is_put)
        filled = slots if first else 0
        return _beyond_bucket(misses[first:], times_ns[first:], slots, page_ns, filled)
    pages, sizes = columns(demands)
    asked = np.ones(len(pages), np.bool_)
    if first_is_put:
        asked[first_uses(pages)] = False
    use_ns = times_ns.repeat(sizes)
    most = 0
    for groups in _groupings(use_ns, lead_ns):
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        readable = _readable(use_ns, starts, page_ns, lead_ns)
        wanted = _wanted(pages, asked, groups, readable)
        lacking = int(np.count_nonzero(wanted))
        if lacking <= most:
            continue
        counts = np.diff(starts, append=len(pages))
        begins = starts.repeat(counts)
        needy = np.logical_or.reduceat(wanted, starts).repeat(counts)
        ways = ((asked & needy, None), (wanted, begins))
        kept = min(
            np.count_nonzero(
                belady_kept(
                    pages, sizes, slots, first_is_put=first_is_put, wanted=useful, until=until
                )
            )
            for useful, until in ways
        )
        most = max(most, lacking - int(kept))
    return most


def fewest_late_reads(due_ns: NDArray[np.int64], page_ns: float, lead_ns: int) -> int:
    """The same when it is settled what is kept: `due_ns` (int64, rising) are the demands of all
    pages that have to be read, each from `lead_ns` before on. The minimum, not only a bound.

    To read in the order of demand and to skip what would be late is optimal here, since all reads
    take the same time and what may begin earlier is due earlier.
    """
    late, free_ns = 0, -np.inf
    for due in due_ns.tolist():
        end_ns = max(free_ns, due - lead_ns) + page_ns
        if end_ns > due + 1e-3:
            late += 1
        else:
            free_ns = end_ns
    return late


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


def _groupings(use_ns: NDArray[np.int64], lead_ns: int) -> list[NDArray[np.int64]]:
    """Ways to divide the uses into groups of consecutive ones: per use the number of its group."""
    since_ns = use_ns - use_ns[0]
    spans = [int(since_ns[-1]) + 1 >> 2 * shift for shift in range(_SPANS)]
    spans += [max(1, lead_ns) << 2 * shift for shift in range(2)] + [1]
    found = [since_ns // span for span in sorted({span for span in spans if span > 0})]
    # A group that begins after a pause longer than the lead shares no time with the one before.
    pauses = np.cumsum(np.diff(since_ns, prepend=0) > lead_ns)
    return [*found, pauses]


def _readable(
    use_ns: NDArray[np.int64], starts: Ids, page_ns: float, lead_ns: int
) -> NDArray[np.int64]:
    """For each use how many pages can be read in time for the whole of its group."""
    counts = np.diff(starts, append=len(use_ns))
    time_ns = use_ns[starts + counts - 1] - use_ns[starts] + lead_ns
    return np.floor(time_ns / page_ns + 1e-6).astype(np.int64).repeat(counts)


def _wanted(
    pages: Ids, asked: Mask, groups: NDArray[np.int64], readable: NDArray[np.int64]
) -> Mask:
    """Of each group as many demanded uses as cannot be read: those with the latest use before."""
    before = np.full(len(pages), -1, np.int64)
    following = next_uses(pages)
    again = following < NEVER
    before[following[again]] = np.flatnonzero(again)
    uses = np.flatnonzero(asked)
    order = uses[np.lexsort((-before[uses], groups[uses]))]
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    counts = np.diff(np.append(starts, len(order)))
    lacking = np.maximum(counts - readable[order[starts]], 0)
    place = np.arange(len(order)) - starts.repeat(counts)
    wanted = np.zeros(len(pages), np.bool_)
    wanted[order[place < lacking.repeat(counts)]] = True
    return wanted
