"""`prefetchd replay restore`: its options and what is read before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd import registry
from prefetchd.bench import restore_options as options
from prefetchd.bench.decode_options import Controls, Depth, Evict, Html, Json, Predictors, names
from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import ReplayError
from prefetchd.bench.restore_replay import Plan, plans, replay_restore
from prefetchd.bench.restore_result import RestoreResult, RestoreSettings
from prefetchd.lab.requests import Requests


def restore(
    trace: options.TracePath = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder for the store of each run; default: a temporary one."),
    ] = None,
    device: Annotated[str, typer.Option(help="Storage device.")] = "uring",
    staging_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks that fit into DRAM; default: a quarter of the trace's."),
    ] = None,
    block_bytes: options.BlockBytes = "4KiB",
    lead_ms: options.Leads = None,
    hints: options.Hints = True,
    limit_blocks_s: Annotated[
        float, typer.Option(help="Hold reads to so many blocks a second (EMULATED); 0: no limit.")
    ] = 0.0,
    consume_blocks_s: options.ConsumeRate = 200,
    group_blocks: options.GroupBlocks = 1,
    requests: options.Limit = None,
    speed: Annotated[
        float, typer.Option(help="Arrivals, leads and rates so many times as fast.")
    ] = 1.0,
    predictor: Predictors = None,
    controls: Controls = options.ALL_CONTROLS,
    evict: Evict = "lru",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 1,
    idle_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Idle gap before every run.")
    ] = 0.5,
    depth: Depth = 128,
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Seed of the stored bytes.")] = 1,
    json: Json = None,
    report: Html = None,
) -> None:
    """Replay requests that come back; say how much of their KV was in DRAM when they started."""
    outputs = Outputs(json, report)
    outputs.check()
    leads = lead_ms or [500.0]
    options.check_numbers(leads, staging_blocks, requests, consume_blocks_s, speed)
    if not registry.storage_device_class(device).on_files:
        raise ReplayError(
            f"device {device} keeps no store on a path; use --limit-blocks-s to limit"
        )
    whole_bytes = options.whole_blocks(block_bytes)
    options.check_limit(limit_blocks_s, whole_bytes, speed)
    load = options.read_trace(trace, requests, group_blocks)
    slots = options.default_staging(load) if staging_blocks is None else staging_blocks
    named = names(controls)
    resident = "resident" in named
    check_memory(
        (load.distinct if resident else slots) * whole_bytes,
        "the resident control, which keeps all blocks," if resident else "staging",
        "--controls none, smaller --block-bytes or fewer --staging-blocks",
    )
    settings = RestoreSettings(
        trace=load.name,
        trace_how=load.how,
        requests=len(load),
        blocks=load.distinct,
        block_bytes=whole_bytes,
        staging_blocks=min(slots, load.distinct),
        leads_ms=leads,
        hints=hints,
        limit_blocks_s=limit_blocks_s,
        consume_blocks_s=consume_blocks_s,
        group_blocks=group_blocks,
        speed=speed,
        evict=evict,
        depth=depth,
        rounds=rounds,
        seed=seed,
    )
    lines = plans(settings, predictor or ["cross_request"], named)
    console = Console(stderr=True)
    with temporary_folder(store, console) as directory:
        directory.mkdir(exist_ok=True)
        result = _run(directory, load.faster(speed), settings, lines, device, idle_s, console)
    options.show(outputs, console, result)


def _run(
    directory: Path,
    load: Requests,
    settings: RestoreSettings,
    lines: list[Plan],
    device: str,
    idle_s: float,
    console: Console,
) -> RestoreResult:
    with progress_bars(console) as bar:
        report = bar("replaying", settings.rounds * len(lines) * len(load))
        return replay_restore(
            directory, load, settings, lines, device=device, idle_s=idle_s, report=report
        )
