"""What is kept in memory of far keys, to choose blocks by: one small summary a block.

Decides how keys are summed up and how a query scores a block by it. Refuses to know where the keys
are and how many blocks are chosen. Recall of each kind of the blocks that exact scores would choose
(far, k = 32): see `docs/inference.md`.

Scores are attention masses of blocks among the far ones, added up over all query heads: for each
head a softmax over tokens as far as the summary tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Summary(Protocol):
    """One layer's summaries. Keys come as [head, block, token, dimension], in order of blocks."""

    def add(self, keys: Tensor) -> None: ...

    def logits(self, query: Tensor) -> Tensor:
        """[query head, block] for a query [head, group, dimension] that is scaled already: the
        logarithm of each block's mass, up to a constant a query head."""

    @property
    def nbytes(self) -> int: ...


class _Rows:
    """Rows [head, block, ...] that grow by a quarter at a time."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._count = 0

    def add(self, rows: Tensor) -> None:
        count = self._count + rows.shape[1]
        if self._rows is None or count > self._rows.shape[1]:
            room = torch.zeros(
                rows.shape[0], count + max(4, count // 4), *rows.shape[2:], dtype=rows.dtype
            )
            if self._rows is not None:
                room[:, : self._count] = self._rows[:, : self._count]
            self._rows = room
        self._rows[:, self._count : count] = rows
        self._count = count

    @property
    def all(self) -> Tensor:
        assert self._rows is not None, "there is no block yet"
        return self._rows[:, : self._count]

    @property
    def nbytes(self) -> int:
        return 0 if self._rows is None else self._rows.nbytes


class Mean:
    """The mean key of a block."""

    def __init__(self) -> None:
        self._mean = _Rows()

    def add(self, keys: Tensor) -> None:
        self._mean.add(keys.mean(dim=2))

    def logits(self, query: Tensor) -> Tensor:
        return _flat(query @ self._mean.all.to(query.dtype).transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return self._mean.nbytes


class MinMax:
    """The smallest and largest value of every dimension: an upper bound of any token's score.

    After Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference"
    (2024).
    """

    def __init__(self) -> None:
        self._low, self._high = _Rows(), _Rows()

    def add(self, keys: Tensor) -> None:
        self._low.add(keys.amin(dim=2))
        self._high.add(keys.amax(dim=2))

    def logits(self, query: Tensor) -> Tensor:
        above, below = query.clamp(min=0), query.clamp(max=0)
        high = self._high.all.to(query.dtype).transpose(1, 2)
        return _flat(above @ high + below @ self._low.all.to(query.dtype).transpose(1, 2))

    @property
    def nbytes(self) -> int:
        return self._low.nbytes + self._high.nbytes


class Quantised:
    """Every key in `bits` (2 or 4) a number, scaled by block, head and dimension: tokens can still
    be told apart, so a block's mass is the sum of theirs."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._codes, self._low, self._step = _Rows(), _Rows(), _Rows()

    def add(self, keys: Tensor) -> None:
        keys = keys.float()
        low, high = keys.amin(dim=2), keys.amax(dim=2)
        step = ((high - low) / (2**self._bits - 1)).clamp(min=1e-12)
        codes = ((keys - low[:, :, None]) / step[:, :, None]).round().to(torch.uint8)
        self._codes.add(_packed(codes, self._bits))
        self._low.add(low.half())
        self._step.add(step.half())

    def logits(self, query: Tensor) -> Tensor:
        codes = _unpacked(self._codes.all, self._bits).to(query.dtype)  # [head, block, token, dim]
        scaled = (
            query[:, :, None] * self._step.all.to(query.dtype)[:, None]
        )  # [head, group, block, dim]
        tokens = torch.einsum("hgbd,hbtd->hgbt", scaled, codes)
        offset = query @ self._low.all.to(query.dtype).transpose(1, 2)
        return _flat(torch.logsumexp(tokens, dim=3) + offset)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._low.nbytes + self._step.nbytes


def summary(kind: str) -> Summary:
    """`mean`, `minmax`, `2bit` or `4bit`. Raises ValueError."""
    kinds: dict[str, Callable[[], Summary]] = {
        "mean": Mean,
        "minmax": MinMax,
        "2bit": lambda: Quantised(2),
        "4bit": lambda: Quantised(4),
    }
    if kind not in kinds:
        raise ValueError(f"no key summary is called {kind!r}; there are {', '.join(kinds)}")
    return kinds[kind]()


def masses(logits: Tensor) -> Tensor:
    """[block]: each block's share of the far mass, added up over query heads."""
    return torch.softmax(logits.float(), dim=1).sum(dim=0)


def exact_logits(keys: Tensor, query: Tensor) -> Tensor:
    """What `logits` would be with the keys themselves, [head, block, token, dimension]."""
    return _flat(torch.logsumexp(torch.einsum("hgd,hbtd->hgbt", query, keys), dim=3))


def scaled(query: Tensor, kv_heads: int) -> Tensor:
    """A query [head, dimension] as [KV head, group, dimension], times 1 / sqrt(dimension)."""
    return query.view(kv_heads, -1, query.shape[-1]) / math.sqrt(query.shape[-1])


def _flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Several codes a byte, along the last dimension."""
    each = 8 // bits
    shifts = torch.arange(each, dtype=torch.uint8) * bits
    parts = codes.unflatten(-1, (-1, each))
    return (parts << shifts).sum(dim=-1, dtype=torch.uint8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    each = 8 // bits
    shifts = torch.arange(each, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
