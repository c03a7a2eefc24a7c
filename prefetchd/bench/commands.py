"""`prefetchd bench ...`: options and tables of the device benchmarks."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prefetchd.bench.fio import has_fio
from prefetchd.bench.output import Outputs, progress_bars
from prefetchd.bench.ring import Shape, check_shapes, check_size, create_file, open_file
from prefetchd.bench.ring_rounds import FIO, Pace, measure, notes, ring_table
from prefetchd.bench.write import WriteSettings, bench_write, write_table
from prefetchd.hostinfo import medium_of
from prefetchd.registry import storage_device_class
from prefetchd.units import parse_bytes

DEFAULT_SHAPES = "64KiB@32,4KiB@128"

bench_app = typer.Typer(help="Benchmark devices.")


@bench_app.callback()
def _group() -> None:
    """Benchmarks of devices and stores."""


def _shapes(text: str) -> list[Shape]:
    shapes = []
    for part in text.split(","):
        size, _, depth = part.partition("@")
        if not (depth.isascii() and depth.isdigit()) or not 1 <= int(depth) <= 4096:
            raise ValueError(f"{part!r} is no load; write a size and a depth, as in 64KiB@32")
        shapes.append(Shape(parse_bytes(size), int(depth)))
    check_shapes(shapes)
    return [*dict.fromkeys(shapes)]


def _engines(devices: list[str], fio: bool) -> list[str]:
    """What takes turns, fio last if it is there. Raises RegistryError, ValueError."""
    for name in devices:
        if not storage_device_class(name).on_files:
            raise ValueError(f"device {name} reads no file; it is for tests")
    return [*dict.fromkeys(devices), *([FIO] if fio else [])]


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
    fio: Annotated[bool, typer.Option(help="Beside fio, if it is installed.")] = True,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures as JSON; - prints it.")
    ] = None,
) -> None:
    """Random direct reads by our devices, and by fio when it is installed, on one file."""
    outputs = Outputs(json)
    outputs.check()
    console = Console(stderr=True)
    shapes, pace = _shapes(load), Pace(rounds, seconds, idle_s)
    engines = _engines(device or ["uring"], fio and has_fio())
    with progress_bars(console) as bar:
        if not file.exists():
            check_size(file, parse_bytes(size), shapes)
            create_file(file, parse_bytes(size), bar(f"filling {file}", parse_bytes(size)).steps)
        opened = open_file(file, shapes)
        try:
            medium = medium_of(opened.fd, str(file))
            steps = bar("reading", len(shapes) * rounds * len(engines)).steps
            rows, kind = measure(opened, medium, shapes, engines, pace, steps)
        finally:
            os.close(opened.fd)
    result = {
        "schema": "prefetchd.bench.ring/2",
        "file": _shown(file),
        "file_bytes": opened.size_bytes,
        "file_system": medium.file_system,
        "kernel": platform.release(),
        "kind": kind,
        "rounds": rounds,
        "seconds": seconds,
        "idle_s": idle_s,
        "rows": rows,
        "notes": [*notes(rows, kind)],
    }

    def table() -> None:
        out = Console(highlight=False)
        size_words = f"{opened.size_bytes / 2**20:,.10g} MiB"
        out.print(
            ring_table(rows, f"{_shown(file)}, {size_words} on {medium.file_system} ({kind})")
        )
        for device_name, engine in dict.fromkeys((row.device, row.engine) for row in rows):
            out.print(f"{device_name}: {engine}", markup=False)
        for note in notes(rows, kind):
            out.print(f"* {note}", markup=False)

    encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
    outputs.show(console, encoded=encoded, table=table)
    _name_fio(console, wanted=fio)


def _shown(path: Path) -> str:
    """Names are bytes; what is no text among them cannot be printed."""
    return os.fsencode(path).decode(errors="replace")


def _name_fio(console: Console, *, wanted: bool) -> None:
    if wanted and not has_fio():
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
    fio: Annotated[bool, typer.Option(help="Beside fio, if it is installed.")] = True,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures as JSON; - prints it.")
    ] = None,
) -> None:
    """Prefill-shaped puts into a new store, and fio's sequential writes on the same file."""
    outputs = Outputs(json)
    outputs.check()
    _engines([device], False)
    settings = WriteSettings(
        layers, parse_bytes(page_bytes), blocks, rounds, idle_s, device, durability
    )
    console = Console(stderr=True)
    with progress_bars(console) as bar:
        beside = fio and has_fio()
        steps = bar("writing", rounds * (1 + beside)).steps
        rates = bench_write(folder, settings, fio=beside, tell=lambda: steps(1))
    encoded = msgspec.json.format(msgspec.json.encode(rates.told(settings)), indent=1)

    def table() -> None:
        out = Console(highlight=False)
        out.print(write_table(rates, settings, _shown(folder)))
        out.print(f"{device}: {rates.engine}", markup=False)

    outputs.show(console, encoded=encoded, table=table)
    _name_fio(console, wanted=fio)
