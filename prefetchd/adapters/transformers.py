"""A `transformers` cache whose keys and values live in prefetchd: on NVMe, staged in DRAM.

Decides how a model meets a store: what its pages are called and hold, when a pass begins, which
ways of generating are refused. How pages are kept is `prefetchd.adapters.paged`'s.

    with prefetchd.adapters.transformers.open(model, "/nvme/kv", blocks=4096) as kv:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = kv.generate(ids, max_new_tokens=64)

`generate` finds what is stored of the prompt, computes the rest in chunks and stores that, too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from prefetchd.adapters.paged import KvLost, PagedSequence, Shape
from prefetchd.adapters.selection import Queries, Selector, Sparse
from prefetchd.assembly import Options
from prefetchd.keys import block_keys
from prefetchd.layout import Layout, uniform
from prefetchd.opening import open_runtime
from prefetchd.runtime import Runtime

__all__ = ["KvLost", "ModelStore", "Sparse", "StoredCache", "open"]

BLOCK_TOKENS = 16
PREFILL_TOKENS = 128
"""Tokens of a prompt computed at once: what is not stored yet is held in memory."""
_SAMPLED = 64  # numbers of each weight that tell one model from another


class StoredLayer(CacheLayerMixin):
    """One layer of a `StoredCache`, as transformers wants it."""

    is_sliding = False
    is_croppable = False

    def __init__(self, sequence: PagedSequence, number: int) -> None:
        super().__init__()
        self._sequence = sequence
        self._number = number
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is made late."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [1, head, token, dimension] keys and values; all of them so far. Raises KvLost."""
        if len(key_states) != 1:
            raise ValueError(
                f"a batch of {len(key_states)} sequences (or beams) shares one cache: give each "
                "sequence its own and call the model for one at a time"
            )
        sequence, layer = self._sequence, self._number
        sequence.append(layer, key_states[0], value_states[0])
        if key_states.shape[2] == 1 and sequence.ready(layer):
            keys, values = sequence.chosen(layer)
        else:
            keys, values = sequence.whole(layer)
        return keys[None], values[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._sequence.length(self._number)

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def reset(self) -> None:
        raise NotImplementedError("a stored cache is not emptied: begin a new one")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("tokens are not taken back from a stored cache: begin a new one")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise NotImplementedError("beam search needs one cache a beam; a stored cache is for one")


class StoredCache(Cache):
    """The cache of one sequence. Made by `ModelStore.cache`."""

    def __init__(self, sequence: PagedSequence) -> None:
        layers = [StoredLayer(sequence, n) for n in range(sequence.shape.layers)]
        super().__init__(layers=layers)
        self.sequence = sequence

    def close(self) -> None:
        """Give back what it has pinned. Its blocks stay in the store."""
        self.sequence.release()


class ModelStore:
    """A model and the runtime that its caches use. Made by `open`."""

    def __init__(self, model: PreTrainedModel, runtime: Runtime, layout: Layout) -> None:
        self.model = model
        self.runtime = runtime
        self.layout = layout
        self._shape = _shape(model)
        self._queries: Queries | None = None
        self._current: PagedSequence | None = None  # whose pass it is
        self._hook = model.register_forward_pre_hook(self._note_tokens, with_kwargs=True)

    def cache(
        self, prompt: torch.Tensor | None = None, sparse: Sparse | None = None, **paging: int
    ) -> StoredCache:
        """A cache; of a prompt (token ids) it holds at once what the store has of its beginning.

        `sparse`: each new token reads the far blocks that its query chooses; without it, all.
        `paging`: `window_blocks`, `sink_blocks`, `ahead`, see `PagedSequence`. Raises KvLost,
        ValueError for a model whose queries cannot be had.
        """
        keys = partial(block_keys, layout=self.layout, namespace=self.runtime.options.namespace)
        selector = None
        if sparse:
            selector = Selector(sparse, self._shape.layers, self._shape.heads)
            self._queries = self._queries or Queries(self.model, _rotation(self.model), self._told)
        sequence = PagedSequence(self.runtime, self._shape, keys, selector=selector, **paging)
        if prompt is not None:
            sequence.restore(prompt.reshape(-1).tolist())
        return StoredCache(sequence)

    def generate(
        self, input_ids: torch.Tensor, *, sparse: Sparse | None = None, **generation: Any
    ) -> Any:
        """`model.generate` with a stored cache, the prompt computed in chunks. Raises KvLost."""
        cache = self.cache(input_ids, sparse)
        name = (
            "cache" if "cache" in inspect.signature(_inner(self.model.forward)).parameters else ""
        )
        generation.setdefault("prefill_chunk_size", PREFILL_TOKENS)
        try:
            return self.model.generate(
                input_ids, **{name or "past_key_values": cache}, **generation
            )
        finally:
            cache.close()

    def _note_tokens(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each pass: which tokens it is for, since a cache never sees them."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        self._current = None
        if isinstance(cache, StoredCache):
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None or kwargs.get("inputs_embeds") is not None:
                raise ValueError("a stored cache names blocks by their tokens: pass input_ids")
            cache.sequence.tokens += ids[0].tolist()
            self._current = cache.sequence

    def _told(self, layer: int, query: torch.Tensor, following: torch.Tensor | None) -> None:
        sequence = self._current
        if sequence is None or sequence.selector is None or not sequence.ready(layer):
            return
        sequence.selector.ask(layer, query)
        if following is not None:
            sequence.foreseen(layer + 1, following)

    def close(self) -> None:
        self._unhook()
        self.runtime.close()

    def _unhook(self) -> None:
        self._hook.remove()
        if self._queries:
            self._queries.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._unhook()
        self.runtime.__exit__(kind, error, traceback)


def open(  # noqa: A001  (reads best with the module's name before it)
    model: PreTrainedModel,
    path: str | Path | None,
    *,
    blocks: int,
    staging_share: float = 0.25,
    options: Options | None = None,
) -> ModelStore:
    """The store at `path` for this model's keys and values, made for `blocks` blocks of 16 tokens
    if there is none (None: in memory). `staging_share`: DRAM for this share of its pages, unless
    `options` say otherwise. Raises ValueError for models it cannot serve, and what
    `prefetchd.open` raises."""
    layout = layout_of(model)
    if options is None:
        options = Options(
            staging_bytes=int(staging_share * blocks * _shape(model).layers) * layout.page_bytes
        )
    return ModelStore(model, open_runtime(path, layout, blocks=blocks, options=options), layout)


def layout_of(model: PreTrainedModel) -> Layout:
    """Pages of 16 tokens a layer: keys, then values, head by head. Its fingerprint is of this very
    model, since another one's keys and values fit as well and mean something else."""
    shape = _shape(model)
    return uniform(
        shape.layers,
        shape.page_bytes,
        shape.block_tokens,
        name=model.config.model_type,
        content=f"transformers kv-head-token-dim {shape.dtype} {_fingerprint(model)}",
    )


def _shape(model: PreTrainedModel) -> Shape:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or model.config.is_encoder_decoder:
        raise ValueError(
            f"model {config.model_type} has layers of {', '.join(sorted(kinds))}: only decoders "
            "whose every layer keeps all keys and values can be served"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.num_hidden_layers, heads, dim, BLOCK_TOKENS, model.dtype)


def _fingerprint(model: PreTrainedModel) -> str:
    digest = xxhash.xxh3_128()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        step = max(1, len(flat) // _SAMPLED)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    return inspect.unwrap(function)


def _rotation(model: PreTrainedModel) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The model's own way of turning queries by their position."""
    module = sys.modules[type(model.get_decoder()).__module__]
    rotate = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise ValueError(f"sparse attention needs rotary positions; {module.__name__} has none")
    rotation: Callable[..., tuple[torch.Tensor, torch.Tensor]] = rotate
    return rotation
