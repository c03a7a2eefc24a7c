"""`prefetchd replay ...`: options, progress and output of replays."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from prefetchd import metrics, registry
from prefetchd.bench import decode_options as options
from prefetchd.bench.replay import (
    ReplayError,
    ReplaySettings,
    Report,
    prepare_store,
    replay_decode,
)
from prefetchd.bench.restore_command import restore
from prefetchd.hostinfo import medium_of
from prefetchd.lab.workload import Workload

_DRAW_S = 0.5

replay_app = typer.Typer(help="Replay recorded traffic against a real store, in real time.")


replay_app.command("restore")(restore)


@replay_app.command("decode")
def decode(
    trace: options.TracePath = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder of the store, made if missing; default: a temporary one."),
    ] = None,
    device: Annotated[str, typer.Option(help="Storage device.")] = "uring",
    gpu: Annotated[str, typer.Option(help="GPU device: host or cuda.")] = "host",
    page_bytes: options.PageBytes = "64KiB",
    staging: Annotated[str, typer.Option(help="Share of all pages (25%), or bytes.")] = "25%",
    top_k: options.TopK = 16,
    layer_us: options.LayerUs = 600.0,
    hints: options.Hints = True,
    tend: Annotated[
        bool, typer.Option(help="The host thread drives the engine while the GPU computes.")
    ] = True,
    predictor: options.Predictors = None,
    evict: options.Evict = "cycle",
    controls: options.Controls = options.ALL_CONTROLS,
    steps: options.Steps = None,
    warmup: options.Warmup = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    idle_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Idle gap before every run.")
    ] = 0.5,
    depth: options.Depth = 128,
    requests: options.BatchSize = 1,
    shared: options.Shared = "50%",
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Seed of the stored bytes.")] = 1,
    json: options.Json = None,
    report: options.Html = None,
) -> None:
    """Decode a recorded run with its KV cache on NVMe; say how close to all-in-DRAM it came."""
    options.check_outputs(json, report)
    if not registry.storage_device_class(device).on_files:
        raise ReplayError(f"device {device} keeps no store on a path; it is for tests")
    workload = options.recorded(
        trace, top_k=top_k, steps=steps, warmup=warmup, requests=requests, shared=shared
    )
    size = options.page_size(page_bytes)
    settings = ReplaySettings(
        page_bytes=size,
        staging_slots=options.slots(workload, staging, size),
        layer_us=layer_us,
        hints=hints,
        tend=tend,
        top_k=top_k,
        predictors=tuple(predictor or ("auto",)),
        controls=options.names(controls),
        evict=evict,
        device=device,
        gpu=gpu,
        depth=depth,
        rounds=rounds,
        warmup_steps=warmup,
        idle_s=idle_s,
        seed=seed,
    )
    console = Console(stderr=True)
    _check_memory(workload, settings)
    with temporary_folder(store, console) as directory:
        result = _run(directory, workload, settings, console)
    options.show(result, json, report, console)


def _check_memory(workload: Workload, settings: ReplaySettings) -> None:
    """Raises ReplayError if staging would not fit into the memory that is free."""
    resident = "resident" in settings.controls
    slots = workload.geometry.pages if resident else settings.staging_slots
    need, free = slots * settings.page_bytes, psutil.virtual_memory().available
    if need > 0.9 * free:
        what = "the resident control holds all pages" if resident else "staging"
        raise ReplayError(
            f"{what}: {need / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of memory are free; "
            "use --controls none,oracle, smaller pages or less staging"
        )


@contextmanager
def temporary_folder(store: Path | None, console: Console) -> Iterator[Path]:
    """The folder asked for, or a temporary one on a disk if there is one, removed afterwards."""
    if store is not None:
        yield store
        return
    parent = _disk_folder()
    folder = Path(tempfile.mkdtemp(prefix="prefetchd-", dir=parent))
    try:
        words = f"store: {folder} (temporary; name one with --store)"
        console.print(words, style="dim", soft_wrap=True, markup=False, highlight=False)
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _disk_folder() -> str | None:
    """The first usual folder for temporary files that is not kept in RAM."""
    for name in (tempfile.gettempdir(), "/var/tmp", "."):
        try:
            fd = os.open(name, os.O_RDONLY)
        except OSError:
            continue
        try:
            if not medium_of(fd, name).is_ram:
                return name
        finally:
            os.close(fd)
    return None


def _run(
    directory: Path, workload: Workload, settings: ReplaySettings, console: Console
) -> metrics.Result:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn())
    runs = len(settings.controls) + len(settings.predictors)
    # Drawn between steps and never from a thread of its own, which would take the interpreter's
    # lock in the middle of a layer.
    bars = (*columns, TimeElapsedColumn())
    with Progress(*bars, console=console, transient=True, auto_refresh=False) as progress:
        drawn_s = 0.0

        def draw(task: TaskID, count: int) -> None:
            nonlocal drawn_s
            progress.advance(task, count)
            if time.monotonic() - drawn_s > _DRAW_S:
                progress.refresh()
                drawn_s = time.monotonic()

        writing = progress.add_task("writing the store", total=workload.geometry.blocks)
        report = Report(
            say=lambda words: progress.update(writing, description=words, refresh=True),
            steps=lambda count: draw(writing, count),
        )
        prepare_store(directory, workload, settings, report)
        progress.remove_task(writing)
        total = settings.rounds * runs * workload.steps
        task = progress.add_task("replaying", total=total)
        report = Report(
            say=lambda words: progress.update(task, description=words, refresh=True),
            steps=lambda count: draw(task, count),
        )
        return replay_decode(directory, workload, settings, report)
