"""`prefetchd bench ...`: options and tables of the device benchmarks."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from prefetchd.bench.output import Outputs
from prefetchd.bench.ring import (
    Rate,
    Shape,
    best_turn,
    check_shapes,
    create_file,
    has_fio,
    open_file,
    run_device,
    run_fio,
)
from prefetchd.bench.write import WriteSettings, bench_write
from prefetchd.device import File
from prefetchd.hostinfo import medium_of
from prefetchd.registry import storage_device_class
from prefetchd.units import parse_bytes

_FIO = "fio"
DEFAULT_SHAPES = "64KiB@32,4KiB@128"

bench_app = typer.Typer(help="Benchmark devices.")


@bench_app.callback()
def _group() -> None:
    """Benchmarks of devices and stores."""


def _shapes(text: str) -> list[Shape]:
    shapes = []
    for part in text.split(","):
        size, _, depth = part.partition("@")
        if not depth.isdigit() or not 1 <= int(depth) <= 4096:
            raise ValueError(f"{part!r} is no load; write a size and a depth, as in 64KiB@32")
        shapes.append(Shape(parse_bytes(size), int(depth)))
    check_shapes(shapes)
    return shapes


def _engines(devices: list[str]) -> list[str]:
    """What takes turns, fio last if it is there. Raises RegistryError, ValueError."""
    for name in devices:
        if not storage_device_class(name).on_files:
            raise ValueError(f"device {name} reads no file; it is for tests")
    return [*dict.fromkeys(devices), *([_FIO] if has_fio() else [])]


@bench_app.command("ring")
def ring(
    file: Annotated[Path, typer.Argument(help="File to read; made and filled if missing.")],
    size: Annotated[str, typer.Option(help="Size of a file to be made.")] = "1GiB",
    load: Annotated[str, typer.Option(help="Loads: block size @ depth.")] = DEFAULT_SHAPES,
    device: Annotated[list[str] | None, typer.Option(help="Devices; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Length of a run.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    idle_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Idle gap before every run.")
    ] = 1.0,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures as JSON; - prints it.")
    ] = None,
) -> None:
    """Random direct reads by our devices, and by fio when it is installed, on one file."""
    outputs = Outputs(json)
    outputs.check()
    console = Console(stderr=True)
    shapes, engines = _shapes(load), _engines(device or ["uring"])
    with Progress(console=console, transient=True) as progress:
        if not file.exists():
            task = progress.add_task(f"filling {file}", total=parse_bytes(size))
            create_file(file, parse_bytes(size), lambda count: progress.advance(task, count))
            progress.remove_task(task)
        opened = open_file(file, shapes)
        try:
            medium = medium_of(opened.fd, str(file))
            rows = _measure(opened, shapes, engines, (rounds, seconds, idle_s), progress)
        finally:
            os.close(opened.fd)
    kind = "RAM" if medium.is_ram else "MEASURED"
    result = {
        "schema": "prefetchd.bench.ring/1",
        "file_system": medium.file_system,
        "kind": kind,
        "rounds": rounds,
        "seconds": seconds,
        "idle_s": idle_s,
        "rows": rows,
    }

    def table() -> None:
        out = Console(highlight=False)
        out.print(_table(rows, f"{file} on {medium.file_system} ({kind})"))
        for device_name, engine in dict.fromkeys((row.device, row.engine) for row in rows):
            out.print(f"{device_name}: {engine}", markup=False)

    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    outputs.show(console, encoded=encoded, table=table)
    if _FIO not in engines:
        console.print("fio is not installed, so nothing is compared with it (apt install fio)")


@bench_app.command("write")
def write(
    folder: Annotated[Path, typer.Argument(help="New folder on the drive; removed afterwards.")],
    page_bytes: Annotated[str, typer.Option(help="Bytes of one layer of a block.")] = "64KiB",
    layers: Annotated[int, typer.Option(min=1, help="Layers of a block.")] = 32,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a pass.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    idle_s: Annotated[float, typer.Option(min=0, max=3600, help="Gap before every pass.")] = 1.0,
    device: Annotated[str, typer.Option(help="Our device.")] = "uring",
    durability: Annotated[str, typer.Option(help="durable or fast.")] = "durable",
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Prefill-shaped puts into a new store, and fio's sequential writes on the same file."""
    _engines([device])
    settings = WriteSettings(
        layers, parse_bytes(page_bytes), blocks, rounds, idle_s, device, durability
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("writing", total=rounds * (1 + has_fio()))
        rates = bench_write(folder, settings, fio=has_fio(), tell=lambda: progress.advance(task))
    found = {
        "schema": "prefetchd.bench.write/1",
        "payload_gb_s": statistics.median(rates.ours) / 1e9,
        "fio_gb_s": statistics.median(rates.fio) / 1e9 if rates.fio else None,
        "ratio_to_fio": rates.ratio,
        "flushes": rates.flushes,
        "bytes_written": rates.bytes_written,
        "payload_bytes": blocks * layers * settings.page_bytes,
    }
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
        return
    out = Console(highlight=False)
    for name, value in found.items():
        words = f"{value:.3f}" if isinstance(value, float) else str(value)
        out.print(f"{name:14} {words}", markup=False)


class Row(msgspec.Struct, frozen=True):
    """Medians over rounds. `ratio_to_fio` is the median of the ratios, round by round."""

    load: str
    device: str
    engine: str
    operations_s: float
    gb_s: float
    cpu_us_per_operation: float
    ratio_to_fio: float | None


def _row(
    shape: Shape, engine: str, engine_words: str, rates: dict[tuple[Shape, str], list[Rate]]
) -> Row:
    mine = rates[shape, engine]
    fio = rates.get((shape, _FIO))
    ratio = None
    if fio and engine != _FIO:
        pairs = zip(mine, fio, strict=True)
        ratio = statistics.median(one.operations_s / other.operations_s for one, other in pairs)
    rate = statistics.median(r.operations_s for r in mine)
    return Row(
        load=shape.words,
        device=engine,
        engine=engine_words,
        operations_s=rate,
        gb_s=rate * shape.block_bytes / 1e9,
        cpu_us_per_operation=statistics.median(r.cpu_us_per_operation for r in mine),
        ratio_to_fio=ratio,
    )


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("load", "device"):
        table.add_column(name)
    for name in ("IOPS", "GB/s", "CPU us/op", "to fio"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.load,
            row.device,
            f"{row.operations_s:,.0f}",
            f"{row.gb_s:.2f}",
            f"{row.cpu_us_per_operation:.1f}",
            "-" if row.ratio_to_fio is None else f"{row.ratio_to_fio:.2f}",
        )
    return table


def _measure(
    file: File,
    shapes: list[Shape],
    engines: list[str],
    pace: tuple[int, float, float],
    progress: Progress,
) -> list[Row]:
    """All engines in turn; `pace` = rounds, seconds a run, idle seconds before each."""
    rounds, seconds, idle_s = pace
    task = progress.add_task("reading", total=len(shapes) * rounds * len(engines))
    rates: dict[tuple[Shape, str], list[Rate]] = {}
    names: dict[str, str] = {_FIO: "io_uring, fixed buffers, fixed files"}
    for shape in shapes:
        turns = {engine: best_turn(engine, file, shape) for engine in engines if engine != _FIO}
        for number in range(rounds):
            for engine in engines if number % 2 == 0 else reversed(engines):
                time.sleep(idle_s)
                if engine == _FIO:
                    rate = run_fio(Path(file.path), shape, seconds)
                else:
                    rate, names[engine] = run_device(engine, file, shape, seconds, turns[engine])
                rates.setdefault((shape, engine), []).append(rate)
                progress.advance(task)
    return [_row(shape, engine, names[engine], rates) for shape in shapes for engine in engines]
