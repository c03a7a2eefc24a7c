"""The command line: what people type, and how what goes wrong is told.

Decides names of commands, exit codes and progress bars; all work is done elsewhere.

Exit codes: 0 done, 1 a check found something, 2 bad input (a trace, an option, a name), 3 this
machine or store cannot do it, 4 wrong bytes were about to be used (never expected), 130
interrupted, 143 ended by SIGTERM. A command that was to print JSON on stdout prints an object with
`error` and `exit_code` there if it fails, beside the line on stderr.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence

import msgspec
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
from prefetchd.guarded import PredictorError, Terminated
from prefetchd.hostinfo import errno_name
from prefetchd.lab.record_command import record
from prefetchd.lab.score_command import score_command
from prefetchd.lab.score_workers import WorkersError
from prefetchd.lab.simulate_command import simulate_app
from prefetchd.lab.simulate_restore_command import restore as simulate_restore
from prefetchd.lab.trace_command import trace_app
from prefetchd.lab.trace_format import TraceError
from prefetchd.layout import LayoutError
from prefetchd.layout_command import show_layout
from prefetchd.predictor_command import predictor_app
from prefetchd.registry import RegistryError, plugin_fault
from prefetchd.sidecar.namespace_command import namespace_app
from prefetchd.sidecar.place import PlaceError
from prefetchd.sidecar.serve_command import config_app, serve
from prefetchd.store import StoreError
from prefetchd.store_command import store_app

app = typer.Typer(
    help="A predictive staging engine for KV caches on NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(replay_app, name="replay")
simulate_app.command("restore")(simulate_restore)
app.add_typer(simulate_app, name="simulate")
app.command("score")(score_command)
app.add_typer(bench_app, name="bench")
app.add_typer(store_app, name="store")
trace_app.command("record")(record)
app.add_typer(trace_app, name="trace")
app.add_typer(predictor_app, name="predictor")
app.add_typer(config_app, name="config")
app.add_typer(namespace_app, name="namespace")
app.command("layout")(show_layout)
app.command("serve")(serve)

_USAGE = 2  # click's own code, for what it cannot parse
_BAD_INPUT = (
    ReplayError,
    TraceError,
    LayoutError,
    RegistryError,
    PredictorError,
    ReportError,
    ValueError,
)
_CANNOT = (StoreError, DeviceError, GpuError, EngineError, BenchError, WorkersError, PlaceError)


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


def _terminated(number: int, _: object) -> None:
    raise Terminated(128 + number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors end in one line on stderr and an exit code."""
    if threading.current_thread() is threading.main_thread():
        # A service manager's end is an end like any other: what was made for the run is removed.
        signal.signal(signal.SIGTERM, _terminated)
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(words)
    except SystemExit as end:
        if end.code == _USAGE:
            _tell_machine(words, "the command line is not understood; stderr says why", _USAGE)
        raise
    except Exception as error:
        code, why = _judged(error)
        if code is None:
            raise  # a fault of ours: whoever reports it needs to see where it arose
        _complain(why)
        _tell_machine(words, str(why), code)
        sys.exit(code)


def _tell_machine(words: Sequence[str], why: str, code: int) -> None:
    if _json_on_stdout(words):
        typer.echo(msgspec.json.encode({"error": why, "exit_code": code}).decode())


def _json_on_stdout(words: Sequence[str]) -> bool:
    """Whether that was asked for: `--json` is a flag with some commands, and names a file or `-`
    with others."""
    if "--json=-" in words:
        return True
    if "--json" not in words:
        return False
    if "-" in words[words.index("--json") + 1 :][:1]:
        return True
    command: object = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    options = getattr(command, "params", [])
    return any("--json" in one.opts and getattr(one, "is_flag", False) for one in options)


def _judged(error: Exception) -> tuple[int | None, object]:
    """The exit code, or None for what nobody foresaw, and what to say."""
    if isinstance(error, WrongBytes):
        return 4, error
    cause = error.__cause__ if isinstance(error, EngineError) and error.__cause__ else error
    if fault := plugin_fault(cause):
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
