"""`prefetchd trace ...`: showing, converting, cutting and merging traces.

Decides options, words and progress bars. All work is done elsewhere.
"""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prefetchd.lab.request_csv import CsvSettings
from prefetchd.lab.sources import Source, trace_source
from prefetchd.lab.trace_edit import Cut, cut, merge
from prefetchd.lab.trace_info import look
from prefetchd.lab.trace_out import PARAMETERS, write_libcachesim
from prefetchd.lab.trace_saving import check_out, progress_bars, save, say
from prefetchd.lab.trace_schema import TraceError
from prefetchd.lab.trace_tables import print_info
from prefetchd.units import parse_bytes

trace_app = typer.Typer(help="Show, convert, cut and merge traces.", no_args_is_help=True)


class Target(StrEnum):
    """What a trace can be converted to."""

    trace = "trace"
    libcachesim = "libcachesim"


Trace = Annotated[Path, typer.Argument(help="A trace of any format that can be read.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The file to write.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")]
BlockBytes = Annotated[
    str | None,
    typer.Option(help="Bytes of a block: of an MLPerf I/O trace (2MiB), for libCacheSim (1)."),
]


@trace_app.callback()
def _group() -> None:
    """Traces of decode attention and of requests."""


@trace_app.command("info")
def info(
    trace: Trace,
    top_k: Annotated[int, typer.Option(min=1, help="Blocks needed by each KV head.")] = 16,
    block_bytes: BlockBytes = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a trace holds, and what cannot be simulated from it."""
    # Looking at lengths alone is no harm: what they are no use for is said.
    settings = _settings(block_bytes, no_reuse=True)
    with (
        progress_bars() as bars,
        trace_source(trace, settings=settings, told=bars("reading")) as source,
    ):
        found = look(trace, source, top_k=top_k, told=bars("counting"))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print_info(found, Console(highlight=False, soft_wrap=True))


@trace_app.command("convert")
def convert(
    trace: Trace,
    out: Out,
    to: Annotated[Target, typer.Option(help="Our own format, or libCacheSim's CSV.")] = (
        Target.trace
    ),
    no_reuse: Annotated[
        bool,
        typer.Option("--no-reuse", help="Make requests that share nothing of lengths alone."),
    ] = False,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a block, with --no-reuse.")
    ] = 512,
    block_bytes: BlockBytes = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Of a decode, to libCacheSim; default: all.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    licence: Annotated[str | None, typer.Option(help="The licence it is under.")] = None,
    force: Force = False,
) -> None:
    """Write a trace anew: in our own format, or as block accesses for libCacheSim."""
    check_out(out, force)
    settings = _settings(block_bytes, no_reuse=no_reuse, block_tokens=block_tokens)
    with (
        progress_bars() as bars,
        trace_source(trace, settings=settings, told=bars("reading")) as source,
    ):
        if to is Target.libcachesim:
            size = source.header.block_bytes or parse_bytes(block_bytes or "1")
            told = bars("writing")
            count = write_libcachesim(out, source, object_bytes=size, top_k=top_k, told=told)
            words = f"{count} accesses of {size} bytes; read it with -t {PARAMETERS}"
        else:
            changes = {"name": name, "licence": licence}
            told_too = {what: text for what, text in changes.items() if text is not None}
            header = msgspec.structs.replace(source.header, **told_too)
            words = save(out, header, source.chunks(), bars("writing"))
    say(out, words)


def _settings(block_bytes: str | None, *, no_reuse: bool, block_tokens: int = 512) -> CsvSettings:
    size = parse_bytes(block_bytes or "2MiB")
    if size < 1:
        raise TraceError(f"--block-bytes {block_bytes}: a block has bytes")
    return CsvSettings(block_bytes=size, block_tokens=block_tokens, without_reuse=no_reuse)


@trace_app.command("cut")
def cut_(
    trace: Trace,
    out: Out,
    requests: Annotated[int | None, typer.Option(min=1, help="Keep the first so many.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Keep the first so many.")] = None,
    from_s: Annotated[float, typer.Option("--from", min=0, help="Seconds; inclusive.")] = 0.0,
    to_s: Annotated[float | None, typer.Option("--to", min=0, help="Seconds; exclusive.")] = None,
    force: Force = False,
) -> None:
    """Keep part of a trace: the first requests or steps, or what arrives in a span of time."""
    check_out(out, force)
    with progress_bars() as bars, trace_source(trace, told=bars("reading")) as source:
        kept = Cut(rows=_rows(source, requests, steps), from_s=from_s, to_s=to_s)
        if kept == Cut():
            raise TraceError("say what to keep: --requests, --steps, --from or --to")
        header, chunks = cut(source, kept)
        words = save(out, header, chunks, bars("writing"))
    say(out, words)


def _rows(source: Source, requests: int | None, steps: int | None) -> int | None:
    kind = source.header.kind
    wrong = steps if kind == "restore" else requests
    if wrong is not None:
        option = "--requests" if kind == "restore" else "--steps"
        raise TraceError(f"trace {source.header.name} is a {kind} trace: use {option}")
    return requests if kind == "restore" else steps


@trace_app.command("merge")
def merge_(
    traces: Annotated[list[Path], typer.Argument(help="Two or more restore traces.")],
    out: Out,
    shared: Annotated[
        bool, typer.Option("--shared", help="Equal block ids are the same block in all of them.")
    ] = False,
    force: Force = False,
) -> None:
    """Interleave the requests of several traces by arrival, as if served at the same time."""
    check_out(out, force)
    if len(traces) < 2:
        raise TraceError(f"to merge takes two or more traces, not only {traces[0]}")
    with progress_bars() as bars, ExitStack() as stack:
        sources = [
            stack.enter_context(trace_source(trace, told=bars(f"reading {trace.name}")))
            for trace in traces
        ]
        header, chunks = merge(sources, shared=shared)
        words = save(out, header, chunks, bars("writing"))
    say(out, words)
