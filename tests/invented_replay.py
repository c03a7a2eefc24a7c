"""An invented replay result, shaped like a real one. A test fixture: nothing in it was measured."""

from __future__ import annotations

import numpy as np

from prefetchd import metrics
from prefetchd.metrics import Device, Far, Gpu, Outcomes, PerLayer, Result, Run, Settings

LAYERS, STEPS, WARMUP, ROUNDS, PAGES = 30, 160, 16, 3, 27
PAGE_BYTES = 65_536

# name: control, evict, late and miss share, wait of a late and of a missed page (us)
SHAPES: dict[str, tuple[bool, str, float, float, float, float]] = {
    "resident": (True, "lru", 0.0, 0.0, 0, 0),
    "none": (True, "lru", 0.0, 0.037, 0, 190),
    "cold": (True, "lru", 0.0, 1.0, 0, 900),
    "oracle": (True, "cycle", 0.0006, 0.0001, 40, 190),
    "sliding_window": (False, "cycle", 0.0, 0.024, 0, 185),
    "attention": (False, "cycle", 0.0032, 0.0021, 70, 205),
    "auto": (False, "cycle", 0.0036, 0.0026, 70, 205),
}


def invented_run(name: str, seed: int = 0) -> Run:
    control, evict, late_share, miss_share, late_us, miss_us = SHAPES[name]
    random = np.random.default_rng([seed, *name.encode()])
    shape = (ROUNDS, STEPS, LAYERS)
    warmth = np.ones(STEPS)
    if 0 < miss_share < 1:
        warmth[:WARMUP] += np.geomspace(0.4 / miss_share, 0.5, WARMUP)
    layer = 0.5 + np.sin(np.arange(LAYERS) * 0.7 + 1) ** 2
    chance = np.clip(miss_share * warmth[:, None] * (layer if miss_share < 1 else 1), 0, 1)
    missed = random.binomial(PAGES, np.broadcast_to(chance, shape))
    late = random.binomial(PAGES, np.full(shape, late_share))
    slow = random.lognormal(0, 0.35, shape) * (1 + 9 * (random.random(shape) < 0.002))
    stall = (np.where(missed > 0, miss_us + 9 * missed, 0) + late_us * (late > 0)) * slow
    step_ms = (stall.sum(2) / 1e3) + LAYERS * 0.6 * (1 + random.normal(0, 0.002, shape[:2])) + 0.4
    measured = np.s_[:, WARMUP:]
    tpot = step_ms[measured].mean(1)
    total = missed[measured].size * PAGES
    n_late, n_miss = int(late[measured].sum()), int(missed[measured].sum())
    prefetching = name in {"oracle", "attention", "auto"}
    timely = int(total * 0.045) if prefetching else 0
    outcomes = Outcomes(
        retained=total - timely - n_late - n_miss, timely=timely, late=n_late, miss=n_miss
    )
    wasted = int(0.6 * timely) if prefetching and not control else 0
    return Run(
        name=name,
        control=control,
        evict=evict,
        outcomes=outcomes,
        **metrics.rates(outcomes),  # type: ignore[arg-type]
        tpot_ms=float(np.median(tpot)),
        tpot_ms_rounds=tpot.tolist(),
        stalled_share=float((stall[measured] > 0).mean()),
        effective_latency_us=float(stall[measured].mean() * 0.7 + 2.4),
        stall_us=metrics.distribution(stall[measured].ravel()),
        stall_ccdf=metrics.ccdf(stall[measured].ravel()),
        prefetch=metrics.prefetch_figures(
            outcomes,
            issued=timely + n_late + wasted + 150 * prefetching,
            useful=timely,
            late=n_late,
            wasted=wasted,
            pollution=wasted // 20,
            page_bytes=PAGE_BYTES,
            pages_read=timely + n_late + n_miss + wasted,
        ),
        device_bytes=(timely + n_late + n_miss + wasted) * PAGE_BYTES,
        achieved_depth=None if name == "resident" else 3.1 + 20 * miss_share,
        decision_us=metrics.distribution(random.lognormal(4.4, 0.5, 0 if control else 12_000)),
        cpu_us_per_page=3.4 + 2 * prefetching,
        step_ms=step_ms[metrics.median_round(tpot.tolist())].tolist(),
        per_layer=PerLayer(
            miss=missed[measured].sum((0, 1)).tolist(), late=late[measured].sum((0, 1)).tolist()
        ),
        far=Far(pages=total // 6, miss_rate=min(1.0, 5.2 * n_miss / total)),
        verified_pages=0 if name == "resident" else timely + n_miss,
    )


def invented_result(*names: str) -> Result:
    """A result of these runs, of all of them by default."""
    return Result(
        device=Device(
            name="uring",
            engine="io_uring, fixed buffers, fixed files",
            file_system="ext4",
            kind="MEASURED",
            gpu=Gpu(name="host", engine="numpy gather into ordinary memory"),
        ),
        settings=Settings(
            trace="invented_for_tests",
            steps=STEPS,
            warmup_steps=WARMUP,
            rounds=ROUNDS,
            layers=LAYERS,
            blocks=368,
            page_bytes=PAGE_BYTES,
            staging_share=0.25,
            staging_slots=2_760,
            top_k=16,
            layer_us=600,
            hints=True,
            evict="cycle",
            depth=64,
            seed=7,
            more={"cores": 2},
        ),
        runs=metrics.relate([invented_run(name) for name in names or SHAPES]),
    )
