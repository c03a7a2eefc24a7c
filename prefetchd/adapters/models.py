"""What a store has to know of a model: the shape of its pages, and which model it is.

Decides which models can be served and what tells one from another. Runs no model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import xxhash
from transformers import PreTrainedModel

from prefetchd.adapters.pages import Shape
from prefetchd.layout import Layout, uniform

BLOCK_TOKENS = 16
_NO_MATTER = ("transformers_version", "_name_or_path", "architectures", "use_cache")

Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def layout_of(model: PreTrainedModel) -> Layout:
    """Pages of 16 tokens a layer: keys, then values, head by head. Its fingerprint is of this
    very model, since another one's keys and values fit as well and mean something else. Raises
    ValueError for models that cannot be served."""
    shape = shape_of(model)
    return uniform(
        shape.layers,
        shape.page_bytes,
        shape.block_tokens,
        name=model.config.model_type,
        content=f"transformers kv-head-token-dim {shape.dtype} {_fingerprint(model)}",
    )


def shape_of(model: PreTrainedModel) -> Shape:
    """Raises ValueError for models that cannot be served."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if "layer_types" not in config.to_dict() and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if getattr(config, "kv_lora_rank", None):
        kinds = {"latent_attention"}
    if kinds != {"full_attention"} or model.config.is_encoder_decoder:
        raise ValueError(
            f"model {config.model_type} has layers of {', '.join(sorted(kinds))}: only decoders "
            "whose every layer keeps all keys and values can be served"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.num_hidden_layers, heads, dim, BLOCK_TOKENS, model.dtype)


def _fingerprint(model: PreTrainedModel) -> str:
    """Of every weight, and of what else the configuration says."""
    config = model.config.to_dict()
    told = {name: value for name, value in config.items() if name not in _NO_MATTER}
    digest = xxhash.xxh3_128(json.dumps(told, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1).contiguous().cpu()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def rotation_of(model: PreTrainedModel) -> Rotation:
    """The model's own way of turning queries by their position. Raises ValueError."""
    module = sys.modules[type(model.get_decoder()).__module__]
    rotate: Rotation | None = getattr(module, "apply_rotary_pos_emb", None)
    if rotate is None:
        raise ValueError(f"sparse attention needs rotary positions; {module.__name__} has none")
    return rotate
