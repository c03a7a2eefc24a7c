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
from prefetchd.drive_profile import LEAST_GB_S, MOST_GB_S
from prefetchd.lab.requests import Requests, read_requests
from prefetchd.units import parse_bytes

EMBEDDED_REQUESTS = "conversation_demo.jsonl.gz"
ALL_CONTROLS = ",".join(CONTROLS)
_PAGE = 4096
_STAGING_MIN = 64
# Whatever these allow, the times of a run fit into 64 bits of nanoseconds.
_LEAD_MS_MAX = 1e7
_RATE_MIN, _RATE_MAX = 1e-3, 1e9
_SPEED_MIN, _SPEED_MAX = 1e-2, 1e9
_SPAN_S_MAX = 366 * 86_400

TracePath = Annotated[
    Path | None,
    typer.Argument(help="A restore trace, or requests (.jsonl); default: the embedded ones."),
]
BlockBytes = Annotated[str, typer.Option(help="Bytes of a block.")]
ModelledBlockBytes = Annotated[
    str | None, typer.Option(help="Bytes of a block; default: the trace's, in whole 4KiB, or 4MiB.")
]
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


def default_staging(blocks: int) -> int:
    return max(_STAGING_MIN, blocks // 4)


def check_numbers(
    leads: list[float],
    staging: int | None,
    requests: int | None,
    consume: float,
    speed: float,
) -> None:
    for lead in leads:
        if not 0 <= lead < _LEAD_MS_MAX:
            raise ReplayError(
                f"--lead-ms {lead:g} is no lead; give milliseconds, from 0 to {_LEAD_MS_MAX:g}"
            )
    if staging is not None and staging < _STAGING_MIN:
        raise ReplayError(
            f"--staging-blocks {staging} is too small; give it {_STAGING_MIN} or more"
        )
    if requests is not None and requests < 1:
        raise ReplayError(f"--requests {requests} leaves nothing to replay; give 1 or more")
    bounded = (
        ("--consume-blocks-s", consume, _RATE_MIN, _RATE_MAX),
        ("--speed", speed, _SPEED_MIN, _SPEED_MAX),
    )
    for name, value, least, most in bounded:
        if not least <= value <= most:
            raise ReplayError(f"{name} {value:g} makes no sense; give {least:g} to {most:g}")


def check_limit(limit: float, block_bytes: int, speed: float = 1.0) -> None:
    """0 is no limit; else it makes a drive profile, whose bounds are told in blocks a second."""
    blocks = 1e9 / block_bytes / speed  # of a GB
    least, most = math.ceil(1e3 * LEAST_GB_S * blocks) / 1e3, MOST_GB_S * blocks
    if limit != 0 and not least <= limit < most:
        raise ReplayError(
            f"--limit-blocks-s {limit:g} is no rate for blocks of {block_bytes} bytes; give "
            f"{least:g} to {most:g} blocks a second, or 0 for no limit"
        )


def modelled_blocks(text: str | None, trace_bytes: int) -> int:
    """Bytes of a modelled block: as asked for, or else the trace's own up to whole pages, or else
    4 MiB."""
    own = str(-(-trace_bytes // _PAGE) * _PAGE) if trace_bytes else "4MiB"
    return whole_blocks(own if text is None else text)


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
    load = read_requests(trace, limit, group)
    span_s = int(load.arrival_ns.max(initial=0)) / 1e9
    if span_s > _SPAN_S_MAX:
        raise ReplayError(
            f"the requests of {trace} arrive over {span_s / 86_400:.3g} days, more than a year: "
            "its times may be in another unit than they are taken for; replay a part of it with "
            "--requests"
        )
    return load


def show(outputs: Outputs, console: Console, result: RestoreResult) -> None:
    """The table, or JSON, on stdout; files as asked, which `console` is told of."""
    outputs.show(
        console,
        encoded=encode(result),
        table=partial(print_restore, result),
        report=partial(write_restore_report, result),
    )
