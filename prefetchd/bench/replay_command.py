"""`prefetchd replay decode`: its options and what is read before it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prefetchd import metrics, registry
from prefetchd.bench import decode_options as options
from prefetchd.bench.emulation import Emulation
from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import (
    ReplayError,
    ReplaySettings,
    prepare_store,
    replay_decode,
)
from prefetchd.bench.restore_command import restore
from prefetchd.drive_profile import DEFAULT, load_profile
from prefetchd.lab.workload import Workload

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
    device_profile: Annotated[
        str | None, typer.Option(help="With --device emulated: drive profile, name or file.")
    ] = None,
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
    outputs = Outputs(json, report)
    outputs.check()
    emulation = _emulation(device, device_profile, seed)
    if emulation is None and not registry.storage_device_class(device).on_files:
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
        device=emulation or device,
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
    if emulation is not None:
        result = msgspec.structs.replace(result, notes=[*result.notes, *emulation.notes()])
    options.show(outputs, console, result)


def _emulation(device: str, profile: str | None, seed: int) -> Emulation | None:
    """What stands for the profile, over io_uring. Raises ReplayError, ProfileError."""
    if device == "emulated":
        return Emulation(load_profile(profile or DEFAULT), seed=seed)
    if profile is not None:
        raise ReplayError(f"device {device} has its own speed; use --device emulated")
    return None


def _check_memory(workload: Workload, settings: ReplaySettings) -> None:
    resident = "resident" in settings.controls
    check_memory(
        (workload.geometry.pages if resident else settings.staging_slots) * settings.page_bytes,
        "the resident control, which holds all pages," if resident else "staging",
        "--controls none,oracle, smaller pages or less staging",
    )


def _run(
    directory: Path, workload: Workload, settings: ReplaySettings, console: Console
) -> metrics.Result:
    runs = len(settings.controls) + len(settings.predictors)
    with progress_bars(console) as bar:
        writing = bar("writing the store", workload.geometry.blocks)
        # Writing is not what is emulated.
        free = settings if isinstance(settings.device, str) else replace(settings, device="uring")
        prepare_store(directory, workload, free, writing)
        replaying = bar("replaying", settings.rounds * runs * workload.steps)
        return replay_decode(directory, workload, settings, replaying)
