"""The command line: what people type, and how what goes wrong is told.

Decides names of commands, exit codes and progress bars; all work is done elsewhere.

Exit codes: 0 done, 2 bad input (a trace, an option, a name), 3 this machine or store cannot do
it, 4 wrong bytes were about to be used (never expected), 130 interrupted.
"""

from __future__ import annotations

import logging
import sys

import typer
from rich.console import Console

from prefetchd import __version__
from prefetchd.bench.commands import bench_app
from prefetchd.bench.decode import WrongBytes
from prefetchd.bench.replay import ReplayError
from prefetchd.bench.replay_command import replay_app
from prefetchd.bench.report import ReportError
from prefetchd.bench.ring import BenchError
from prefetchd.device import DeviceError
from prefetchd.engine import EngineError
from prefetchd.gpu import GpuError
from prefetchd.lab.attention import TraceError
from prefetchd.layout import LayoutError
from prefetchd.layout_command import show_layout
from prefetchd.registry import RegistryError
from prefetchd.store import StoreError

app = typer.Typer(
    help="A predictive staging engine for KV caches on NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(replay_app, name="replay")
app.add_typer(bench_app, name="bench")
app.command("layout")(show_layout)

_BAD_INPUT = (ReplayError, TraceError, LayoutError, RegistryError, ReportError, ValueError)
_CANNOT = (StoreError, DeviceError, GpuError, EngineError, BenchError)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what the engine decides."),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    level = logging.INFO if verbose else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def _complain(error: BaseException) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print("error:", str(error), markup=False)


def main() -> None:
    """Run the command line; errors end in one line on stderr and an exit code."""
    try:
        app()
    except _BAD_INPUT as error:
        _complain(error)
        sys.exit(2)
    except _CANNOT as error:
        _complain(error)
        sys.exit(3)
    except WrongBytes as error:
        _complain(error)
        sys.exit(4)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
