"""`prefetchd simulate restore`: options, progress and output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd.bench.decode_options import Depth, Evict, Html, Json, names
from prefetchd.bench.output import Outputs, progress_bars
from prefetchd.bench.restore_command import (
    GroupBlocks,
    check_numbers,
    default_staging,
    read_trace,
    show,
    whole_blocks,
)
from prefetchd.bench.restore_replay import CONTROLS, Plan, plans
from prefetchd.bench.restore_result import RestoreResult, RestoreSettings
from prefetchd.drive_profile import DEFAULT, DriveProfile, load_profile
from prefetchd.lab.dpu import NO_DPU, Dpu, read_dpu
from prefetchd.lab.requests import Requests
from prefetchd.lab.simulate_command import DeviceProfile, DpuFile, Seed
from prefetchd.lab.simulate_restore import simulate_restore


def restore(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Requests (.jsonl, .jsonl.gz); default: the embedded ones."),
    ] = None,
    device_profile: DeviceProfile = DEFAULT,
    dpu: DpuFile = None,
    staging_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks that fit into DRAM; default: the DPU's, or a quarter of all."),
    ] = None,
    block_bytes: Annotated[str, typer.Option(help="Bytes of a block.")] = "4MiB",
    lead_ms: Annotated[
        list[float] | None,
        typer.Option(help="How long before its start a request is announced; repeatable."),
    ] = None,
    hints: Annotated[
        bool, typer.Option(help="Tell the blocks ahead; else demand the first two then.")
    ] = True,
    limit_blocks_s: Annotated[
        float,
        typer.Option(help="Instead of a profile: so many reads a second, one by one; 0: none."),
    ] = 0.0,
    consume_blocks_s: Annotated[float, typer.Option(help="Blocks a second a request takes.")] = 200,
    requests: Annotated[int | None, typer.Option(help="Only the first requests.")] = None,
    group_blocks: GroupBlocks = 1,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Predictor by name or file; repeatable.")
    ] = None,
    controls: Annotated[str, typer.Option(help="Controls, by comma.")] = ",".join(CONTROLS),
    evict: Evict = "lru",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with its own slow reads.")] = 1,
    depth: Depth = 128,
    seed: Seed = 1,
    json: Json = None,
    report: Html = None,
) -> None:
    """Restore requests that come back as `replay restore` does, on a drive that need not be there.

    Times are the trace's own.
    """
    outputs = Outputs(json, report)
    outputs.check()
    leads = lead_ms or [500.0]
    check_numbers(leads, staging_blocks, requests, limit_blocks_s, consume_blocks_s, 1.0)
    profile = load_profile(device_profile)
    processor = read_dpu(dpu) if dpu else NO_DPU
    size = whole_blocks(block_bytes)
    load = read_trace(trace, requests, group_blocks)
    staging = staging_blocks or processor.staging_bytes // size or default_staging(load)
    settings = RestoreSettings(
        trace=load.name,
        trace_how=load.how,
        requests=len(load),
        blocks=load.distinct,
        block_bytes=size,
        group_blocks=group_blocks,
        staging_blocks=min(staging, load.distinct),
        leads_ms=leads,
        hints=hints,
        limit_blocks_s=limit_blocks_s,
        consume_blocks_s=consume_blocks_s,
        speed=1.0,
        evict=evict,
        depth=depth,
        rounds=rounds,
        seed=seed,
    )
    lines = plans(settings, predictor or ["cross_request"], names(controls))
    console = Console(stderr=True)
    show(outputs, console, _run(load, settings, lines, profile, processor, console))


def _run(
    load: Requests,
    settings: RestoreSettings,
    lines: list[Plan],
    profile: DriveProfile,
    dpu: Dpu,
    console: Console,
) -> RestoreResult:
    with progress_bars(console) as bar:
        simulating = bar("simulating", settings.rounds * len(lines) * len(load))
        return simulate_restore(load, settings, lines, profile, dpu, simulating)
