"""Records what a model's attention looks at while it generates, as a decode trace of the lab.

Decides what a step is (a pass for one token), which blocks are noted (the heaviest of each KV head)
and what is said of hints. Keeps a few steps in memory, whatever the length of the recording.

    with Recorder(model, Path("session.trace"), name="session") as recorder:
        model.generate(ids, max_new_tokens=200)

It stands in for the model's attention function and calls the usual one (sdpa), so any decoder that
is served through transformers' attention interface will do. A hint needs the next layer's query
early; where a model's queries cannot be made by `adapters.selection`, the trace has none.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prefetchd.adapters.models import BLOCK_TOKENS, rotation_of, shape_of
from prefetchd.adapters.selection import Queries
from prefetchd.lab.trace_format import TraceError, TraceHeader, TraceWriter
from prefetchd.lab.trace_schema import Columns

RANKS, HINT_RANKS = 64, 48
"""Blocks of each KV head that are noted, at most; fewer where the prompt has not so many."""
KEPT_STEPS = 16
"""Steps in memory before they are written."""
_ATTENTION = "prefetchd_recording"
_MARK = "prefetchd_recorder"

Ranked = tuple[NDArray[np.int64], NDArray[np.float16]]
"""Block ids and masses, [KV head, rank] each, by falling mass."""


class Recorder:
    """Writes `path` at the end of the `with` block; nothing if it raises. Raises TraceError for
    what is no plain decode of one sequence, ValueError for a model that cannot be recorded.

    `name`, `origin`, `licence`, `how`: what the trace says of itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        path: Path,
        *,
        name: str,
        origin: str = "",
        licence: str = "",
        how: str = "",
    ) -> None:
        shape = shape_of(model)
        self._model = model
        self._layers, self._heads = shape.layers, shape.heads
        self._queries, why = _queries(model, self._told)
        header = TraceHeader(
            kind="decode",
            name=name,
            origin=origin or f"recorded from a model of type {model.config.model_type}",
            licence=licence,
            how=" ".join(filter(None, [how, why])),
            block_tokens=BLOCK_TOKENS,
            layers=shape.layers,
            kv_heads=shape.heads,
        )
        self._writer = TraceWriter(path, header)
        self._foreseen: dict[int, torch.Tensor] = {}  # by layer, until its turn
        self._ranks = (0, 0)
        self._tokens = 0  # keys of the step under way
        self._step: list[list[Ranked]] = []  # by layer: what it needs, what was foreseen
        self._kept: list[list[list[Ranked]]] = []
        self.steps = 0

    # --- what the model tells ---

    def _told(self, layer: int, query: torch.Tensor, following: torch.Tensor | None) -> bool:
        if following is not None:
            self._foreseen[layer + 1] = following
        return False

    def attended(self, layer: int, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        """One layer's queries and keys, [1, head, token, dimension]."""
        if query.shape[2] != 1:
            self._foreseen.clear()
            return
        if len(query) != 1:
            raise TraceError(f"a batch of {len(query)} is no decode of one sequence: record one")
        self._check_turn(layer, key.shape[2])
        blocks = -(-self._tokens // BLOCK_TOKENS)
        if self._ranks == (0, 0):
            self._ranks = min(RANKS, blocks), min(HINT_RANKS, blocks)
            self._writer.header = msgspec.structs.replace(
                self._writer.header, prompt_tokens=self._tokens - 1
            )
        pair = [_heaviest(query[0, :, 0], key[0], scaling, self._ranks[0])]
        if self._queries is not None:
            foreseen = self._foreseen.pop(layer, None)
            ids, mass = np.zeros((2, self._heads, self._ranks[1]))
            none = ids.astype(np.int64), mass.astype(np.float16)
            pair.append(
                none if foreseen is None else _heaviest(foreseen, key[0], scaling, self._ranks[1])
            )
        self._step.append(pair)
        if len(self._step) == self._layers:
            self._kept.append(self._step)
            self._step = []
            self.steps += 1
            if len(self._kept) == KEPT_STEPS:
                self._write()

    def _check_turn(self, layer: int, tokens: int) -> None:
        if layer == 0 and not self._step:
            if self.steps and tokens != self._tokens + 1:
                raise TraceError(
                    f"step {self.steps} has {tokens} keys after one with {self._tokens}: record one"
                    " sequence at a time, with a cache that keeps all keys"
                )
            self._tokens = tokens
        if layer != len(self._step) or tokens != self._tokens:
            raise TraceError(
                f"layer {layer} came with {tokens} keys where layer {len(self._step)} with "
                f"{self._tokens} was due: only decoders whose layers all keep all keys, in order, "
                "can be recorded"
            )

    # --- the file ---

    def _write(self) -> None:
        if not self._kept:
            return
        columns: Columns = {}
        for place, (ids, mass) in enumerate((("block_ids", "mass"), ("hint_ids", "hint_mass"))):
            if place == 0 or self._queries is not None:
                rows = [[layer[place] for layer in step] for step in self._kept]
                columns[ids] = np.array([[pair[0] for pair in row] for row in rows], np.uint32)
                columns[mass] = np.array([[pair[1] for pair in row] for row in rows], np.float16)
        self._writer.write(columns)
        self._kept = []

    def __enter__(self) -> Self:
        model = self._model
        self._usual = model.config._attn_implementation
        self._writer.__enter__()
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _MARK, self)
        model.set_attn_implementation(_ATTENTION)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._model.set_attn_implementation(self._usual)
        for module in self._model.modules():
            if hasattr(module, _MARK):
                delattr(module, _MARK)
        if self._queries is not None:
            self._queries.remove()
        if kind is None:
            try:
                self._write()
            except BaseException as failed:
                self._writer.__exit__(type(failed), failed, None)
                raise
        self._writer.__exit__(kind, error, trace)


def _queries(model: PreTrainedModel, told: Any) -> tuple[Queries | None, str]:
    """Hooks on its queries; if there can be none, why."""
    try:
        return Queries(model, rotation_of(model), told), ""
    except ValueError as error:
        return None, f"Without hints: {error}."


def _heaviest(query: torch.Tensor, keys: torch.Tensor, scaling: float, ranks: int) -> Ranked:
    """The blocks with the largest mass for each KV head, as a mean over its query heads; `query`
    is [head, dimension], `keys` [KV head, token, dimension]."""
    grouped = query.view(len(keys), -1, query.shape[-1]).float()
    shares = torch.softmax(grouped @ keys.float().transpose(1, 2) * scaling, dim=2).mean(dim=1)
    spare = -shares.shape[1] % BLOCK_TOKENS
    masses = torch.nn.functional.pad(shares, (0, spare)).unflatten(1, (-1, BLOCK_TOKENS)).sum(2)
    best = torch.topk(masses, ranks)
    return best.indices.cpu().numpy(), best.values.cpu().numpy().astype(np.float16)


def _recorded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> Any:
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    getattr(module, _MARK).attended(module.layer_idx, query, key, scale)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _recorded)
ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_mask)
