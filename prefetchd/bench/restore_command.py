"""`prefetchd replay restore`: its options and what is read before it runs."""

from __future__ import annotations

import math
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd import registry
from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import ReplayError
from prefetchd.bench.restore_replay import CONTROLS, Plan, plans, replay_restore
from prefetchd.bench.restore_report import write_restore_report
from prefetchd.bench.restore_result import RestoreResult, RestoreSettings, encode
from prefetchd.bench.restore_tables import print_restore
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.units import parse_bytes

EMBEDDED_REQUESTS = "conversation_demo.jsonl.gz"
_PAGE = 4096
_STAGING_MIN = 64

GroupBlocks = Annotated[
    int, typer.Option(min=1, help="So many blocks of the trace are one block here.")
]


def restore(
    trace: Annotated[
        Path | None,
        typer.Argument(help="A restore trace, or requests (.jsonl); default: the embedded ones."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder for the store of each run; default: a temporary one."),
    ] = None,
    device: Annotated[str, typer.Option(help="Storage device.")] = "uring",
    staging_blocks: Annotated[
        int | None,
        typer.Option(help="Blocks that fit into DRAM; default: a quarter of the trace's."),
    ] = None,
    block_bytes: Annotated[str, typer.Option(help="Bytes of a block.")] = "4KiB",
    lead_ms: Annotated[
        list[float] | None,
        typer.Option(help="How long before its start a request is announced; repeatable."),
    ] = None,
    hints: Annotated[
        bool, typer.Option(help="Tell the blocks ahead; else demand the first two then.")
    ] = True,
    limit_blocks_s: Annotated[
        float, typer.Option(help="Hold reads to so many blocks a second (EMULATED); 0: no limit.")
    ] = 0.0,
    consume_blocks_s: Annotated[float, typer.Option(help="Blocks a second a request takes.")] = 200,
    group_blocks: GroupBlocks = 1,
    requests: Annotated[int | None, typer.Option(help="Only the first requests.")] = None,
    speed: Annotated[
        float, typer.Option(help="Arrivals, leads and rates so many times as fast.")
    ] = 1.0,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Predictor by name or file; repeatable.")
    ] = None,
    controls: Annotated[str, typer.Option(help="Controls, by comma.")] = ",".join(CONTROLS),
    evict: Annotated[str, typer.Option(help="Eviction: lru, arc or cycle.")] = "lru",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 1,
    idle_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Idle gap before every run.")
    ] = 0.5,
    depth: Annotated[int, typer.Option(min=1, max=32768, help="Operations in flight.")] = 128,
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Seed of the stored bytes.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write JSON; - prints it.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
) -> None:
    """Replay requests that come back; say how much of their KV was in DRAM when they started."""
    outputs = Outputs(json, report)
    outputs.check()
    leads = lead_ms or [500.0]
    check_numbers(leads, staging_blocks, requests, limit_blocks_s, consume_blocks_s, speed)
    if not registry.storage_device_class(device).on_files:
        raise ReplayError(
            f"device {device} keeps no store on a path; use --limit-blocks-s to limit"
        )
    whole_bytes = whole_blocks(block_bytes)
    load = read_trace(trace, requests, group_blocks)
    slots = default_staging(load) if staging_blocks is None else staging_blocks
    named = [name.strip() for name in controls.split(",") if name.strip()]
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
    show(outputs, console, result)


def default_staging(load: Requests) -> int:
    return max(_STAGING_MIN, load.distinct // 4)


def check_numbers(
    leads: list[float],
    staging: int | None,
    requests: int | None,
    limit: float,
    consume: float,
    speed: float,
) -> None:
    for lead in leads:
        if not 0 <= lead < 1e7:
            raise ReplayError(f"--lead-ms {lead:g} is no lead; give milliseconds, 0 or more")
    if staging is not None and staging < _STAGING_MIN:
        raise ReplayError(
            f"--staging-blocks {staging} is too small; give it {_STAGING_MIN} or more"
        )
    if requests is not None and requests < 1:
        raise ReplayError(f"--requests {requests} leaves nothing to replay; give 1 or more")
    if not 0 <= limit < math.inf:
        raise ReplayError(f"--limit-blocks-s {limit:g} is no rate; give blocks a second, or 0")
    for name, value in (("--consume-blocks-s", consume), ("--speed", speed)):
        if not 0 < value < 1e9:
            raise ReplayError(f"{name} {value:g} makes no sense; give a number above 0")


def whole_blocks(text: str) -> int:
    size = parse_bytes(text)
    if size < _PAGE or size % _PAGE:
        raise ReplayError(
            f"--block-bytes {text} cannot be read directly; give a multiple of {_PAGE}, as in 64KiB"
        )
    return size


def read_trace(trace: Path | None, limit: int | None, group: int = 1) -> Requests:
    if trace is None:
        with as_file(files("prefetchd.data") / EMBEDDED_REQUESTS) as path:
            return read_requests(path, limit, group)
    return read_requests(trace, limit, group)


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


def show(outputs: Outputs, console: Console, result: RestoreResult) -> None:
    """The table, or JSON, on stdout; files as asked, which `console` is told of."""
    outputs.show(
        console,
        encoded=encode(result),
        table=partial(print_restore, result),
        report=partial(write_restore_report, result),
    )
