"""Which far blocks a decode step needs, layer by layer: from the query and key summaries.

Decides how many blocks are chosen, and foresees the next layer's from this layer's input. A model
tells its queries through hooks on its attention layers, so that its code stays as it is. Refuses to
know where pages are.

The hint for layer l + 1 uses its query as computed from layer l's *input*: residual streams change
slowly. After Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with
Dynamic KV Cache Management" (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefetchd.adapters.summaries import Summary, masses, scaled, summary
from prefetchd.model import Ids, Scores

Choice = tuple[Ids, Scores]
"""Places of blocks among the far ones, and each one's mass."""
_NEEDED = ("q_proj", "head_dim", "layer_idx")


@dataclass(frozen=True, slots=True)
class Sparse:
    """`blocks`: far blocks that a layer reads. `kind`: of key summary (mean, minmax, 2bit, 4bit).
    `hints`: whether the next layer's blocks are foreseen, `blocks` x `hint_factor` of them."""

    blocks: int = 16
    kind: str = "4bit"
    hints: bool = True
    hint_factor: int = 2

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.hint_factor < 1:
            raise ValueError(f"a layer needs at least one far block: {self}")
        summary(self.kind)


class Selector:
    """Summaries of one sequence, and what its queries choose by them."""

    def __init__(self, sparse: Sparse, layers: int, kv_heads: int) -> None:
        self.sparse = sparse
        self._kv_heads = kv_heads
        self._summaries: list[Summary] = [summary(sparse.kind) for _ in range(layers)]
        self._known = [0] * layers
        self._queries: dict[int, torch.Tensor] = {}

    def known(self, layer: int) -> int:
        """Blocks of this layer that are summed up."""
        return self._known[layer]

    def add(self, layer: int, keys: torch.Tensor) -> None:
        """Blocks that have become far: [head, block, token, dimension]."""
        if keys.shape[1]:
            self._summaries[layer].add(keys)
            self._known[layer] += keys.shape[1]

    def ask(self, layer: int, query: torch.Tensor) -> None:
        """The query of the next token: [head, dimension]."""
        self._queries[layer] = query

    def choose(self, layer: int) -> Choice:
        """The blocks with the largest mass, in rising order."""
        places, mass = self._best(layer, self._queries.pop(layer), self.sparse.blocks)
        order = np.argsort(places)
        return places[order], mass[order]

    def foresee(self, layer: int, query: torch.Tensor) -> Choice:
        """The blocks that a layer will probably need, best first."""
        return self._best(layer, query, self.sparse.blocks * self.sparse.hint_factor)

    def _best(self, layer: int, query: torch.Tensor, count: int) -> Choice:
        mass = masses(self._summaries[layer].logits(scaled(query.float().cpu(), self._kv_heads)))
        best = torch.topk(mass, min(count, len(mass)))
        return best.indices.numpy(), best.values.numpy()

    @property
    def memory_bytes(self) -> int:
        return sum(one.nbytes for one in self._summaries)


class Queries:
    """Hooks on a model's decoder layers. `told(layer, query, next_query)`, each [head, dimension],
    the latter None at the last layer, is called before a layer's attention for a single token, and
    says whether it is going to read less than everything.

    Raises ValueError for a model whose queries are not made by `q_proj` and rotary positions.
    """

    def __init__(
        self,
        model: Any,
        rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        told: Callable[[int, torch.Tensor, torch.Tensor | None], bool],
    ) -> None:
        self._rotate = rotate
        self._told = told
        self._layers = list(model.get_decoder().layers)
        self._inputs: torch.Tensor | None = None
        for layer in self._layers:
            lacking = [name for name in _NEEDED if not hasattr(layer.self_attn, name)]
            if lacking or not hasattr(layer, "input_layernorm"):
                raise ValueError(
                    f"sparse attention needs layers like Llama's; {type(layer).__name__} of "
                    f"{model.config.model_type} lacks {', '.join(lacking) or 'input_layernorm'}"
                )
        self._hooks = [layer.register_forward_pre_hook(self._entered) for layer in self._layers]
        self._hooks += [
            layer.self_attn.register_forward_pre_hook(self._attends, with_kwargs=True)
            for layer in self._layers
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entered(self, layer: Any, args: tuple[Any, ...]) -> None:
        self._inputs = args[0] if args else None

    def _attends(
        self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if hidden is None or hidden.shape[:2] != (1, 1):
            return None
        number, positions = attention.layer_idx, kwargs["position_embeddings"]
        following = None
        if number + 1 < len(self._layers) and self._inputs is not None:
            after = self._layers[number + 1]
            following = self._query(after.self_attn, after.input_layernorm(self._inputs), positions)
        if not self._told(number, self._query(attention, hidden, positions), following):
            return None
        # One token sees all that it is given, and a mask would be of everything.
        return args, {**kwargs, "attention_mask": None}

    def _query(self, attention: Any, hidden: torch.Tensor, positions: Any) -> torch.Tensor:
        query = attention.q_proj(hidden).view(1, 1, -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        rotated, _ = self._rotate(query.transpose(1, 2), query.transpose(1, 2), *positions)
        return rotated[0, :, 0]
