"""Shows what a trace holds as tables. Decides words and digits only."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from prefetchd.lab.decode_info import DecodeInfo
from prefetchd.lab.restore_info import RestoreInfo, Spread
from prefetchd.lab.trace_info import TraceInfo

_Rows = list[tuple[str, str]]


def print_info(found: TraceInfo, console: Console) -> None:
    """The trace, its figures, and what it is no use for."""
    words = "SYNTHETIC " if found.synthetic else ""
    table = Table(title=f"{words}{found.kind} trace {found.name}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    rows = [("file", found.file), ("format", found.format), ("bytes", f"{found.file_bytes:,}")]
    if found.block_tokens:
        rows.append(("tokens a block", f"{found.block_tokens}"))
    if found.block_bytes:
        rows.append(("bytes a block", f"{found.block_bytes:,}"))
    if found.decode is not None:
        rows += _decode(found.decode)
    if found.restore is not None:
        rows += _restore(found.restore)
    for what, value in rows:
        table.add_row(what, value)
    console.print(table, markup=False)
    for what, text in (("origin", found.origin), ("licence", found.licence), ("how", found.how)):
        if text:
            console.print(f"{what}: {text}", markup=False)
    for text in found.cannot:
        console.print(f"cannot: {text}", markup=False)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count > 1)}"


def _decode(info: DecodeInfo) -> _Rows:
    return [
        ("steps", f"{info.steps:,}"),
        ("layers x KV heads x ranks", f"{info.layers} x {info.kv_heads} x {info.ranks}"),
        ("blocks", f"{info.blocks:,}"),
        ("tokens of the prompt", f"{info.prompt_tokens:,}"),
        (f"pages needed by a layer (top {info.top_k})", f"{info.pages_per_layer:.1f}"),
        ("far pages among them", _share(info.far_share)),
        *((f"needed {_steps(lag)} before too", _share(one)) for lag, one in info.overlap.items()),
        *((f"... far pages, {_steps(lag)}", _share(one)) for lag, one in info.far_overlap.items()),
        ("never needed before", _share(info.new_share)),
        ("mass of block 0", _share(info.sink_mass)),
        (f"mass of the top {info.top_k}", _share(info.top_k_mass)),
        ("hints for each KV head", f"{info.hint_ranks or 'none'}"),
        ("needed pages foreseen", _share(info.hint_recall)),
    ]


def _restore(info: RestoreInfo) -> _Rows:
    rate = "-" if info.requests_per_s is None else f"{info.requests_per_s:.2f}"
    rows = [
        ("requests", f"{info.requests:,}"),
        ("sessions", f"{info.sessions:,}"),
        ("requests of sub-agents", f"{info.agent_requests:,}"),
        ("time", f"{info.span_s:,.0f} s"),
        ("requests a second", rate),
        ("blocks needed", f"{info.blocks:,}"),
        ("distinct blocks", f"{info.distinct_blocks:,}"),
        ("reused from an earlier request", _share(info.reuse_share)),
        ("blocks needed only once", _share(info.once_share)),
        ("blocks a request (P50, P99, most)", _spread(info.chain_blocks)),
        ("think time, s (P50, P99, most)", _spread(info.think_s)),
    ]
    for what, tokens in (("tokens in", info.input_tokens), ("tokens out", info.output_tokens)):
        if tokens is not None:
            rows.append((what, f"{tokens:,}"))
    rows += [(f"stopped: {stop or 'not told'}", f"{count:,}") for stop, count in info.stops.items()]
    return rows


def _spread(spread: Spread) -> str:
    return f"{spread.p50:,.0f}, {spread.p99:,.0f}, {spread.max:,.0f}"
