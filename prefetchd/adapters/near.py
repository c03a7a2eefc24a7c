"""What of a sequence is in ordinary memory: its first blocks (sinks) and its newest tokens.

Decides how that memory grows and shrinks. Refuses to know what has been stored: it is told from
where on tokens are to stay.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from prefetchd.adapters.pages import Shape


class Near:
    """Keys and values of all layers, [key or value, head, token, dimension] each."""

    def __init__(self, shape: Shape, sink_blocks: int) -> None:
        self.shape = shape
        self.base = 0
        """Tokens before it are not here, but for the sinks."""
        self.lengths = [0] * shape.layers
        sink_tokens = sink_blocks * shape.block_tokens
        self._sinks = [shape.room(sink_tokens) for _ in range(shape.layers)]
        self._recent = [shape.room(0) for _ in range(shape.layers)]

    def begin(self, tokens: int) -> None:
        """So many tokens are known already, and none of them is here."""
        self.base = tokens
        self.lengths = [tokens] * self.shape.layers

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens of one layer: [head, token, dimension] each, on any device."""
        start, count = self.lengths[layer] - self.base, keys.shape[1]
        if start + count > self._recent[layer].shape[2]:
            self._resize(layer, start + count, kept=slice(0, start))
        recent = self._recent[layer].narrow(2, start, count)
        recent[0], recent[1] = keys, values
        self.lengths[layer] += count

    def recent(self, layer: int) -> torch.Tensor:
        """Tokens from `base` on."""
        return self._recent[layer].narrow(2, 0, self.lengths[layer] - self.base)

    def sinks(self, layer: int) -> torch.Tensor:
        """Those of the first tokens that come before `base`."""
        sinks = self._sinks[layer]
        return sinks.narrow(2, 0, min(self.base, sinks.shape[2]))

    def set_sinks(self, layer: int, start: int, tokens: torch.Tensor) -> None:
        self._sinks[layer][:, :, start : start + tokens.shape[2]] = tokens

    def block(self, number: int) -> NDArray[np.uint8]:
        """The bytes of a block that is here as a whole: (1, layers, page_bytes)."""
        size, shape = self.shape.block_tokens, self.shape
        start = number * size - self.base
        pages = np.empty((1, shape.layers, shape.page_bytes), np.uint8)
        for layer, recent in enumerate(self._recent):
            part = recent[:, :, start : start + size].contiguous()
            pages[0, layer] = part.view(-1).view(torch.uint8).numpy()
        return pages

    def forget(self, base: int) -> None:
        """Let go of the tokens before `base`, but for the sinks."""
        shift = base - self.base
        for layer, recent in enumerate(self._recent):
            sinks = self._sinks[layer]
            if (more := min(sinks.shape[2], base) - self.base) > 0:
                sinks[:, :, self.base : self.base + more] = recent[:, :, :more]
            self._resize(layer, 0, kept=slice(shift, self.lengths[layer] - self.base))
        self.base = base

    def _resize(self, layer: int, tokens: int, kept: slice) -> None:
        """Room for `tokens`, or for what is kept and one block more: what is no longer needed of a
        long prompt must not stay for ever."""
        size, old = self.shape.block_tokens, self._recent[layer]
        left = kept.stop - kept.start
        room = -(-max(tokens, left + size) // size) * size
        if room == old.shape[2]:
            old[:, :, :left] = old[:, :, kept].clone()
            return
        self._recent[layer] = self.shape.room(room)
        self._recent[layer][:, :, :left] = old[:, :, kept]

    @property
    def memory_bytes(self) -> int:
        return sum(one.nbytes for one in (*self._sinks, *self._recent))
