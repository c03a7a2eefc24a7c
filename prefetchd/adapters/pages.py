"""What one page holds of one layer, and what is raised when pages cannot be had.

Decides the order of numbers in a page: first keys, then values, head by head, as attention reads
them, so that one copy puts a layer's pages together. Refuses to know models and runtimes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class KvLost(Exception):  # noqa: N818  (an answer: these tokens must be computed again)
    """Pages of a sequence cannot be had, so its next token cannot be computed: which, and why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A page holds `block_tokens` tokens of one layer: [key or value, head, token, dimension]."""

    layers: int
    heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def token_bytes(self) -> int:
        """Of one layer."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize

    def room(self, tokens: int) -> torch.Tensor:
        """[key or value, head, token, dimension], in ordinary memory."""
        return torch.empty(2, self.heads, tokens, self.head_dim, dtype=self.dtype)
