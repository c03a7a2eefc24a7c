"""`prefetchd score`: its options, what is read before it runs, progress and output."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd.bench import decode_options as options
from prefetchd.bench.output import Outputs, progress_bars
from prefetchd.bench.restore_options import check_limit, modelled_blocks
from prefetchd.bench.runs import ReplayError
from prefetchd.drive_profile import DEFAULT, SEED, DriveProfile, load_profile
from prefetchd.lab.score import count_tasks, score
from prefetchd.lab.score_grid import STAGINGS, Grid, check_names
from prefetchd.lab.score_page import write_score_page
from prefetchd.lab.score_result import Score, TraceFile, encode, to_csv
from prefetchd.lab.score_table import print_score
from prefetchd.lab.score_workers import workers
from prefetchd.lab.simulate_command import DeviceProfile, Seed
from prefetchd.lab.sources import label, trace_source

_EMBEDDED = (
    TraceFile(name="summ_pydocs_demo", regime="decode"),
    TraceFile(name="conversation_demo", regime="restore"),
)
_JOBS = len(os.sched_getaffinity(0))


def score_command(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces of either kind; default: the two that ship with the package."),
    ] = None,
    predictor: options.Predictors = None,
    evict: Annotated[
        list[str] | None,
        typer.Option(help="lru, arc or cycle; repeatable. Default: cycle; of restores lru."),
    ] = None,
    staging: Annotated[
        list[str] | None,
        typer.Option(
            help="Share of all pages or blocks, a number of them, or bytes with a unit; "
            "repeatable. Default: 10%, 15%, 25%."
        ),
    ] = None,
    layer_us: Annotated[
        list[float] | None,
        typer.Option(help="Decode: compute time of a layer; repeatable. Default: 600."),
    ] = None,
    lead_ms: Annotated[
        list[float] | None,
        typer.Option(
            help="Restore: how long before its start a request is announced; repeatable. "
            "Default: 500."
        ),
    ] = None,
    hints: Annotated[bool, typer.Option(help="Tell ahead what will be needed.")] = True,
    both_hints: Annotated[
        bool, typer.Option("--both-hints", help="With hints and without.")
    ] = False,
    steps: options.Steps = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Restore: only the first requests.")
    ] = None,
    warmup: options.Warmup = 16,
    top_k: options.TopK = 16,
    page_bytes: options.PageBytes = "64KiB",
    block_bytes: Annotated[
        str | None,
        typer.Option(
            help="Restore: bytes of a block; default: the traces', in whole 4KiB, or 4MiB."
        ),
    ] = None,
    limit_blocks_s: Annotated[
        float, typer.Option(help="Restore: instead of a profile, so many reads a second; 0: none.")
    ] = 0.0,
    device_profile: DeviceProfile = DEFAULT,
    depth: options.Depth = 128,
    seed: Seed = SEED,
    jobs: Annotated[
        int, typer.Option(min=1, max=1024, help="Processes; default: one a core.")
    ] = _JOBS,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Address of a Dask scheduler, as in tcp://HOST:8786, instead of processes here; "
            "its workers need the same files at the same paths."
        ),
    ] = None,
    json: options.Json = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line a row; - prints them.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML scoreboard.")] = None,
) -> None:
    """Simulate predictors x evictions x staging sizes x leads x traces; say which does best.

    Beside them stand the controls resident, none and oracle, and what nothing can beat.
    """
    outputs = Outputs(json, report, csv)
    outputs.check()
    _check_leads([*(layer_us or ()), *(lead_ms or ())])
    found_traces = _traces(traces)
    told_bytes = 0 if block_bytes is not None else _told_bytes(found_traces)
    restored_bytes = modelled_blocks(block_bytes, told_bytes)
    check_limit(limit_blocks_s, restored_bytes)
    grid = Grid(
        traces=found_traces,
        predictors=tuple(predictor or ()),
        evicts=tuple(evict or ()),
        stagings=tuple(staging or STAGINGS),
        layer_us=tuple(layer_us or (600.0,)),
        lead_ms=tuple(lead_ms or (500.0,)),
        hints=(True, False) if both_hints else (hints,),
        steps=steps,
        requests=requests,
        warmup_steps=warmup,
        top_k=top_k,
        page_bytes=options.page_size(page_bytes),
        block_bytes=restored_bytes,
        limit_blocks_s=limit_blocks_s,
        depth=depth,
        seed=seed,
        folder=str(Path.cwd()),
    )
    check_names(grid)
    console = Console(stderr=True)
    found = _run(grid, load_profile(device_profile), jobs, cluster, console)
    outputs.show(
        console,
        encoded=encode(found),
        table=partial(print_score, found),
        report=partial(write_score_page, found),
        csv=to_csv(found),
    )


def _traces(paths: list[Path] | None) -> tuple[TraceFile, ...]:
    """The traces by their kind, each under a name of its own. Raises TraceError, ReplayError."""
    if not paths:
        return _EMBEDDED
    found = [_trace(path) for path in paths]
    for name, count in Counter(trace.name for trace in found).items():
        if count > 1:
            same = [trace.path for trace in found if trace.name == name]
            raise ReplayError(
                f"{' and '.join(same)} are both called {name!r}; name each trace once, or give "
                "one another name: prefetchd trace convert"
            )
    return tuple(found)


def _trace(path: Path) -> TraceFile:
    with trace_source(path, limit=1) as source:
        header = source.header
        hints = header.kind == "restore" or "hint_ids" in next(iter(source.chunks()))
    return TraceFile(
        name=label(header),
        regime=header.kind,
        path=str(path),
        synthetic=header.synthetic,
        hints=hints,
        block_bytes=header.block_bytes,
    )


def _told_bytes(traces: tuple[TraceFile, ...]) -> int:
    """What all traces that tell their blocks' size agree on; else 0. Raises ReplayError."""
    told = {trace.block_bytes for trace in traces if trace.regime == "restore"} - {0}
    if len(told) > 1:
        raise ReplayError(
            f"the traces' blocks are of {', '.join(map(str, sorted(told)))} bytes; say for all of "
            "them --block-bytes"
        )
    return told.pop() if told else 0


def _check_leads(leads: list[float]) -> None:
    for lead in leads:
        if not 0 <= lead <= 1e7:
            raise ReplayError(f"a lead of {lead:g} makes no sense; give 0 or more")


def _run(
    grid: Grid, profile: DriveProfile, jobs: int, cluster: str | None, console: Console
) -> Score:
    with progress_bars(console) as bar:
        count = count_tasks(grid)
        simulating = bar("simulating", count)
        with workers(min(jobs, count), cluster) as executor:

            def told(name: str, ended: int) -> None:
                simulating.say(f"simulated {name}")
                simulating.steps(ended)

            return score(grid, profile, executor, told)
