"""The command line: what people type, and how what goes wrong is told.

Decides names of commands, exit codes and progress bars; all work is done elsewhere.

Exit codes: 0 done, 1 a check found something, 2 bad input (a trace, an option, a name), 3 this
machine or store cannot do it, 4 wrong bytes were about to be used (never expected), 130
interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import traceback
from collections.abc import Sequence

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
from prefetchd.hostinfo import errno_name
from prefetchd.lab.trace_command import trace_app
from prefetchd.lab.trace_format import TraceError
from prefetchd.layout import LayoutError
from prefetchd.layout_command import show_layout
from prefetchd.registry import PLUGIN_PREFIX, RegistryError
from prefetchd.store import StoreError
from prefetchd.store_command import store_app

app = typer.Typer(
    help="A predictive staging engine for KV caches on NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(replay_app, name="replay")
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
app.add_typer(trace_app, name="trace")
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
    # Whatever ends a command is told once, by `main`.
    level = logging.INFO if verbose else logging.CRITICAL
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def _complain(words: object) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print("error:", str(words), markup=False)


def _plugin_fault(error: BaseException) -> str | None:
    """If the error arose in a file that was named on the command line: which, where and what."""
    cause = error.__cause__ if isinstance(error, EngineError) and error.__cause__ else error
    for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
        if str(frame.f_globals.get("__name__", "")).startswith(PLUGIN_PREFIX):
            place = f"{frame.f_code.co_filename}, line {line}"
            return f"{place}, in {frame.f_code.co_name}: {type(cause).__name__}: {cause}"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors end in one line on stderr and an exit code."""
    if threading.current_thread() is threading.main_thread():
        # A service manager's end is an end like any other: what was made for the run is removed.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app(arguments)
    except Exception as error:
        code, words = _judged(error)
        if code is None:
            raise  # a fault of ours: whoever reports it needs to see where it arose
        _complain(words)
        sys.exit(code)


def _judged(error: Exception) -> tuple[int | None, object]:
    """The exit code, or None for what nobody foresaw, and what to say."""
    if isinstance(error, WrongBytes):
        return 4, error
    if fault := _plugin_fault(error):
        return 2, fault
    if isinstance(error, _CANNOT):
        return 3, error
    if isinstance(error, _BAD_INPUT):
        return 2, error
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename}: " if error.filename else ""
        return 3, f"{where}{errno_name(error.errno)}"
    return None, error


if __name__ == "__main__":
    main()
