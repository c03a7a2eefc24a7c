"""`prefetchd predictor ...`: which predictors there are, and whether one keeps to the contract.

Decides options, words and exit codes: 1 means that a check found something. All work is done
elsewhere.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from prefetchd.registry import names
from prefetchd.testing_predictor import examine_predictor

predictor_app = typer.Typer(help="List predictors, or check one.", no_args_is_help=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@predictor_app.callback()
def _group() -> None:
    """Predictors by name, by entry point or by file."""


@predictor_app.command("list")
def show(json: JsonFlag = False) -> None:
    """Name the predictors that come with the package or are installed beside it."""
    known = names("predictor")
    typer.echo(msgspec.json.encode(known).decode() if json else "\n".join(known))


@predictor_app.command("check")
def check(
    predictor: Annotated[str, typer.Argument(help="A name, or a path such as ./mine.py.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few calls, in this process; memory is not watched.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Try a predictor with invented traffic and say what is wrong. Exit code 1: something is.

    It says nothing of how good the guesses are: that is what a replay is for.
    """
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking")
        report = examine_predictor(
            predictor,
            thorough=not quick,
            progress=lambda done, whole: progress.update(task, completed=done, total=whole),
        )
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        Console(highlight=False, soft_wrap=True).print(report.words(), markup=False)
    if not report.ok:
        raise typer.Exit(1)
