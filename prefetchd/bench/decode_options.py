"""What the command lines of a replayed and of a simulated decode share: options, input, output.

Decides names, defaults and checks of options; runs nothing.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd import metrics
from prefetchd.bench.crowd_decode import ORDER_UNKNOWN
from prefetchd.bench.output import Outputs
from prefetchd.bench.report import write_report
from prefetchd.bench.runs import CONTROLS, ReplayError, checked_slots, staging_slots
from prefetchd.bench.served import PRIVATE, Crowd
from prefetchd.bench.tables import print_replay
from prefetchd.lab.attention import AttentionTrace, read_attention
from prefetchd.lab.workload import Workload, batched
from prefetchd.options import DEPTH_MAX
from prefetchd.units import parse_bytes, parse_share

EMBEDDED_TRACE = "summ_pydocs_demo.npz"
ALL_CONTROLS = ",".join(CONTROLS)
_DAEMONS_OWN = {
    *("store", "device", "device_profile", "staging", "staging_blocks", "limit_blocks_s"),
    *("predictor", "evict", "controls", "depth"),
}

TracePath = Annotated[
    Path | None, typer.Argument(help="Recorded decode attention (.npz); default: the embedded one.")
]
PageBytes = Annotated[str, typer.Option(help="Bytes of a page.")]
TopK = Annotated[int, typer.Option(min=1, help="Blocks needed by each KV head.")]
LayerUs = Annotated[float, typer.Option(min=0, max=1e7, help="Compute time of a layer.")]
Hints = Annotated[bool, typer.Option(help="Give next-layer hints.")]
Predictors = Annotated[
    list[str] | None, typer.Option(help="Predictor by name or file; repeatable.")
]
Evict = Annotated[str, typer.Option(help="Eviction: lru, arc or cycle.")]
Controls = Annotated[str, typer.Option(help="Controls, by comma.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Replay only the first steps.")]
Warmup = Annotated[int, typer.Option(min=0, help="First steps not measured.")]
Depth = Annotated[int, typer.Option(min=1, max=DEPTH_MAX, help="Operations in flight at most.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests in the decode batch.")]
Shared = Annotated[str, typer.Option(help="Prompt share in common to all requests or clients.")]
Connect = Annotated[
    str | None, typer.Option(help="Replay at the daemon at unix:PATH, as it is configured.")
]
Namespace = Annotated[str, typer.Option(help="With --connect: the namespace.")]
Token = Annotated[str, typer.Option(envvar="PREFETCHD_TOKEN", help="With --connect: its token.")]
Clients = Annotated[
    int | None,
    typer.Option(min=1, max=128, help="So many processes at a daemon; a private one for each run."),
]
Json = Annotated[Path | None, typer.Option(help="Write JSON; - prints it.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML report.")]


def recorded(
    trace: Path | None,
    *,
    top_k: int,
    steps: int | None,
    warmup: int,
    requests: int,
    shared: str,
) -> Workload:
    """The decode of a trace, or of the embedded one. Raises TraceError, ReplayError."""
    workload = batched(
        _read(trace),
        top_k=top_k,
        steps=steps,
        requests=requests,
        shared_share=_shared(shared) if requests > 1 else 0.0,
    )
    if workload.steps <= warmup:
        raise ReplayError(
            f"{workload.steps} steps leave none to measure after {warmup} of warm-up; "
            "use --warmup or more steps"
        )
    return workload


def _read(trace: Path | None) -> AttentionTrace:
    if trace is not None:
        return read_attention(trace)
    with as_file(files("prefetchd.data") / EMBEDDED_TRACE) as path:
        return read_attention(path)


def crowd(
    context: typer.Context,
    connect: str | None,
    namespace: str,
    token: str,
    clients: int | None,
    shared: str = "0%",
) -> Crowd | None:
    """The clients that were asked for; None: the replay runs in this process. Raises ReplayError
    for options that a daemon has decided already."""
    if connect is None and clients is None:
        return None
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    count = clients or 1
    if connect is not None and (idle := sorted(given & _DAEMONS_OWN)):
        told = ", ".join("--" + name.replace("_", "-") for name in idle)
        raise ReplayError(
            f"with --connect the daemon has decided on {told} already: leave that out, or leave out"
            " --connect, and --clients starts private daemons"
        )
    if connect is None and given & {"namespace", "token"}:
        raise ReplayError("--namespace and --token are for --connect")
    if count > 1 and "controls" in given and "oracle" in names(context.params["controls"]):
        raise ReplayError(f"{ORDER_UNKNOWN}; leave it out of --controls")
    own = namespace if connect is not None else PRIVATE
    return Crowd(count, connect or "", own, token, _shared(shared) if count > 1 else 0.0)


def _shared(text: str) -> float:
    share = parse_share(text)
    if share is None:
        raise ReplayError(f"--shared {text} is no share; write a percentage, as in 50%")
    return share


def page_size(text: str) -> int:
    size = parse_bytes(text)
    if size < 16:
        raise ReplayError(f"a page of {size} bytes is too small to be stamped; give 16 or more")
    return size


def slots(workload: Workload, staging: str, page_bytes: int) -> int:
    """Slots of a share of all pages, or of so many bytes."""
    share = parse_share(staging)
    if share is not None:
        return staging_slots(workload, share)
    slot_bytes = -(-page_bytes // 4096) * 4096
    return checked_slots(workload, parse_bytes(staging) // slot_bytes)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def show(outputs: Outputs, console: Console, result: metrics.Result) -> None:
    """The table, or JSON, on stdout; files as asked, which `console` is told of."""
    outputs.show(
        console,
        encoded=metrics.encode(result),
        table=partial(print_replay, result),
        report=partial(write_report, result),
    )
