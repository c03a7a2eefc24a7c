"""What the commands on stores have in common: options, progress bars, how results are printed.

Decides how these look and read. Refuses to know what any of the commands does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

Told = Callable[[int, int], None]

StorePath = Annotated[
    Path, typer.Argument(readable=False, help="The store's (first) folder, or its device.")
]
RawFlag = Annotated[bool, typer.Option("--raw", help="A path may be a block device.")]
ForceFlag = Annotated[
    bool, typer.Option("--force", help="With --raw: whatever lies there is lost.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MissingFlag = Annotated[
    bool, typer.Option("--allow-missing-paths", help="Go on without paths that are away.")
]
KeyFile = Annotated[
    Path | None, typer.Option(readable=False, help="The key file of an encrypted store.")
]
DeviceName = Annotated[str, typer.Option(help="How it is read: uring, liburing or threads.")]


@contextmanager
def bars() -> Iterator[Callable[[str], Told]]:
    """Progress bars on stderr, one a name, made when they are first told of anything."""
    with Progress(console=Console(stderr=True), transient=True) as progress:

        def bar(name: str) -> Told:
            tasks: list[Any] = []

            def tell(done: int, whole: int) -> None:
                if not tasks:
                    tasks.append(progress.add_task(name, total=whole))
                progress.update(tasks[0], completed=done, total=whole)

            return tell

        yield bar


def print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def out() -> Console:
    return Console(highlight=False, soft_wrap=True)
