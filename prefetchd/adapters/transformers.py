"""A model of `transformers` whose keys and values live in prefetchd: on NVMe, staged in DRAM.

Decides how a model meets a store: when a pass begins, and what of a prompt is found again.

    with prefetchd.adapters.transformers.open(model, "/nvme/kv", blocks=4096) as kv:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = kv.generate(ids, max_new_tokens=64)

`generate` finds what is stored of the prompt, computes the rest in chunks and stores that, too.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from prefetchd.adapters.caches import StoredCache, check_alone, tokens_of
from prefetchd.adapters.copying import Copier
from prefetchd.adapters.measuring import Meter
from prefetchd.adapters.models import layout_of, rotation_of, shape_of
from prefetchd.adapters.paged import PagedSequence
from prefetchd.adapters.pages import KvLost
from prefetchd.adapters.selection import Queries, Selector, Sparse
from prefetchd.closing import Closing
from prefetchd.keys import block_keys
from prefetchd.layout import Layout
from prefetchd.opening import open_runtime
from prefetchd.options import Options
from prefetchd.runtime import Runtime

__all__ = ["KvLost", "Meter", "ModelStore", "Sparse", "StoredCache", "layout_of", "open"]

PREFILL_TOKENS = 64
"""Tokens of a prompt computed at once: what is not stored yet is held in memory."""
WRITE_BUFFERS = 2
"""Blocks on their way to the store at once; each is a whole block in memory."""
DEPTH = 256
"""Reads in flight: those of three layers of 4,000 tokens, so that they are begun with one call."""


class ModelStore(Closing):
    """A model and the runtime that its caches use. Made by `open`. One pass at a time."""

    def __init__(self, model: PreTrainedModel, runtime: Runtime, layout: Layout) -> None:
        self.model = model
        self.runtime = runtime
        self.layout = layout
        self._shape = shape_of(model)
        self._queries: Queries | None = None
        self._copier = Copier()
        self._current: PagedSequence | None = None  # whose pass it is, or was
        self._hooks = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ends, with_kwargs=True),
        ]

    def cache(
        self, prompt: torch.Tensor | None = None, sparse: Sparse | None = None, **paging: int
    ) -> StoredCache:
        """A cache; of a prompt (token ids) it holds at once what the store has of its beginning.

        `sparse`: each new token reads the far blocks that its query chooses; without it, all.
        `paging`: `window_blocks`, `sink_blocks`, see `PagedSequence`. Raises KvLost, and ValueError
        for a model whose queries cannot be had.
        """
        keys = partial(block_keys, layout=self.layout, namespace=self.runtime.options.namespace)
        selector = None
        if sparse:
            selector = Selector(sparse, self._shape.layers, self._shape.heads)
            self._queries = self._queries or Queries(
                self.model, rotation_of(self.model), self._told
            )
        sequence = PagedSequence(
            self.runtime, self._shape, keys, self._copier, selector=selector, **paging
        )
        if prompt is not None:
            if self._current:  # what it asked for ahead of time must not keep this from room
                self._current.release()
            sequence.restore(prompt.reshape(-1).tolist())
        return StoredCache(sequence)

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        sparse: Sparse | None = None,
        meter: Meter | None = None,
        **generation: Any,
    ) -> Any:
        """`model.generate` with a stored cache, the prompt computed in chunks. `meter` notes what
        sparse steps were served. Raises KvLost, ValueError."""
        check_alone(len(input_ids))
        cache = self.cache(input_ids, sparse)
        cache.sequence.far.meter = meter
        # Without a mask one is made up, with gaps where the prompt has a token used for padding.
        generation.setdefault("attention_mask", torch.ones_like(input_ids))
        try:
            self.prefill(cache, input_ids)
            return self.model.generate(input_ids, **{cache_word(self.model): cache}, **generation)
        finally:
            cache.close()

    def prefill(self, cache: StoredCache, input_ids: torch.Tensor) -> None:
        """Compute and store what a cache lacks of a prompt, but for its last token. Raises KvLost,
        ValueError."""
        # Not by `prefill_chunk_size`: before 5.24 that computes again what the cache has.
        last = input_ids.shape[1] - 1
        for start in range(cache.get_seq_length(), last, PREFILL_TOKENS):
            part = input_ids[:, start : min(start + PREFILL_TOKENS, last)]
            with torch.no_grad():
                self.model(part, **{cache_word(self.model): cache}, use_cache=True)

    def meter(self, warmup_steps: int = 16) -> Meter:
        """For `generate`; `meter.figures(name)` gives the figures of a replay."""
        return Meter(self.runtime, self._shape.layers, warmup_steps)

    def _begins(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        before, self._current = self._current, None
        if isinstance(cache, StoredCache):
            cache.sequence.tokens += tokens_of(cache, args, kwargs)
            self._current = cache.sequence
            if cache.sequence.far.meter:
                cache.sequence.far.meter.begin()
        if before is not None and before is not self._current:
            before.release()  # what it asked for ahead of time must not keep others from room

    def _ends(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self._current and self._current.far.meter:
            self._current.far.meter.passed()

    def _told(self, layer: int, query: torch.Tensor, following: torch.Tensor | None) -> bool:
        """Whether this layer is going to choose."""
        sequence = self._current
        if sequence is None or sequence.selector is None or not sequence.ready(layer):
            return False
        sequence.selector.ask(layer, query)
        if following is not None:
            sequence.foreseen(layer + 1, following)
        return True

    def close(self) -> None:
        self._unhook()
        # The kernel ends reads with the thread that began them: first those who wait for them.
        try:
            self.runtime.close()
        finally:
            self._copier.close()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._queries:
            self._queries.remove()


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
    `options` say otherwise. The model's weights must not change while it is open. Raises ValueError
    for models it cannot serve, and what `prefetchd.open` raises."""
    layout = layout_of(model)
    if options is None:
        pages = int(staging_share * blocks * layout.layers)
        options = Options(
            staging_bytes=pages * layout.page_bytes,
            write_buffers=WRITE_BUFFERS,
            depth=DEPTH,
            predictor="attention",
        )
    # Pages are checked by a thread of ours, while the model computes.
    options = replace(options, checks_unlocked=True)
    return ModelStore(model, open_runtime(path, layout, blocks=blocks, options=options), layout)


def cache_word(model: PreTrainedModel) -> str:
    """What this version of transformers calls a model's cache: 5.24 renamed it."""
    parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
    return "cache" if "cache" in parameters else "past_key_values"
