"""`prefetchd layout`: a model's KV geometry as bytes, pages, slots and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from prefetchd.hf_config import from_config
from prefetchd.layout import Layout, LayoutError
from prefetchd.presets import PRESETS, preset
from prefetchd.roofline import roofline
from prefetchd.units import parse_bytes


def layout_of(model: str, dtype: str | None) -> Layout:
    """Of a preset's name or a path to a config.json. Raises LayoutError."""
    path = Path(model)
    if model in PRESETS:
        return preset(model, dtype=dtype) if dtype else preset(model)
    if path.exists():
        return from_config(path, dtype=dtype) if dtype else from_config(path)
    raise LayoutError(f"{model!r} is no preset and no file; presets: {', '.join(PRESETS)}")


def show_layout(
    model: Annotated[str, typer.Argument(help="A preset, or a Hugging Face config.json.")],
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp8, int4 ...")] = None,
    alignment: Annotated[int, typer.Option(min=1, help="Alignment of the device, bytes.")] = 4096,
    context: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 131_072,
    bandwidth: Annotated[str, typer.Option(help="Of the drive, bytes a second.")] = "14GB",
    step_ms: Annotated[
        float, typer.Option(min=0.001, max=1e9, help="Time of a decode step.")
    ] = 30.0,
) -> None:
    """Show what a model's KV cache takes, and whether dense decode from a drive is possible."""
    layout = layout_of(model, dtype)
    description = layout.describe(alignment)
    table = Table(title=description.title, title_justify="left")
    for number, name in enumerate(description.columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in description.rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    stored = layout.stored_bytes(context)
    console.print(f"{layout.bytes_per_token:,} B a token; {stored / 2**30:.2f} GiB at {context:,}")
    verdict = roofline(layout, context, parse_bytes(bandwidth), int(step_ms * 1e6))
    console.print(verdict.words)
    for note in description.notes:
        console.print(f"note: {note}", markup=False)
