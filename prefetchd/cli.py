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
from prefetchd.commands import Commands
from prefetchd.guarded import Terminated

app = typer.Typer(
    cls=Commands,
    help="A predictive staging engine for KV caches on NVMe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_USAGE = 2  # click's own code, for what it cannot parse


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
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    if any(getattr(formatter, "for_machines", False) for formatter in formatters):
        logging.getLogger("prefetchd").critical("%s", words)  # every line there is JSON
        return
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
        from prefetchd.exits import judged

        code, why = judged(error)
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
        find = getattr(command, "get_command", lambda _, name: None)
        command = find(None, word) or command
    options = getattr(command, "params", [])
    return any("--json" in one.opts and getattr(one, "is_flag", False) for one in options)


if __name__ == "__main__":
    main()
