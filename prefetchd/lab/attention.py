"""Reads recorded decode attention (.npz) and says which pages each step and layer needs.

Decides what a trace must hold and turns it into batches of page ids. Knows nothing of staging.

Columns: `block_ids` (uint16) and `mass` (float16) [step, layer, KV head, rank], the heaviest token
blocks by falling attention mass; optionally `hint_ids` and `hint_mass` of the same shape but for
the ranks, what the model can foresee of a layer when the one before it starts; `prompt_tokens`
and `block_tokens`.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Geometry, Ids, PageHint, Scores

_REQUIRED = ("block_ids", "mass")
_HINTS = ("hint_ids", "hint_mass")


class TraceError(Exception):
    """A trace cannot be used: which file, what is wrong with it, what to do."""


@dataclass(frozen=True, slots=True)
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
    def geometry(self) -> Geometry:
        return Geometry(self.block_ids.shape[1], int(self.block_ids.max()) + 1)

    def need(self, step: int, layer: int, top_k: int) -> tuple[Ids, Scores]:
        """Blocks that one layer of one step needs: the union over KV heads of each head's top
        `top_k`, in rising order, with the largest mass that any head gives each."""
        return _union(self.block_ids[step, layer, :, :top_k], self.mass[step, layer, :, :top_k])

    def hint(self, step: int, layer: int) -> PageHint | None:
        """What is foreseen of a layer's need one layer early; None for layer 0 or without hints.

        The pages are page ids of that layer.
        """
        if self.hint_ids is None or self.hint_mass is None or layer == 0:
            return None
        blocks, scores = _union(self.hint_ids[step, layer], self.hint_mass[step, layer])
        return PageHint(self.geometry.page_ids(blocks, layer), scores)

    def frontier(self, step: int) -> int:
        """The newest block of a step."""
        return (self.prompt_tokens + step) // self.block_tokens


def _union(ids: NDArray[np.uint16], mass: NDArray[np.float16]) -> tuple[Ids, Scores]:
    blocks, where = np.unique(ids.reshape(-1), return_inverse=True)
    scores = np.zeros(len(blocks), np.float32)
    np.maximum.at(scores, where, mass.reshape(-1).astype(np.float32))
    return blocks.astype(np.int64), scores


def read_attention(path: Path) -> AttentionTrace:
    """Read a trace. Raises TraceError: missing, cut short, foreign, or lacking columns."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            columns = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise TraceError(f"there is no trace {path}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(
            f"{path} cannot be read as an .npz trace: {error}; it may be cut short, get it again"
        ) from error
    lacking = [name for name in _REQUIRED if name not in columns]
    if lacking:
        raise TraceError(
            f"{path} lacks {', '.join(lacking)} (it has {', '.join(sorted(columns))}); "
            "record it again with attention masses"
        )
    _check_shapes(path, columns)
    hints = all(name in columns for name in _HINTS)
    return AttentionTrace(
        name=path.stem,
        block_ids=columns["block_ids"],
        mass=columns["mass"],
        hint_ids=columns["hint_ids"] if hints else None,
        hint_mass=columns["hint_mass"] if hints else None,
        prompt_tokens=int(columns.get("prompt_tokens", 0)),
        block_tokens=int(columns.get("block_tokens", 16)),
    )


def _check_shapes(path: Path, columns: dict[str, NDArray[np.generic]]) -> None:
    shapes = {name: columns[name].shape for name in (*_REQUIRED, *_HINTS) if name in columns}
    for ids, mass in (_REQUIRED, _HINTS):
        if shapes.get(ids) != shapes.get(mass):
            raise TraceError(
                f"{path}: {ids} and {mass} differ in shape, {shapes.get(ids)} and "
                f"{shapes.get(mass)}; the trace is incomplete"
            )
    first = shapes["block_ids"]
    if len(first) != 4 or 0 in first or not np.issubdtype(columns["block_ids"].dtype, np.integer):
        raise TraceError(
            f"{path}: block_ids must be integers [step, layer, KV head, rank], not "
            f"{columns['block_ids'].dtype} of shape {first}"
        )
    if "hint_ids" in shapes and shapes["hint_ids"][:3] != first[:3]:
        raise TraceError(
            f"{path}: hints are for {shapes['hint_ids'][:3]} steps, layers and heads, demands for "
            f"{first[:3]}; the trace is cut short or mixed up"
        )
