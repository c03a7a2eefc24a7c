"""A picture of a running engine's counters, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.assembly import Parts
from prefetchd.engine import Engine
from prefetchd.model import Outcome
from prefetchd.paths import PathStats
from prefetchd.puts import Puts
from prefetchd.waits import WaitCounts, Waits


class StoreWrites(msgspec.Struct, frozen=True):
    """What was written, and what became of blocks; `msgspec.json.encode` takes it.

    `blocks_rotten`: removed because a page was no longer what was written, in two reads of it.
    `blocks_at_risk`: found, and not yet on the medium: what a crash would take now. Of the blocks
    put fast, `blocks_staged` were found at once, `blocks_waited` once they were written, since
    staging had no room; `blocks_lost` were found and could not be written. `blocks_open`: growing.
    `written_per_reused`: bytes written per byte demanded and had (None: nothing was demanded).
    `stopped`: why nothing is written, in words. `hint`: what the kernel was told of its lifetime.
    """

    payload_bytes: int
    header_bytes: int
    journal_bytes: int
    flushes: int
    blocks_admitted: int
    blocks_refused: int
    blocks_evicted: int
    leases_cut: int
    blocks_expired: int
    blocks_rotten: int
    blocks_at_risk: int
    blocks_staged: int
    blocks_waited: int
    blocks_lost: int
    blocks_open: int
    blocks_used: int
    blocks_max: int
    written_per_reused: float | None
    stopped: str
    hint: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since open. Pages unless the name says otherwise. `ops_in_flight`, `ops_queued`: with
    the device, and waiting for it to have room."""

    device: str
    engine: str
    gpu: str
    predictor: str
    evict: str
    notes: tuple[str, ...]
    slots: int
    slots_used: int
    slots_pinned: int
    blocks: int
    blocks_visible: int
    outcomes: dict[str, int]
    prefetch: dict[str, int]
    failures: dict[str, int]
    paths: tuple[PathStats, ...]
    proofs: dict[str, str]
    hints_dropped: int
    retried: int
    failed: int
    expired: int
    abandoned: int
    writes_given_up: int
    pages_read: int
    pages_prefetched: int
    bytes_read: int
    bytes_written: int
    store_writes: StoreWrites
    waits: WaitCounts
    ops_in_flight: int
    ops_queued: int
    achieved_depth: float
    busy_ns: int
    prefetch_budget: int
    base_latency_us: float
    service_us: float
    decision_ns: NDArray[np.int64]
    encrypted: bool


def _store_writes(parts: Parts, puts: Puts, blocks_open: int) -> StoreWrites:
    writer, counters = parts.driver.writer, parts.core.counters
    written = writer.commit.written
    had = int(counters.outcomes.sum()) - counters.failed - counters.expired
    reused = max(0, had) * parts.store.superblock.page_bytes
    return StoreWrites(
        payload_bytes=written.payload,
        header_bytes=written.header,
        journal_bytes=written.journal,
        flushes=written.flushes,
        blocks_admitted=writer.admitted,
        blocks_refused=puts.admission.refused,
        blocks_evicted=puts.room.evicted,
        leases_cut=puts.room.leases_cut,
        blocks_expired=puts.room.expired,
        blocks_rotten=puts.room.rotten,
        blocks_at_risk=writer.at_risk,
        blocks_staged=puts.behind.staged,
        blocks_waited=puts.behind.waited,
        blocks_lost=puts.behind.lost,
        blocks_open=blocks_open,
        blocks_used=parts.catalog.blocks_used,
        blocks_max=parts.catalog.blocks_max,
        written_per_reused=written.total / reused if reused else None,
        stopped=puts.room.stopped,
        hint=parts.write_hint,
    )


def take_stats(parts: Parts, engine: Engine, puts: Puts, blocks_open: int, waits: Waits) -> Stats:
    """What takes long to count is counted without the engine's lock: nobody is to wait for it."""
    with engine.lock:
        made = _counters(parts, engine, puts, blocks_open)
        waited = waits.snapshot()
    staging = parts.core.staging
    return made(
        slots_used=int(np.count_nonzero(staging.page_of >= 0)),
        slots_pinned=int(np.count_nonzero(staging.held())),
        waits=waited(),
        decision_ns=engine.decision_ns.values(),
    )


def _counters(parts: Parts, engine: Engine, puts: Puts, blocks_open: int) -> partial[Stats]:
    """What is quickly counted; it lacks the rest."""
    core, driver = parts.core, parts.driver
    counters, staging = core.counters, core.staging
    base_ns, service_ns = core.planner.device_times_ns()
    return partial(
        Stats,
        device=parts.device.name,
        engine=parts.device.engine,
        gpu=parts.gpu.engine,
        predictor=parts.predictor_name,
        evict=staging.eviction.name,
        notes=parts.notes,
        slots=staging.slots,
        blocks=parts.geometry.blocks,
        blocks_visible=parts.catalog.blocks_visible,
        outcomes={o.name.lower(): int(counters.outcomes[o]) for o in Outcome},
        prefetch=counters.prefetches(),
        failures=dict(driver.blame.failures),
        paths=driver.paths.stats(),
        proofs=dict(parts.store.proofs),
        hints_dropped=engine.hints_dropped,
        retried=counters.retried,
        failed=counters.failed,
        expired=counters.expired,
        abandoned=counters.abandoned,
        writes_given_up=driver.writer.given_up,
        pages_read=counters.demand_reads + counters.prefetch_reads,
        pages_prefetched=counters.prefetch_reads,
        bytes_read=driver.bytes_read,
        bytes_written=driver.writer.commit.written.total,
        store_writes=_store_writes(parts, puts, blocks_open),
        ops_in_flight=parts.device.in_flight,
        ops_queued=sum(len(ops) for queue in driver.waiting for ops in queue),
        achieved_depth=driver.depth.mean,
        busy_ns=driver.depth.busy_ns,
        prefetch_budget=core.planner.budget(),
        base_latency_us=base_ns / 1e3,
        service_us=service_ns / 1e3,
        encrypted=parts.catalog.cipher is not None,
    )
