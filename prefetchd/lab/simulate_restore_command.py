"""`prefetchd simulate restore`: options, progress and output."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prefetchd.bench import restore_options as options
from prefetchd.bench.decode_options import Controls, Depth, Evict, Html, Json, Predictors, names
from prefetchd.bench.output import Outputs, progress_bars
from prefetchd.bench.restore_replay import plans
from prefetchd.bench.restore_result import RestoreSettings
from prefetchd.bench.runs import ReplayError
from prefetchd.drive_profile import DEFAULT, SEED, load_profile, seed_notes
from prefetchd.lab.agents import interleaved, live_contexts
from prefetchd.lab.dpu import NO_DPU, read_dpu
from prefetchd.lab.requests import Requests
from prefetchd.lab.simulate_command import DeviceProfile, DpuFile, Rounds, Seed
from prefetchd.lab.simulate_restore import limited, simulate_restore
from prefetchd.units import parse_share


def restore(
    trace: options.TracePath = None,
    device_profile: DeviceProfile = DEFAULT,
    dpu: DpuFile = None,
    staging_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks that fit into DRAM; default: the DPU's, or a quarter of all."),
    ] = None,
    block_bytes: options.ModelledBlockBytes = None,
    lead_ms: options.Leads = None,
    hints: options.Hints = True,
    limit_blocks_s: Annotated[
        float,
        typer.Option(help="Instead of a profile: so many reads a second, one by one; 0: none."),
    ] = 0.0,
    consume_blocks_s: options.ConsumeRate = 200,
    take_blocks: Annotated[
        int, typer.Option(min=1, help="Blocks a request asks for at a time.")
    ] = 1,
    live_sessions: Annotated[
        int | None,
        typer.Option(min=1, help="Lay the sessions over one another, so many live at a time."),
    ] = None,
    live_share: Annotated[
        str | None,
        typer.Option(help="Staging as a share of the live sessions' contexts, as in 33%."),
    ] = None,
    requests: options.Limit = None,
    group_blocks: options.GroupBlocks = 1,
    predictor: Predictors = None,
    controls: Controls = options.ALL_CONTROLS,
    evict: Evict = "lru",
    rounds: Rounds = 1,
    depth: Depth = 128,
    seed: Seed = SEED,
    json: Json = None,
    report: Html = None,
) -> None:
    """Restore requests that come back as `replay restore` does, on a drive that need not be there.

    Times are the trace's own.
    """
    outputs = Outputs(json, report)
    outputs.check()
    leads = lead_ms or [500.0]
    options.check_numbers(leads, staging_blocks, requests, consume_blocks_s, 1.0)
    profile = load_profile(device_profile)
    processor = read_dpu(dpu) if dpu else NO_DPU
    load = options.read_trace(trace, None if live_sessions else requests, group_blocks)
    size = options.modelled_blocks(block_bytes, load.block_bytes)
    options.check_limit(limit_blocks_s, size)
    load = _laid_out(load, live_sessions, requests)
    staging = staging_blocks or _live_blocks(load, live_share)
    staging = staging or processor.staging_bytes // size or options.default_staging(load.distinct)
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
    with progress_bars(console) as bar:
        told = bar("simulating", settings.rounds * len(lines) * len(load))
        result = simulate_restore(load, settings, lines, profile, processor, told, take_blocks)
    drawn = limited(settings) if limit_blocks_s else profile
    notes = [*result.notes, *seed_notes(drawn, seed, rounds)]
    options.show(outputs, console, msgspec.structs.replace(result, notes=notes))


def _laid_out(load: Requests, live: int | None, limit: int | None) -> Requests:
    return interleaved(load, live, limit=limit) if live else load


def _live_blocks(load: Requests, share: str | None) -> int:
    """Of the mean over all arrivals; 0 if no share is asked for."""
    if share is None:
        return 0
    part = parse_share(share)
    if not part:
        raise ReplayError(f"--live-share {share} is no share; write a percentage, as in 33%")
    return max(1, int(part * live_contexts(load).mean()))
