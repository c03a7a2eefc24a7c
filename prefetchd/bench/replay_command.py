"""`prefetchd replay decode`: its options and what is read before it runs."""

from __future__ import annotations

from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd import metrics, registry
from prefetchd.bench.output import Outputs, check_memory, progress_bars, temporary_folder
from prefetchd.bench.replay import (
    CONTROLS,
    ReplayError,
    ReplaySettings,
    checked_slots,
    prepare_store,
    replay_decode,
    staging_slots,
)
from prefetchd.bench.report import write_report
from prefetchd.bench.restore_command import restore
from prefetchd.bench.tables import print_replay
from prefetchd.lab.attention import AttentionTrace, read_attention
from prefetchd.lab.workload import Workload, batched
from prefetchd.units import parse_bytes, parse_share

EMBEDDED_TRACE = "summ_pydocs_demo.npz"

replay_app = typer.Typer(help="Replay recorded traffic against a real store, in real time.")


replay_app.command("restore")(restore)


@replay_app.command("decode")
def decode(
    trace: Annotated[
        Path | None,
        typer.Argument(help="A decode trace (.npz); default: the embedded one."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Folder of the store, made if missing; default: a temporary one."),
    ] = None,
    device: Annotated[str, typer.Option(help="Storage device.")] = "uring",
    gpu: Annotated[str, typer.Option(help="GPU device: host or cuda.")] = "host",
    page_bytes: Annotated[str, typer.Option(help="Bytes of a page.")] = "64KiB",
    staging: Annotated[str, typer.Option(help="Share of all pages (25%), or bytes.")] = "25%",
    top_k: Annotated[int, typer.Option(min=1, help="Blocks needed by each KV head.")] = 16,
    layer_us: Annotated[
        float, typer.Option(min=0, max=1e7, help="Compute time of a layer.")
    ] = 600.0,
    hints: Annotated[bool, typer.Option(help="Give next-layer hints.")] = True,
    tend: Annotated[
        bool, typer.Option(help="The host thread drives the engine while the GPU computes.")
    ] = True,
    predictor: Annotated[
        list[str] | None, typer.Option(help="Predictor by name or file; repeatable.")
    ] = None,
    evict: Annotated[str, typer.Option(help="Eviction: lru, arc or cycle.")] = "cycle",
    controls: Annotated[str, typer.Option(help="Controls, by comma.")] = ",".join(CONTROLS),
    steps: Annotated[int | None, typer.Option(min=1, help="Replay only the first steps.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="First steps not measured.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    idle_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Idle gap before every run.")
    ] = 0.5,
    depth: Annotated[
        int, typer.Option(min=1, max=32768, help="Operations in flight at most.")
    ] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the decode batch.")] = 1,
    shared: Annotated[str, typer.Option(help="Prompt share in common to all.")] = "50%",
    seed: Annotated[int, typer.Option(min=0, max=2**63, help="Seed of the stored bytes.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write JSON; - prints it.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
) -> None:
    """Decode a recorded run with its KV cache on NVMe; say how close to all-in-DRAM it came."""
    outputs = Outputs(json, report)
    outputs.check()
    if not registry.storage_device_class(device).on_files:
        raise ReplayError(f"device {device} keeps no store on a path; it is for tests")
    recorded = _read(trace)
    workload = batched(
        recorded,
        top_k=top_k,
        steps=steps,
        requests=requests,
        shared_share=_shared(shared) if requests > 1 else 0.0,
    )
    if workload.steps <= warmup:
        raise ReplayError(
            f"{workload.steps} steps leave none to measure after {warmup} of warm-up; "
            "use --warmup or more steps"
        )
    settings = ReplaySettings(
        page_bytes=_whole(page_bytes),
        staging_slots=_slots(workload, staging, _whole(page_bytes)),
        layer_us=layer_us,
        hints=hints,
        tend=tend,
        top_k=top_k,
        predictors=tuple(predictor or ("auto",)),
        controls=tuple(name.strip() for name in controls.split(",") if name.strip()),
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
    outputs.show(
        console,
        encoded=metrics.encode(result),
        table=partial(print_replay, result),
        report=partial(write_report, result),
    )


def _read(trace: Path | None) -> AttentionTrace:
    if trace is not None:
        return read_attention(trace)
    with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as path:
        return read_attention(path)


def _whole(text: str) -> int:
    size = parse_bytes(text)
    if size < 16:
        raise ReplayError(f"a page of {size} bytes is too small to be stamped; give 16 or more")
    return size


def _shared(text: str) -> float:
    share = parse_share(text)
    if share is None:
        raise ReplayError(f"--shared {text} is no share; write a percentage, as in 50%")
    return share


def _check_memory(workload: Workload, settings: ReplaySettings) -> None:
    resident = "resident" in settings.controls
    check_memory(
        (workload.geometry.pages if resident else settings.staging_slots) * settings.page_bytes,
        "the resident control, which holds all pages," if resident else "staging",
        "--controls none,oracle, smaller pages or less staging",
    )


def _slots(workload: Workload, staging: str, page_bytes: int) -> int:
    share = parse_share(staging)
    if share is not None:
        return staging_slots(workload, share)
    slot_bytes = -(-page_bytes // 4096) * 4096
    return checked_slots(workload, parse_bytes(staging) // slot_bytes)


def _run(
    directory: Path, workload: Workload, settings: ReplaySettings, console: Console
) -> metrics.Result:
    runs = len(settings.controls) + len(settings.predictors)
    with progress_bars(console) as bar:
        writing = bar("writing the store", workload.geometry.blocks)
        prepare_store(directory, workload, settings, writing)
        replaying = bar("replaying", settings.rounds * runs * workload.steps)
        return replay_decode(directory, workload, settings, replaying)
