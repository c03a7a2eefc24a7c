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
from prefetchd.bench.crowd_decode import replay_decode_crowd, whole
from prefetchd.bench.emulation import Emulation
from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import (
    ReplayError,
    ReplaySettings,
    prepare_store,
    replay_decode,
)
from prefetchd.bench.restore_command import restore
from prefetchd.bench.served import Crowd
from prefetchd.drive_profile import DEFAULT, load_profile
from prefetchd.lab.workload import Workload

replay_app = typer.Typer(help="Replay recorded traffic against a real store, in real time.")


replay_app.command("restore")(restore)


@replay_app.command("decode")
def decode(
    context: typer.Context,
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
    connect: options.Connect = None,
    namespace: options.Namespace = "default",
    token: options.Token = "",
    clients: options.Clients = None,
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
    crowd = options.crowd(context, connect, namespace, token, clients, shared)
    everything = workload if crowd is None else whole(workload, crowd)
    settings = ReplaySettings(
        page_bytes=size,
        staging_slots=options.slots(everything, staging, size),
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
    if crowd is not None and crowd.connect:
        result = _run(Path(), workload, settings, crowd, console)
    else:
        _check_memory(everything, settings)
        with temporary_folder(store, console) as directory:
            result = _run(directory, workload, settings, crowd, console)
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
    directory: Path,
    workload: Workload,
    settings: ReplaySettings,
    crowd: Crowd | None,
    console: Console,
) -> metrics.Result:
    everything = workload if crowd is None else whole(workload, crowd)
    is_private = crowd is None or not crowd.connect
    runs = len(settings.controls) + len(settings.predictors) if is_private else 1
    runs *= 1 if crowd is None else crowd.clients
    with progress_bars(console) as bar:
        if is_private:
            writing = bar("writing the store", everything.geometry.blocks)
            # Writing is not what is emulated.
            named = isinstance(settings.device, str)
            free = settings if named else replace(settings, device="uring")
            prepare_store(directory, everything, free, writing)
        replaying = bar("replaying", settings.rounds * runs * workload.steps)
        if crowd is None:
            return replay_decode(directory, workload, settings, replaying)
        return replay_decode_crowd(directory, workload, settings, crowd, replaying)
