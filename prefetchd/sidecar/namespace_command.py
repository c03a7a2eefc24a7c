"""`prefetchd namespace`: what people ask of a namespace of a daemon that runs.

Decides what is asked before, and how it is told. All work is the daemon's.
"""

from __future__ import annotations

import socket
import sys
from contextlib import nullcontext
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prefetchd.hostinfo import errno_name
from prefetchd.sidecar.handshake import AwayError, SidecarError
from prefetchd.sidecar.place import path_of
from prefetchd.sidecar.protocol import FRAME_BYTES_MAX, VERSION, Erase
from prefetchd.sidecar.replies import Erased, Error
from prefetchd.sidecar.wire import Frames, frame, reply_of

namespace_app = typer.Typer(help="Namespaces of a daemon that runs.", no_args_is_help=True)


@namespace_app.command("erase")
def erase(
    name: Annotated[str, typer.Argument(help="The namespace.")],
    connect: Annotated[str, typer.Option(help="Where the daemon is: unix:PATH.")] = "unix:",
    token: Annotated[
        str,
        typer.Option(envvar="PREFETCHD_TOKEN", help="If it has one, and you are not its owner."),
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write zeros over its files first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout_s: Annotated[float, typer.Option(help="How long it may take.")] = 3600.0,
) -> None:
    """Erase all that a namespace holds, while the daemon serves. It is there again, and empty.

    Without --overwrite its files are removed: their bytes lie on the drive until something else is
    written there.
    """
    if not yes and not sys.stdin.isatty():
        raise ValueError(f"all of namespace {name!r} would be erased; say --yes")
    if not yes and not typer.confirm(f"Erase all of namespace {name!r}?", err=True):
        raise ValueError("nothing was erased")
    console = Console(stderr=True)
    waiting = console.status(f"erasing {name}") if console.is_terminal else nullcontext()
    with waiting:
        said = asked(connect, Erase(VERSION, name, token, overwrite), timeout_s)
    if json:
        told = {"erased": name, "blocks": said.blocks, "bytes": said.size, "overwritten": overwrite}
        typer.echo(msgspec.json.encode(told).decode())
    else:
        how = "overwritten and removed" if overwrite else "removed"
        typer.echo(f"erased {name}: {said.blocks} blocks, {said.size} bytes of files {how}")


def asked(address: str, message: Erase, timeout_s: float) -> Erased:
    """The daemon's answer. Raises PlaceError, AwayError, SidecarError."""
    path, frames = path_of(address), Frames(FRAME_BYTES_MAX)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            sock.sendall(frame(message))
            while not frames.whole:
                data = sock.recv(1 << 16)
                if not data:
                    raise AwayError(f"the daemon at {path} ended before it had answered")
                frames.feed(data)
    except OSError as error:
        why = errno_name(error.errno) if error.errno else str(error)
        raise AwayError(f"no daemon answers at {path}: {why}") from error
    reply = reply_of(frames.whole[0])
    if isinstance(reply, Error):
        raise SidecarError(f"the daemon refuses: {reply.words}")
    if not isinstance(reply, Erased):
        raise SidecarError(f"the daemon at {path} does not speak as expected")
    return reply
