"""What a trace holds: its header, its columns, and the rules that each chunk of rows obeys.

Decides names, dtypes and shapes of both kinds of trace, and how rows are cut into chunks of bounded
size. Knows no file: `prefetchd.lab.trace_format` writes and reads them.

A row of a `decode` trace is one step; `block_ids[row, layer, KV head, rank]` are the heaviest token
blocks by falling attention `mass`. A row of a `restore` trace is one request, by arrival; `sizes`
says how many of `blocks` are its chain, in prefix order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

Kind = Literal["decode", "restore"]
VERSION = 1
PREFIX = "prefetchd.trace."
CHUNK_BYTES = 2 << 20
"""A chunk is cut at so many bytes of columns, so that a reader knows what it has to hold."""

Columns = dict[str, NDArray[np.generic]]
Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(Exception):
    """A trace cannot be used: which file, what is wrong with it, what to do."""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of all rows. 0 and "" stand for what is not told.

    `origin`: the file and the release it came from; `how`: what was done to it, in words;
    `synthetic`: generated, not recorded; `block_tokens`, `block_bytes`: of a block. Decode:
    `prompt_tokens` before the first step, `layers`, `kv_heads`. Restore: `stops` are the words that
    column `stop` numbers; `quantum_ns` is what arrivals were rounded to; `identity` is False where
    blocks were made up from lengths, so that no request shares any with another. `rows` counts the
    rows of each chunk; the writer fills it in.
    """

    kind: Kind
    name: str
    origin: str = ""
    licence: str = ""
    synthetic: bool = False
    how: str = ""
    block_tokens: Count = 0
    block_bytes: Count = 0
    prompt_tokens: Count = 0
    layers: Count = 0
    kv_heads: Count = 0
    stops: tuple[str, ...] = ("",)
    quantum_ns: Count = 0
    identity: bool = True
    rows: tuple[Count, ...] = ()

    @property
    def schema(self) -> str:
        return f"{PREFIX}{self.kind}/{VERSION}"

    @property
    def length(self) -> int:
        """Steps or requests in all chunks."""
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class Column:
    """`dtypes` that it may have, one and the same in all chunks; `axes` are in words."""

    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    is_required: bool = False


_RANKED = ("step", "layer", "KV head", "rank")
_IDS, _MASSES = ("<u2", "<u4"), ("<f2", "<f4")
COLUMNS: dict[Kind, dict[str, Column]] = {
    "decode": {
        "block_ids": Column(_IDS, _RANKED, is_required=True),
        "mass": Column(_MASSES, _RANKED, is_required=True),
        "hint_ids": Column(_IDS, _RANKED),
        "hint_mass": Column(_MASSES, _RANKED),
        "window_mass": Column(_MASSES, ("step", "layer", "query head", "window")),
    },
    "restore": {
        "arrival_ns": Column(("<i8",), ("request",), is_required=True),
        "sizes": Column(("<i8",), ("request",), is_required=True),
        "blocks": Column(("<i8",), ("block",), is_required=True),
        "session": Column(("<i8",), ("request",), is_required=True),
        "stop": Column(("<u2",), ("request",), is_required=True),
        "think_ns": Column(("<i8",), ("request",), is_required=True),
        "input_tokens": Column(("<i8",), ("request",)),
        "output_tokens": Column(("<i8",), ("request",)),
        "agent": Column(("<i4",), ("request",)),
    },
}
"""`input_tokens` and `output_tokens` are -1 where not told; `agent` is 0 for a session's main line
and the number of the sub-agent, from 1, within the session otherwise."""

_PAIRS = (("block_ids", "mass"), ("hint_ids", "hint_mass"))


def rows_of(kind: Kind, columns: Columns) -> int:
    """Steps or requests in a chunk."""
    return len(columns["block_ids" if kind == "decode" else "arrival_ns"])


def check(header: TraceHeader, columns: Columns, where: str) -> None:
    """Raises TraceError, beginning with `where`, for what is no chunk of such a trace."""
    known = COLUMNS[header.kind]
    strange = sorted(columns.keys() - known.keys())
    lacking = [name for name, one in known.items() if one.is_required and name not in columns]
    if strange or lacking:
        words = f"lacks {', '.join(lacking)}" if lacking else f"holds {', '.join(strange)}"
        raise TraceError(
            f"{where} {words}; a {header.kind} trace has the columns {', '.join(known)}"
        )
    for name, values in columns.items():
        _check_form(known[name], name, values, where)
    if header.kind == "decode":
        _check_decode(header, columns, where)
    else:
        _check_restore(header, columns, where)


def _check_form(column: Column, name: str, values: NDArray[np.generic], where: str) -> None:
    if values.dtype not in [np.dtype(dtype) for dtype in column.dtypes]:
        wanted = " or ".join(np.dtype(dtype).name for dtype in column.dtypes)
        raise TraceError(f"{where}: {name} must be {wanted}, not {values.dtype}")
    if values.ndim != len(column.axes):
        raise TraceError(
            f"{where}: {name} must be [{', '.join(column.axes)}], not of shape {values.shape}"
        )


def _check_decode(header: TraceHeader, columns: Columns, where: str) -> None:
    shape = columns["block_ids"].shape
    if header.block_tokens < 1:
        raise TraceError(f"{where}: the header of a decode must tell block_tokens")
    if 0 in shape or shape[1:3] != (header.layers, header.kv_heads):
        raise TraceError(
            f"{where}: block_ids of shape {shape} are not those of {header.layers} layers and "
            f"{header.kv_heads} KV heads"
        )
    for ids, mass in _PAIRS:
        one, other = (columns[name].shape if name in columns else None for name in (ids, mass))
        if one != other:
            raise TraceError(f"{where}: {ids} and {mass} differ in shape, {one} and {other}")
    if "hint_ids" in columns and columns["hint_ids"].shape[:3] != shape[:3]:
        raise TraceError(f"{where}: hint_ids of shape {columns['hint_ids'].shape} beside {shape}")
    if "window_mass" in columns and columns["window_mass"].shape[:2] != shape[:2]:
        raise TraceError(f"{where}: window_mass is not of the steps and layers of block_ids")
    for name, values in columns.items():
        if "mass" in name and not np.isfinite(cast("NDArray[np.float16]", values)).all():
            raise TraceError(f"{where}: {name} holds numbers that are not finite")


def _check_restore(header: TraceHeader, columns: Columns, where: str) -> None:
    count = len(columns["arrival_ns"])
    uneven = [name for name in columns if name != "blocks" and len(columns[name]) != count]
    sizes = columns["sizes"].astype(np.int64)
    if uneven or (sizes < 0).any() or int(sizes.sum()) != len(columns["blocks"]):
        what = uneven[0] if uneven else "sizes and blocks"
        raise TraceError(f"{where}: {what} do not fit the {count} arrivals; rows are missing")
    for name in ("arrival_ns", "blocks", "session", "think_ns"):
        if len(columns[name]) and columns[name].min() < 0:
            raise TraceError(f"{where}: {name} holds a negative number")
    if (np.diff(columns["arrival_ns"].astype(np.int64)) < 0).any():
        raise TraceError(f"{where}: arrival_ns falls; requests stand in the order of arrival")
    if count and int(columns["stop"].max()) >= len(header.stops):
        raise TraceError(f"{where}: stop names a reason that the header's table lacks")


def pieces(kind: Kind, columns: Columns, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Columns]:
    """The same rows in chunks of about `chunk_bytes`, at least a row each."""
    count = rows_of(kind, columns)
    if kind == "restore":
        ends = np.cumsum(columns["sizes"].astype(np.int64))
        flat = sum(values[:1].nbytes for name, values in columns.items() if name != "blocks")
        weight = ends * 8 + flat * np.arange(1, count + 1)
    else:
        step = sum(values[:1].nbytes for values in columns.values())
        ends, weight = None, step * np.arange(1, count + 1)
    first = 0
    while first < count:
        done = int(weight[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(weight, done + chunk_bytes, side="right")))
        piece = {name: values[first:last] for name, values in columns.items()}
        if ends is not None:
            start = int(ends[first - 1]) if first else 0
            piece["blocks"] = columns["blocks"][start : int(ends[last - 1])]
        yield piece
        first = last
