"""What nothing can beat, as figures of a result: Belady's eviction, and a clairvoyant prefetcher.

Decides what of a decode and of a restore the bounds are computed from, and in which words they are
told. How they are computed is `prefetchd.lab.belady`'s and `prefetchd.lab.bounds`'s matter.

Both take demands at the trace's own pace. A run that waits gives its drive more time than that, so
where the clairvoyant has late pages a run that waits a lot may have fewer; its step time, which
says nothing of pace, holds for all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd import metrics
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.belady import belady_misses, first_uses
from prefetchd.lab.bounds import fewest_late
from prefetchd.lab.requests import Requests
from prefetchd.lab.workload import Workload
from prefetchd.model import Ids

BELADY = "Belady's optimum: fewest misses of any eviction, without prefetch"
CLAIRVOYANT = (
    "knows all demands and reads ahead as fast as the drive can; nobody has fewer late and missing "
    "pages at the pace of the trace"
)


def read_spacing_ns(profile: DriveProfile, page_bytes: int) -> float:
    """Time from one read to the next when the drive is kept busy; no read takes less."""
    rate_gb_s = profile.read_gb_s
    if profile.link_gb_s:
        rate_gb_s = min(rate_gb_s, profile.link_gb_s)
    return max(1e3 * profile.read_us / profile.units, page_bytes / rate_gb_s)


def decode_bounds(
    workload: Workload, *, slots: int, warmup_steps: int, layer_us: float, page_ns: float
) -> list[metrics.Bound]:
    """Of the steps after the warm-up. `page_ns` as of `read_spacing_ns`."""
    demands = workload.future()
    layers = workload.geometry.layers
    first = warmup_steps * layers
    needed = sum(len(demand) for demand in demands[first:])
    misses = belady_misses(demands, slots)[first:]
    times_ns = np.arange(len(demands), dtype=np.int64) * int(1e3 * layer_us)
    late = fewest_late(demands, times_ns, slots, page_ns, first=first)
    missed = metrics.ratio(int(misses.sum()), needed)
    # Reads that cannot have been made before the first measured step.
    reading_ns = max(0, int(misses.sum()) - slots) * page_ns
    tpot_ns = max(1e3 * layer_us * layers, reading_ns / (workload.steps - warmup_steps))
    return [
        metrics.Bound(
            name="belady",
            meaning=BELADY,
            hit_rate=_rest(missed),
            late_rate=0.0,
            miss_rate=missed,
            stalled_share=float(np.mean(misses > 0)),
            reads_per_needed=missed,
        ),
        metrics.Bound(
            name="clairvoyant",
            meaning=CLAIRVOYANT,
            tpot_ms=tpot_ns / 1e6,
            tpot_ratio=metrics.ratio(tpot_ns, 1e3 * layer_us * layers),
            hit_rate=_rest(metrics.ratio(late, needed)),
        ),
    ]


def restore_bounds(
    requests: Requests, *, slots: int, block_ns: int, page_ns: float
) -> list[metrics.Bound]:
    """Of all blocks that requests restore, each demanded `block_ns` after the one before; the new
    ones are put, and so brought, when their request starts."""
    blocks, times_ns = _uses(requests, block_ns)
    needed = len(blocks) - len(first_uses(blocks))
    misses = int(belady_misses(blocks, slots, first_is_put=True).sum())
    late = fewest_late(blocks, times_ns, slots, page_ns, first_is_put=True)
    missed = metrics.ratio(misses, needed)
    return [
        metrics.Bound(
            name="belady",
            meaning=BELADY,
            hit_rate=_rest(missed),
            late_rate=0.0,
            miss_rate=missed,
            stalled_share=missed,
            reads_per_needed=missed,
        ),
        metrics.Bound(
            name="clairvoyant",
            meaning=CLAIRVOYANT,
            hit_rate=_rest(metrics.ratio(late, needed)),
        ),
    ]


def due(requests: Requests, block_ns: int) -> tuple[Ids, NDArray[np.int64]]:
    """Every block that a request restores and when it is due (rising), by arrivals."""
    counts = requests.reusable()
    starts = requests.starts[:-1]
    within = np.arange(int(counts.sum())) - (np.cumsum(counts) - counts).repeat(counts)
    blocks = requests.blocks[starts.repeat(counts) + within]
    due_ns = requests.arrival_ns.repeat(counts) + within * block_ns
    order = np.argsort(due_ns, kind="stable")
    return blocks[order], due_ns[order]


def _uses(requests: Requests, block_ns: int) -> tuple[Ids, NDArray[np.int64]]:
    """The same with the first use of each block, at the start of its request, before all others."""
    blocks, due_ns = due(requests, block_ns)
    first = first_uses(requests.blocks)
    owner = np.searchsorted(requests.starts, first, side="right") - 1
    blocks = np.concatenate([requests.blocks[first], blocks])
    times_ns = np.concatenate([requests.arrival_ns[owner], due_ns])
    order = np.argsort(times_ns, kind="stable")
    return blocks[order], times_ns[order]


def _rest(share: float | None) -> float | None:
    return None if share is None else 1 - share
