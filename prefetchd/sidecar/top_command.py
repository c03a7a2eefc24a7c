"""`prefetchd top`: options, and how often the terminal is drawn anew."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from prefetchd.sidecar.handshake import SidecarError
from prefetchd.sidecar.top import Source, View, over_http, over_socket, table, view

_FILE_COLUMNS = 240  # where no terminal says how wide it is


def top(
    connect: Annotated[
        str | None, typer.Option(help="A daemon's socket, unix:PATH; default: its default.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Where it serves HTTP: http://HOST:PORT or unix:PATH.")
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option(help="With --connect: which to look at, repeatable.")
    ] = None,
    token: Annotated[
        str,
        typer.Option(envvar="PREFETCHD_TOKEN", help="With --connect: what the namespaces ask for."),
    ] = "",
    every: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one line a look.")] = False,
) -> None:
    """Watch a daemon: what flows, how well it is guessed, who waits.

    Over --http all namespaces are seen; over --connect those that you may use.
    """
    if http and (connect or namespace):
        raise ValueError("give --http or --connect: over HTTP all namespaces are seen")
    with ExitStack() as undone:
        if http:
            source = over_http(http)
        else:
            source = over_socket(connect or "unix:", namespace or ["default"], token, undone)
        _watch(source, every, once=once, json=json, judged=bool(http))


def _watch(source: Source, every: float, *, once: bool, json: bool, judged: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    before = source()
    with ExitStack() as undone:
        live = None
        if console.is_terminal and not (once or json):
            live = undone.enter_context(Live(console=console, screen=True))
        while True:
            time.sleep(every)
            try:
                now = source()
            except SidecarError as error:
                if live is None:
                    raise
                live.update(Text(str(error)), refresh=True)
                continue
            seen = view(before, now, judged=judged)
            before = now
            if live is not None:
                live.update(table(seen), refresh=True)
                continue
            _print(console, seen, json=json)
            if once:
                return


def _print(console: Console, seen: View, *, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode(seen).decode())
    else:
        console.print(table(seen))
