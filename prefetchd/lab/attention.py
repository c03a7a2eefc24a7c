"""Reads recorded decode attention (.npz) and says which pages each step and layer needs.

Decides what a trace must hold and turns it into batches of page ids. Knows nothing of staging.

Columns: `block_ids` (uint16) and `mass` (float16) [step, layer, KV head, rank], the heaviest token
blocks by falling attention mass; optionally `hint_ids` and `hint_mass` of the same shape but for
the ranks, what the model can foresee of a layer when the one before it starts; `prompt_tokens`
and `block_tokens`.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.hostinfo import errno_name
from prefetchd.lab.trace_format import TraceError
from prefetchd.model import Geometry, Ids, PageHint, Scores

_REQUIRED = ("block_ids", "mass")
_HINTS = ("hint_ids", "hint_mass")
_ZIP_MAGIC = b"PK"
_BLOCKS_MAX = 1 << 16  # block ids are uint16

Columns = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class AttentionTrace:
    """One recorded decode. Arrays as described above; hints may be absent."""

    name: str
    block_ids: NDArray[np.uint16]
    mass: NDArray[np.float16]
    hint_ids: NDArray[np.uint16] | None
    hint_mass: NDArray[np.float16] | None
    prompt_tokens: int
    block_tokens: int

    @property
    def steps(self) -> int:
        return len(self.block_ids)

    @property
    def ranks(self) -> int:
        """Blocks recorded for each KV head: the largest top-k that can be replayed."""
        return int(self.block_ids.shape[3])

    @cached_property
    def geometry(self) -> Geometry:
        """Room for every block that is needed or foreseen."""
        last = int(self.block_ids.max())
        if self.hint_ids is not None:
            last = max(last, int(self.hint_ids.max()))
        return Geometry(self.block_ids.shape[1], last + 1)

    def need(self, step: int, layer: int, top_k: int) -> tuple[Ids, Scores]:
        """Blocks that one layer of one step needs: the union over KV heads of each head's top
        `top_k`, in rising order, with the largest mass that any head gives each."""
        return _union(self.block_ids[step, layer, :, :top_k], self.mass[step, layer, :, :top_k])

    def hint(self, step: int, layer: int, top_k: int) -> PageHint | None:
        """What is foreseen of a layer's need one layer early; None for layer 0 or without hints.

        The pages are page ids of that layer: each head's first 2 x `top_k`. A page's score is the
        largest, over heads, of its mass by that of the head's `top_k`-th page, so that 1 is the
        edge of being needed whatever the head.
        """
        if self.hint_ids is None or self.hint_mass is None or layer == 0:
            return None
        ids = self.hint_ids[step, layer, :, : 2 * top_k]
        mass = self.hint_mass[step, layer, :, : 2 * top_k].astype(np.float32)
        edge = mass[:, min(top_k, mass.shape[1]) - 1, None]
        blocks, scores = _union(ids, mass / np.maximum(edge, np.finfo(np.float16).tiny))
        order = np.argsort(-scores, kind="stable")
        return PageHint(self.geometry.page_ids(blocks[order], layer), scores[order])

    def frontier(self, step: int) -> int:
        """The newest block of a step."""
        return (self.prompt_tokens + step) // self.block_tokens


def _union(ids: NDArray[np.uint16], mass: NDArray[np.floating]) -> tuple[Ids, Scores]:
    blocks, where = np.unique(ids.reshape(-1), return_inverse=True)
    scores = np.zeros(len(blocks), np.float32)
    np.maximum.at(scores, where, mass.reshape(-1).astype(np.float32))
    return blocks.astype(np.int64), scores


def read_attention(path: Path) -> AttentionTrace:
    """Read a trace. Raises TraceError: missing, cut short, foreign, or lacking columns."""
    columns = _columns(path)
    lacking = [name for name in _REQUIRED if name not in columns]
    if lacking:
        raise TraceError(
            f"{path} lacks {', '.join(lacking)} (it has {', '.join(sorted(columns))}); "
            "record it again with attention masses"
        )
    _check_shapes(path, columns)
    hints = all(name in columns for name in _HINTS)
    for ids, mass in (_REQUIRED, _HINTS) if hints else (_REQUIRED,):
        _check_values(path, ids, columns[ids])
        _check_masses(path, mass, columns[mass])
    return AttentionTrace(
        name=path.stem,
        block_ids=columns["block_ids"].astype(np.uint16),
        mass=columns["mass"].astype(np.float16),
        hint_ids=columns["hint_ids"].astype(np.uint16) if hints else None,
        hint_mass=columns["hint_mass"].astype(np.float16) if hints else None,
        prompt_tokens=_number(path, columns, "prompt_tokens", 0, at_least=0),
        block_tokens=_number(path, columns, "block_tokens", 16, at_least=1),
    )


def _columns(path: Path) -> Columns:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
            if not magic:
                raise TraceError(f"{path} is empty; get it again")
            if magic != _ZIP_MAGIC:
                raise TraceError(
                    f"{path} is no .npz file (a zip archive of arrays); name a recorded trace"
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise TraceError(f"there is no trace {path}") from None
    except OSError as error:
        reason = errno_name(error.errno) if error.errno else str(error)
        raise TraceError(f"{path} cannot be read: {reason}") from error
    except _DAMAGE as error:
        raise TraceError(
            f"{path} cannot be read as an .npz trace: {error}; it may be cut short, get it again"
        ) from error


# What zipfile, zlib and numpy's header reader raise for bytes that are not as they should be.
_DAMAGE = (
    ValueError,
    TypeError,
    EOFError,
    KeyError,
    IndexError,
    MemoryError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def _check_shapes(path: Path, columns: Columns) -> None:
    shapes = {name: columns[name].shape for name in (*_REQUIRED, *_HINTS) if name in columns}
    for ids, mass in (_REQUIRED, _HINTS):
        if shapes.get(ids) != shapes.get(mass):
            raise TraceError(
                f"{path}: {ids} and {mass} differ in shape, {shapes.get(ids)} and "
                f"{shapes.get(mass)}; the trace is incomplete"
            )
    for ids in ("block_ids", "hint_ids"):
        if ids in shapes and (len(shapes[ids]) != 4 or 0 in shapes[ids]):
            raise TraceError(
                f"{path}: {ids} must be [step, layer, KV head, rank], not of shape {shapes[ids]}"
            )
    if "hint_ids" in shapes and shapes["hint_ids"][:3] != shapes["block_ids"][:3]:
        raise TraceError(
            f"{path}: hints are for {shapes['hint_ids'][:3]} steps, layers and heads, demands for "
            f"{shapes['block_ids'][:3]}; the trace is cut short or mixed up"
        )


def _check_values(path: Path, name: str, ids: NDArray[np.generic]) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise TraceError(f"{path}: {name} must be whole numbers, not {ids.dtype}")
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= _BLOCKS_MAX:
        raise TraceError(
            f"{path}: {name} run from {least} to {most}; blocks are numbered 0 to {_BLOCKS_MAX - 1}"
        )


def _check_masses(path: Path, name: str, mass: NDArray[np.generic]) -> None:
    if not np.issubdtype(mass.dtype, np.floating) or not np.isfinite(mass).all():
        raise TraceError(f"{path}: {name} must be finite floating-point numbers, not {mass.dtype}")


def _number(path: Path, columns: Columns, name: str, default: int, *, at_least: int) -> int:
    value = columns.get(name, np.array(default))
    if value.size != 1 or not np.issubdtype(value.dtype, np.integer) or value.item() < at_least:
        raise TraceError(
            f"{path}: {name} must be one whole number of at least {at_least}, not "
            f"{value.tolist()!s:.60}"
        )
    return int(value.item())
