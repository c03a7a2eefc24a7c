"""`prefetchd replay ...`: options, progress and output of replays."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
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
from prefetchd.bench.replay import (
    CONTROLS,
    ReplayError,
    ReplaySettings,
    Report,
    checked_slots,
    prepare_store,
    replay_decode,
    staging_slots,
)
from prefetchd.bench.report import check_report, write_report
from prefetchd.bench.restore_command import restore
from prefetchd.bench.tables import print_replay
from prefetchd.hostinfo import medium_of
from prefetchd.lab.attention import AttentionTrace, read_attention
from prefetchd.lab.workload import Workload, batched
from prefetchd.units import parse_bytes, parse_share

_DRAW_S = 0.5
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
    check_outputs(json, report)
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
    _show(result, json, report, console)


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


def check_outputs(json: Path | None, report: Path | None) -> None:
    """Now, and not after minutes of replay. Raises ReplayError, ReportError."""
    if report is not None:
        check_report(report)
    if json is None or str(json) == "-":
        return
    if json.is_dir() or not os.access(json if json.exists() else json.parent, os.W_OK):
        raise ReplayError(f"the result cannot be written to {json}; name another file with --json")


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


def _slots(workload: Workload, staging: str, page_bytes: int) -> int:
    share = parse_share(staging)
    if share is not None:
        return staging_slots(workload, share)
    slot_bytes = -(-page_bytes // 4096) * 4096
    return checked_slots(workload, parse_bytes(staging) // slot_bytes)


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


def _show(result: metrics.Result, json: Path | None, report: Path | None, console: Console) -> None:
    if json is not None and str(json) == "-":
        typer.echo(metrics.encode(result).decode())
    else:
        print_replay(result)
    if json is not None and str(json) != "-":
        json.write_bytes(metrics.encode(result))
        _name(console, "result", json)
    if report is not None:
        write_report(result, report)
        _name(console, "report", report)


def _name(console: Console, what: str, path: Path) -> None:
    console.print(f"{what}: {path.absolute()}", soft_wrap=True, markup=False, highlight=False)
