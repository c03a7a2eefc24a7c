"""A `transformers` cache of one stored sequence, layer by layer.

Decides which ways of generating are refused. How pages are kept is `adapters.paged`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from prefetchd.adapters.paged import PagedSequence


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
        """Add [1, head, token, dimension] keys and values; all that these tokens see, valid until
        the next layer's. Raises KvLost, and ValueError when staging is too small."""
        check_alone(len(key_states))
        sequence, layer, device = self._sequence, self._number, key_states.device
        sequence.near.append(layer, key_states[0], value_states[0])
        alone = key_states.shape[2] == 1
        pair = sequence.chosen if alone and sequence.ready(layer) else sequence.whole
        keys, values = pair(layer)
        return keys[None].to(device), values[None].to(device)

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


def check_alone(sequences: int) -> None:
    """Raises ValueError for a batch."""
    if sequences != 1:
        raise ValueError(
            f"a stored cache is for one sequence, not for a batch of {sequences} (or beams): give "
            "each sequence its own and call the model for one at a time"
        )


def tokens_of(cache: StoredCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The tokens of the pass that begins, which a cache never sees. Blocks are named by them alone,
    so whatever else would change their keys and values is refused: raises ValueError."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None or kwargs.get("inputs_embeds") is not None:
        raise ValueError("a stored cache names blocks by their tokens: pass input_ids")
    check_alone(len(ids))
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask.all()):
        raise ValueError("a stored cache holds no padding: pass the tokens alone, without a mask")
    positions = kwargs.get("position_ids")
    if positions is not None:
        start = cache.get_seq_length()
        usual = torch.arange(start, start + ids.shape[1], device=positions.device)
        if not torch.equal(positions.reshape(-1).to(usual.dtype), usual):
            raise ValueError(
                "a stored cache counts positions from 0 on, one a token: pass no position_ids"
            )
    tokens: list[int] = ids[0].tolist()
    return tokens
