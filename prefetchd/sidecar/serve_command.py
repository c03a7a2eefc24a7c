"""`prefetchd serve` and `prefetchd config`: what people type to run a daemon, and what they see.

Decides what is served where no file says so. All work is done elsewhere.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from prefetchd import store_opening
from prefetchd.config import (
    check_new_stores,
    exposed,
    limits_of,
    memory_of,
    read_config,
    settings_of,
    socket_mode,
)
from prefetchd.config_tables import EXAMPLE, Config, Made
from prefetchd.options import Options
from prefetchd.sidecar.hangups import Hangups
from prefetchd.sidecar.http import Http
from prefetchd.sidecar.logs import log_as_json
from prefetchd.sidecar.memory import Memory
from prefetchd.sidecar.namespace import NamespaceSettings, open_namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.place import Place, default_socket, state_folder
from prefetchd.sidecar.recording import record_events
from prefetchd.sidecar.reloading import Reloader
from prefetchd.sidecar.server import Server
from prefetchd.sidecar.supervisor import Supervisor
from prefetchd.sidecar.watching import Watch
from prefetchd.store import StoreError
from prefetchd.store_place import MisfitError
from prefetchd.units import parse_bytes

log = logging.getLogger("prefetchd")


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


config_app = typer.Typer(help="Show, check or begin a configuration.", no_args_is_help=True)

ConfigPath = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; `prefetchd config init` begins one.")
]


def serve(
    config: ConfigPath = None,
    store: Annotated[
        Path | None,
        typer.Option(help="A store, or a folder for stores that clients have made."),
    ] = None,
    socket: Annotated[Path | None, typer.Option(help="Where clients connect.")] = None,
    gpu: Annotated[
        str,
        typer.Option(help="cuda: push into GPU buffers of clients."),
    ] = "host",
    http: Annotated[
        str | None,
        typer.Option(help="Metrics, health and a page at HOST:PORT or unix:PATH; default: none."),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="json: one object a line, for machines.")
    ] = LogFormat.TEXT,
    event_log: Annotated[
        Path | None,
        typer.Option(help="A folder for logs of events, which `simulate events` replays."),
    ] = None,
    event_log_bytes: Annotated[
        str, typer.Option(help="Of the log of one namespace, which then ends.")
    ] = "256MiB",
) -> None:
    """Serve stores to engines on this machine, over a Unix socket.

    Without a configuration, programs of your own user have namespaces made by naming them, in
    --store or else in $XDG_STATE_HOME/prefetchd (~/.local/state/prefetchd).
    """
    log.setLevel(logging.INFO)  # before anything is opened, which may be worth a warning
    settings = read_config(config) if config else Config(made=Made(gpu=gpu))
    if config and (store or gpu != "host"):
        raise ValueError("give --config, or --store and --gpu: a configuration says both itself")
    path = socket or (Path(settings.daemon.socket) if settings.daemon.socket else default_socket())
    namespaces = _namespaces(settings, store, is_default=config is None)
    address = settings.daemon.http if http is None else http
    watch = Watch(namespaces)
    if log_format is LogFormat.JSON:
        log_as_json(namespaces)
    log_bytes = parse_bytes(event_log_bytes)
    if event_log is not None:
        record_events(namespaces, event_log, log_bytes)
    with ExitStack() as undone:
        hangups = Hangups()
        undone.callback(hangups.listen(unless_ignored=config is None))
        place = Place(path, socket_mode(settings))
        undone.callback(place.close)
        web = Http(address, watch) if address else None  # it tells of the opening, too
        if web:
            undone.callback(web.close)
        _open_all(namespaces)
        server = watch.server = Server(place, namespaces, limits_of(settings))
        server.supervisor = Supervisor(os.environ)
        undone.pop_all()
    _heed_signals(server, hangups, config, settings)
    try:
        _tell(server, web, log_format)
        server.run()
    finally:
        server.supervisor.stopping()
        if web:
            web.close()
        failures = server.close()
    if failures:
        raise StoreError("; ".join(failures))


def _heed_signals(server: Server, hangups: Hangups, path: Path | None, config: Config) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if path is None:  # which a terminal's end tells, too
        hangups.go_to(server.stop)
    else:
        hangups.go_to(partial(server.interrupt, Reloader(path, config, server).reload))


def _namespaces(settings: Config, store: Path | None, *, is_default: bool) -> Namespaces:
    spaces = {name: settings_of(space) for name, space in settings.namespaces.items()}
    made = settings.made
    folder = Path(made.folder) if made.folder else state_folder()
    if is_default:
        folder = store or folder
        if store is not None and store.is_dir() and store_opening.exists(store):
            only = NamespaceSettings(store, options=Options(gpu=made.gpu))
            return Namespaces({"default": only}, os.geteuid())
    may_make = made.enabled or is_default
    if may_make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif not spaces:
        raise ValueError("the configuration has no namespace, and none may be made: nothing to do")
    return Namespaces(
        spaces,
        os.geteuid(),
        folder if may_make else None,
        Options(gpu=made.gpu),
        most=made.namespaces,
        bytes_max=parse_bytes(made.bytes),
        staging_max=parse_bytes(made.staging),
        memory=Memory(memory_of(settings)),
    )


def _open_all(namespaces: Namespaces) -> None:
    """All that are configured, so that what is wrong with them is told at once."""
    try:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
            for name, settings in namespaces.settings.items():
                task = bars.add_task(f"{name}: reading headers", total=None)
                told = partial(_update, bars, task)
                try:
                    opened = open_namespace(name, settings, told, namespaces.memory)
                except MisfitError as error:  # the configuration's fault, whenever it is tried
                    raise ValueError(f"namespace {name}: {error}") from error
                namespaces.admit(opened)
    except BaseException:
        namespaces.close()
        raise


def _update(bars: Progress, task: TaskID, done: int, whole: int) -> None:
    bars.update(task, completed=done, total=whole)


def _tell(server: Server, web: Http | None, log_format: LogFormat) -> None:
    """What is served: to people, or in the log."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    say: Callable[[str], None] = partial(console.print, markup=False)
    if log_format is LogFormat.JSON:
        say = partial(log.info, "%s")
    for name, namespace in server.namespaces.open.items():
        runtime = namespace.runtime
        gpu = f"; pushes by {runtime.gpu.engine}" if runtime.gpu.identity else ""
        say(
            f"{name}: {runtime.geometry.blocks} blocks of {runtime.geometry.layers} pages of "
            f"{runtime.page_bytes} bytes, staging {runtime.slots} pages, "
            f"{runtime.stats().device}{gpu}"
        )
    server.supervisor.ready(server.status)
    if web:
        say(f"figures at {web.url}")
    typer.echo(f"serving at unix:{server.place.path}, process {os.getpid()}")


@config_app.command("init")
def init(
    file: Annotated[Path, typer.Argument(help="The file to begin.")] = Path("prefetchd.toml"),
) -> None:
    """Write an example with every table. A file that is there is left alone.

    Only its owner can read it, since it is to hold secrets: give it to the daemon's user or group.
    """
    try:
        with open(file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(EXAMPLE)
    except FileExistsError:
        raise ValueError(f"{file} is there already; nothing was written") from None
    typer.echo(f"wrote {file}")


@config_app.command("check")
def check(file: Annotated[Path, typer.Argument(help="The file to check.")]) -> None:
    """Read a configuration and say what is wrong with it, by line. Nothing is opened."""
    found = read_config(file)
    check_new_stores(found)
    if words := exposed(file, found):
        typer.echo(f"warning: {words}", err=True)
    count = len(found.namespaces)
    typer.echo(f"{file}: {count} namespace{'s' if count != 1 else ''}, nothing is wrong")


@config_app.command("show")
def show(
    config: ConfigPath = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a daemon would go by, with everything that is left to it. Secrets are not shown."""
    found = read_config(config) if config else Config()
    plain = msgspec.to_builtins(found)
    plain["daemon"]["socket"] = found.daemon.socket or str(default_socket())
    if config is None:
        plain["made"]["enabled"] = True
    if plain["made"]["enabled"] and not found.made.folder:
        plain["made"]["folder"] = str(state_folder())
    for space in plain["namespaces"].values():
        for secret in ("token", "salt"):
            space[secret] = "***" if space[secret] else ""
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(plain), indent=1).decode())
        return
    tables = {"daemon": plain["daemon"], "made": plain["made"]}
    tables |= {f"namespaces.{name}": space for name, space in plain["namespaces"].items()}
    for name, table in tables.items():
        typer.echo(f"[{name}]")
        for key, value in table.items():
            if value is not None:  # TOML has no word for it
                typer.echo(f"{key} = {msgspec.json.encode(value).decode()}")
