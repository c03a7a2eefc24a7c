"""`prefetchd replay restore`: its options and what is read before it runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd import registry
from prefetchd.bench import restore_options as options
from prefetchd.bench.crowd_restore import Crowded
from prefetchd.bench.decode_options import (
    Clients,
    Connect,
    Controls,
    Depth,
    Evict,
    Html,
    Json,
    Namespace,
    Predictors,
    Token,
    names,
)
from prefetchd.bench.decode_options import crowd as crowd_of
from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import ReplayError
from prefetchd.bench.restore_replay import emulation_of, plans, replay_restore
from prefetchd.bench.restore_result import RestoreSettings


def restore(
    context: typer.Context,
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
    connect: Connect = None,
    namespace: Namespace = "default",
    token: Token = "",
    clients: Clients = None,
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
    crowd = crowd_of(context, connect, namespace, token, clients)
    blocks = load.distinct * (crowd.clients if crowd else 1)
    slots = options.default_staging(blocks) if staging_blocks is None else staging_blocks
    named = names(controls)
    resident = "resident" in named
    check_memory(
        (blocks if resident else slots) * whole_bytes,
        "the resident control, which keeps all blocks," if resident else "staging",
        "--controls none, smaller --block-bytes or fewer --staging-blocks",
    )
    settings = RestoreSettings(
        trace=load.name,
        trace_how=load.how,
        requests=len(load),
        blocks=blocks,
        block_bytes=whole_bytes,
        staging_blocks=min(slots, blocks),
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
        more={"clients": crowd.clients, "connect": crowd.connect} if crowd else {},
    )
    lines = plans(settings, predictor or ["cross_request"], named)
    console, faster = Console(stderr=True), load.faster(speed)
    with ExitStack() as stack:
        directory, runner = Path(), None
        if crowd is None or not crowd.connect:
            directory = stack.enter_context(temporary_folder(store, console))
            directory.mkdir(exist_ok=True)
        if crowd is not None:
            medium = emulation_of(settings, device) or device
            runner = Crowded(directory, faster, settings, medium, crowd)
            if crowd.connect:
                lines, settings = runner.as_it_is()
        count = settings.rounds * len(lines) * len(load) * (crowd.clients if crowd else 1)
        bar = stack.enter_context(progress_bars(console))
        result = replay_restore(
            directory,
            faster,
            settings,
            lines,
            device=device,
            idle_s=idle_s,
            report=bar("replaying", count),
            runner=runner,
        )
    options.show(outputs, console, result)
