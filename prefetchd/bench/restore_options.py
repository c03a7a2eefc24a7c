"""What the command lines of a replayed and of a simulated restore share: options, input, output.

Decides names, defaults and checks of options; runs nothing.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd.bench.output import Outputs
from prefetchd.bench.restore_replay import CONTROLS
from prefetchd.bench.restore_report import write_restore_report
from prefetchd.bench.restore_result import RestoreResult, encode
from prefetchd.bench.restore_tables import print_restore
from prefetchd.bench.runs import ReplayError
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.units import parse_bytes

EMBEDDED_REQUESTS = "conversation_demo.jsonl.gz"
ALL_CONTROLS = ",".join(CONTROLS)
_PAGE = 4096
_STAGING_MIN = 64

TracePath = Annotated[
    Path | None,
    typer.Argument(help="A restore trace, or requests (.jsonl); default: the embedded ones."),
]
BlockBytes = Annotated[str, typer.Option(help="Bytes of a block.")]
Leads = Annotated[
    list[float] | None,
    typer.Option("--lead-ms", help="How long before its start a request is announced; repeatable."),
]
Hints = Annotated[bool, typer.Option(help="Tell the blocks ahead; else demand the first two then.")]
ConsumeRate = Annotated[float, typer.Option(help="Blocks a second a request takes.")]
Limit = Annotated[int | None, typer.Option(help="Only the first requests.")]
GroupBlocks = Annotated[
    int, typer.Option(min=1, help="So many blocks of the trace are one block here.")
]


def default_staging(load: Requests) -> int:
    return max(_STAGING_MIN, load.distinct // 4)


def check_numbers(
    leads: list[float],
    staging: int | None,
    requests: int | None,
    limit: float,
    consume: float,
    speed: float,
) -> None:
    for lead in leads:
        if not 0 <= lead < 1e7:
            raise ReplayError(f"--lead-ms {lead:g} is no lead; give milliseconds, 0 or more")
    if staging is not None and staging < _STAGING_MIN:
        raise ReplayError(
            f"--staging-blocks {staging} is too small; give it {_STAGING_MIN} or more"
        )
    if requests is not None and requests < 1:
        raise ReplayError(f"--requests {requests} leaves nothing to replay; give 1 or more")
    if not 0 <= limit < math.inf:
        raise ReplayError(f"--limit-blocks-s {limit:g} is no rate; give blocks a second, or 0")
    for name, value in (("--consume-blocks-s", consume), ("--speed", speed)):
        if not 0 < value < 1e9:
            raise ReplayError(f"{name} {value:g} makes no sense; give a number above 0")


def whole_blocks(text: str) -> int:
    size = parse_bytes(text)
    if size < _PAGE or size % _PAGE:
        raise ReplayError(
            f"--block-bytes {text} cannot be read directly; give a multiple of {_PAGE}, as in 64KiB"
        )
    return size


def read_trace(trace: Path | None, limit: int | None, group: int = 1) -> Requests:
    if trace is None:
        with as_file(files("prefetchd.data") / EMBEDDED_REQUESTS) as path:
            return read_requests(path, limit, group)
    return read_requests(trace, limit, group)


def show(outputs: Outputs, console: Console, result: RestoreResult) -> None:
    """The table, or JSON, on stdout; files as asked, which `console` is told of."""
    outputs.show(
        console,
        encoded=encode(result),
        table=partial(print_restore, result),
        report=partial(write_restore_report, result),
    )
