"""`prefetchd simulate restore`: options, progress and output."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd.bench.decode_options import Depth, Evict, Html, Json, check_outputs, names
from prefetchd.bench.restore_command import (
    check_numbers,
    default_staging,
    read_trace,
    show,
    whole_blocks,
)
from prefetchd.bench.restore_replay import Plan, plans
from prefetchd.bench.restore_result import RestoreResult, RestoreSettings
from prefetchd.bench.runs import Report
from prefetchd.drive_profile import DEFAULT, DriveProfile, load_profile
from prefetchd.lab.dpu import NO_DPU, Dpu, read_dpu
from prefetchd.lab.requests import Requests
from prefetchd.lab.simulate_command import DeviceProfile, DpuFile, Seed, progress_bar
from prefetchd.lab.simulate_restore import CONTROLS, simulate_restore

_DRAW_S = 0.5


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
    check_outputs(json, report)
    leads = lead_ms or [500.0]
    check_numbers(leads, staging_blocks, requests, limit_blocks_s, consume_blocks_s, 1.0)
    profile = load_profile(device_profile)
    processor = read_dpu(dpu) if dpu else NO_DPU
    size = whole_blocks(block_bytes)
    load = read_trace(trace, requests)
    staging = staging_blocks or processor.staging_bytes // size or default_staging(load)
    settings = RestoreSettings(
        trace=load.name,
        trace_how=load.how,
        requests=len(load),
        blocks=load.distinct,
        block_bytes=size,
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
    lines = plans(settings, predictor or ["cross_request"], names(controls), CONTROLS)
    console = Console(stderr=True)
    show(_run(load, settings, lines, profile, processor, console), json, report, console)


def _run(
    load: Requests,
    settings: RestoreSettings,
    lines: list[Plan],
    profile: DriveProfile,
    dpu: Dpu,
    console: Console,
) -> RestoreResult:
    with progress_bar(console) as progress:
        task = progress.add_task("simulating", total=settings.rounds * len(lines) * len(load))
        ended, drawn_s = 0, time.monotonic()

        def draw(count: int) -> None:
            nonlocal ended, drawn_s
            ended += count
            if time.monotonic() - drawn_s > _DRAW_S:
                progress.update(task, completed=ended)
                drawn_s = time.monotonic()

        report = Report(say=lambda words: progress.update(task, description=words), steps=draw)
        return simulate_restore(load, settings, lines, profile, dpu, report)
