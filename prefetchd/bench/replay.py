"""`prefetchd replay decode`: controls and predictors over one recorded decode, interleaved.

Decides which runs are made, on what staging, in which order, and what their figures are. One run
is `bench.decode`'s; words, tables and plots are `bench.tables`' and `bench.report`'s.

Rounds are interleaved and every run is preceded by the same idle gap, since shared disks burst
after idling: only figures of one replay may be compared, by medians and ratios.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from prefetchd import metrics, store
from prefetchd.assembly import DeviceFactory, GpuFactory, Options, PredictorFactory
from prefetchd.bench.content import block_names, block_pages
from prefetchd.bench.decode import Pace, Sums, run_decode
from prefetchd.bench.disk import cached_share, read_counter
from prefetchd.lab.workload import Workload
from prefetchd.layout import Layout, uniform
from prefetchd.predictors.oracle import Oracle
from prefetchd.runtime import Runtime, open_runtime

CONTROLS = ("resident", "none", "cold", "oracle")
_PRELOAD_PAGES = 1024


class ReplayError(Exception):
    """A replay cannot be run as asked: why, and what to do."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What is replayed and how. `staging_slots` is for all runs but `resident` and `cold`."""

    page_bytes: int = 65536
    staging_slots: int = 0
    layer_us: float = 600.0
    hints: bool = True
    top_k: int = 16
    predictors: tuple[str, ...] = ("auto",)
    controls: tuple[str, ...] = CONTROLS
    evict: str = "cycle"
    device: str | DeviceFactory = "uring"
    gpu: str | GpuFactory = "host"
    depth: int = 128
    rounds: int = 3
    warmup_steps: int = 16
    idle_s: float = 0.5
    seed: int = 1


@dataclass(slots=True)
class Report:
    """Progress in words and steps; either may be ignored."""

    say: Callable[[str], None] = lambda _: None
    steps: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Plan:
    """One line of the result: how its runtime is built."""

    name: str
    control: bool
    evict: str
    predictor: str | PredictorFactory
    slots: int


@dataclass(slots=True)
class _Seen:
    """What the runtimes said of themselves and of the medium."""

    device: str = ""
    engine: str = ""
    gpu: str = ""
    file_system: str = ""
    is_ram: bool = False
    notes: list[str] = field(default_factory=list)
    asked_bytes: int = 0
    medium_bytes: int | None = 0


def staging_slots(workload: Workload, share: float) -> int:
    """Slots for a share of all pages. Raises ReplayError if one layer and the next do not fit."""
    slots = int(share * workload.geometry.pages)
    return checked_slots(workload, slots)


def checked_slots(workload: Workload, slots: int) -> int:
    if slots < 2 * workload.widest:
        raise ReplayError(
            f"staging of {slots} pages is too small: one layer needs up to {workload.widest} at "
            f"once, and the layer before it is still held; give it at least {2 * workload.widest}"
        )
    return min(slots, workload.geometry.pages)


def prepare_store(
    directory: Path, workload: Workload, settings: ReplaySettings, report: Report
) -> None:
    """Create the store unless it is there, and put whatever blocks it lacks."""
    layout = _layout(workload, settings)
    names = block_names(workload.geometry.blocks, settings.seed)
    if not store.exists(directory):
        store.create(directory, layout, workload.geometry.blocks, fill=False)
    options = Options(device=settings.device, predictor="none", evict="lru", staging_bytes=1 << 20)
    slot_bytes = layout.slot_bytes(4096)
    options = replace(options, staging_bytes=max(1, 16) * slot_bytes)
    with open_runtime(directory, layout, options=options) as runtime:
        if len(runtime.lookup(names)) == len(names):
            return
        report.say("writing the store")
        shape = (workload.geometry.blocks, workload.geometry.layers, settings.page_bytes)
        pending = []
        for first, pages in block_pages(*shape, settings.seed):
            pending.append(runtime.put(names[first : first + len(pages)], pages))
            report.steps(len(pages))
        failed = [words for ticket in pending for words in ticket.wait().failures]
        if failed:
            raise ReplayError(f"the store in {directory} could not be written: {failed[0]}")


def _layout(workload: Workload, settings: ReplaySettings) -> Layout:
    return uniform(workload.geometry.layers, settings.page_bytes, name="replay")


def replay_decode(
    directory: Path, workload: Workload, settings: ReplaySettings, report: Report | None = None
) -> metrics.Result:
    """Run everything and say how it went. Raises ReplayError, StoreError, WrongBytes ..."""
    report = report or Report()
    plans = _plans(workload, settings)
    sums: dict[str, list[Sums]] = {plan.name: [] for plan in plans}
    seen = _Seen()
    for number in range(settings.rounds):
        # Every other round runs backwards, so that no run is always first after the pause.
        for plan in plans if number % 2 == 0 else reversed(plans):
            report.say(f"round {number + 1}: {plan.name}")
            time.sleep(settings.idle_s)
            sums[plan.name].append(_one(directory, workload, settings, plan, seen, report))
    runs = [_run(plan, sums[plan.name], settings) for plan in plans]
    return metrics.Result(
        device=_device(seen),
        settings=_settings(workload, settings),
        runs=metrics.relate(runs),
        notes=_verdicts(sums),
    )


def _plans(workload: Workload, settings: ReplaySettings) -> list[_Plan]:
    pages, slots = workload.geometry.pages, settings.staging_slots
    future = workload.future()
    controls = {
        "resident": _Plan("resident", True, "lru", "none", pages),
        "none": _Plan("none", True, "lru", "none", slots),
        "cold": _Plan("cold", True, "lru", "none", 2 * workload.widest),
        "oracle": _Plan("oracle", True, settings.evict, partial(Oracle, future=future), slots),
    }
    unknown = [name for name in settings.controls if name not in controls]
    if unknown:
        raise ReplayError(f"no control is called {unknown[0]!r}; there are {', '.join(CONTROLS)}")
    plans = [controls[name] for name in CONTROLS if name in settings.controls]
    for name in settings.predictors:
        known = {plan.name for plan in plans}
        shown = Path(name).stem if name.endswith(".py") else name
        shown = f"{shown}+{settings.evict}" if shown in known else shown
        if shown in known:
            raise ReplayError(f"predictor {name} is named twice")
        plans.append(_Plan(shown, False, settings.evict, name, slots))
    return plans


def _one(
    directory: Path,
    workload: Workload,
    settings: ReplaySettings,
    plan: _Plan,
    seen: _Seen,
    report: Report,
) -> Sums:
    layout = _layout(workload, settings)
    options = Options(
        staging_bytes=plan.slots * layout.slot_bytes(4096),
        device=settings.device,
        gpu=settings.gpu,
        predictor=plan.predictor,
        evict=plan.evict,
        depth=settings.depth,
    )
    pace = Pace(int(settings.layer_us * 1000), settings.hints, settings.warmup_steps)
    with open_runtime(directory, layout, options=options) as runtime:
        _check_blocks(runtime, workload, settings.seed)
        if plan.name == "resident":
            _preload(runtime)
        before = read_counter(runtime.medium)
        sums = run_decode(runtime, workload, pace, settings.seed, report.steps)
        _note(seen, runtime, before, read_counter(runtime.medium))
    return sums


def _check_blocks(runtime: Runtime, workload: Workload, seed: int) -> None:
    found = runtime.lookup(block_names(workload.geometry.blocks, seed))
    if len(found) < workload.geometry.blocks or (found != np.arange(len(found))).any():
        raise ReplayError("the store does not hold this trace's blocks; use a new folder")


def _preload(runtime: Runtime) -> None:
    pages = np.arange(runtime.geometry.pages, dtype=np.int64)
    for first in range(0, len(pages), _PRELOAD_PAGES):
        with runtime.demand(pages[first : first + _PRELOAD_PAGES]) as ticket:
            if ticket.missing.any():
                raise ReplayError("the store could not be read whole for the resident control")


def _note(seen: _Seen, runtime: Runtime, before: int | None, after: int | None) -> None:
    stats = runtime.stats()
    seen.device, seen.engine, seen.gpu = stats.device, stats.engine, stats.gpu
    seen.file_system, seen.is_ram = runtime.medium.file_system, runtime.medium.is_ram
    seen.notes += [note for note in stats.notes if note not in seen.notes]
    if runtime.medium.file_system == "none":
        seen.is_ram = True
    seen.asked_bytes += stats.bytes_read
    if before is None or after is None or seen.medium_bytes is None:
        seen.medium_bytes = None
    else:
        seen.medium_bytes += after - before


def _device(seen: _Seen) -> metrics.Device:
    notes = list(seen.notes)
    kind: metrics.Kind = "RAM" if seen.is_ram else "MEASURED"
    share = None if seen.is_ram else cached_share(seen.asked_bytes, seen.medium_bytes)
    if share is not None:
        kind = "CACHED"
        notes.append(
            f"CACHED: the drive moved only {1 - share:.0%} of the bytes that were read; a cache "
            "stands in front of it"
        )
    gpu_name = seen.gpu.split(" ", 1)[0]
    gpu = metrics.Gpu(name=gpu_name, engine=seen.gpu)
    return metrics.Device(
        name=seen.device,
        engine=seen.engine,
        file_system=seen.file_system,
        kind=kind,
        gpu=gpu,
        notes=notes,
    )


def _settings(workload: Workload, settings: ReplaySettings) -> metrics.Settings:
    geometry = workload.geometry
    return metrics.Settings(
        trace=workload.name,
        steps=workload.steps,
        warmup_steps=settings.warmup_steps,
        rounds=settings.rounds,
        layers=geometry.layers,
        blocks=geometry.blocks,
        page_bytes=settings.page_bytes,
        staging_share=settings.staging_slots / geometry.pages,
        staging_slots=settings.staging_slots,
        top_k=settings.top_k,
        layer_us=settings.layer_us,
        hints=settings.hints,
        evict=settings.evict,
        depth=settings.depth,
        seed=settings.seed,
        more={"idle_s": settings.idle_s},
    )


def _verdicts(sums: dict[str, list[Sums]]) -> list[str]:
    """CLIENT-BOUND (F6): the processor, not the drive, set the pace of a run."""
    notes = []
    for name, rounds in sums.items():
        wall = sum(sum(s.step_ns[-len(s.stall_ns) // max(1, len(s.layer_miss)) :]) for s in rounds)
        busy = sum(s.cpu_ns for s in rounds)
        if wall and busy > 0.9 * wall:
            notes.append(
                f"CLIENT-BOUND: run {name} used {busy / wall:.1f} processors all the time; its "
                "figures say more of this host than of the drive"
            )
    return notes


def _run(plan: _Plan, rounds: Sequence[Sums], settings: ReplaySettings) -> metrics.Run:
    warmup = settings.warmup_steps
    tpots = [float(np.mean(sums.step_ns[warmup:])) / 1e6 for sums in rounds]
    counts = [int(n) for n in np.sum([sums.outcomes for sums in rounds], axis=0)]
    outcomes = metrics.Outcomes(
        retained=counts[0], timely=counts[1], late=counts[2], miss=counts[3]
    )
    stall_us = np.concatenate([sums.stall_ns for sums in rounds]) / 1e3
    latencies = [sums.latency_ns / max(1, sums.pages) / 1e3 for sums in rounds]
    pages = sum(sums.pages for sums in rounds)
    far_pages = sum(sums.far_pages for sums in rounds)
    rates = metrics.rates(outcomes)
    middle = rounds[metrics.median_round(tpots)]
    return metrics.Run(
        name=plan.name,
        control=plan.control,
        evict=plan.evict,
        outcomes=outcomes,
        tpot_ms=float(np.median(tpots)),
        tpot_ms_rounds=tpots,
        hit_rate=rates["hit_rate"],
        miss_rate=rates["miss_rate"],
        late_rate=rates["late_rate"],
        stalled_share=float(np.mean(stall_us > 0)) if len(stall_us) else None,
        effective_latency_us=metrics.median(latencies),
        stall_us=metrics.distribution(stall_us),
        prefetch=_prefetch(outcomes, rounds, settings.page_bytes),
        device_bytes=sum(_grown(sums, "bytes_read") for sums in rounds),
        achieved_depth=metrics.median([s.after.achieved_depth for s in rounds if s.after]),
        decision_us=_decisions(rounds),
        cpu_us_per_page=metrics.ratio(sum(s.cpu_ns for s in rounds) / 1e3, float(pages)),
        step_ms=[ns / 1e6 for ns in middle.step_ns],
        stall_ccdf=metrics.ccdf(stall_us),
        per_layer=metrics.PerLayer(
            miss=np.sum([s.layer_miss for s in rounds], axis=0).tolist(),
            late=np.sum([s.layer_late for s in rounds], axis=0).tolist(),
        ),
        far=metrics.Far(
            pages=far_pages,
            miss_rate=metrics.ratio(float(sum(s.far_misses for s in rounds)), float(far_pages)),
        ),
        failures=_failures(rounds),
        verified_pages=sum(sums.verified for sums in rounds),
    )


def _grown(sums: Sums, name: str) -> int:
    assert sums.before is not None
    assert sums.after is not None
    return int(getattr(sums.after, name)) - int(getattr(sums.before, name))


def _prefetch(
    outcomes: metrics.Outcomes, rounds: Sequence[Sums], page_bytes: int
) -> metrics.Prefetch:
    grown: Counter[str] = Counter()
    reads = 0
    for sums in rounds:
        assert sums.before is not None
        assert sums.after is not None
        for name, value in sums.after.prefetch.items():
            grown[name] += value - sums.before.prefetch[name]
        reads += sums.after.pages_read - sums.before.pages_read
    return metrics.prefetch_figures(
        outcomes,
        issued=grown["issued"],
        useful=grown["useful"],
        late=grown["late"],
        wasted=grown["wasted"],
        pollution=grown["pollution"],
        page_bytes=page_bytes,
        pages_read=reads,
    )


def _decisions(rounds: Sequence[Sums]) -> metrics.Distribution:
    return metrics.distribution(
        np.concatenate([s.after.decision_ns for s in rounds if s.after]) / 1e3
    )


def _failures(rounds: Sequence[Sums]) -> dict[str, int]:
    failures: Counter[str] = Counter()
    for sums in rounds:
        if sums.after:
            failures.update(sums.after.failures)
        if sums.missing:
            failures["pages that could not be had"] += sums.missing
    return dict(failures)
