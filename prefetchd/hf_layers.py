"""What each layer of a Hugging Face configuration caches.

Decides which fields of a configuration make a layer full, sliding, linear, latent or compressed,
and what a missing field means. It sees decoded fields only; the file is `hf_config`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefetchd.kv_parts import (
    NUMBER_MAX,
    LayerGroup,
    LayoutError,
    attention,
    check_count,
    compressed,
    dsa,
    gated_delta,
    lightning,
    mla,
)

_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""The last of so many layers is a full one, where the configuration does not say it itself."""
_ALL_SLIDING = ("mistral", "mixtral", "phi3", "starcoder2")
_OPT_IN_SLIDING = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_LINEAR = ("qwen3_next", "minimax", "minimax_text_01", "minimax_m1", "minimaxm1")
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
_COMPRESSED = ("deepseek_v4",)
KNOWN = ("llama", *_PATTERN, *_ALL_SLIDING, *_OPT_IN_SLIDING, *_LINEAR, *_LATENT, *_COMPRESSED)


@dataclass
class Fields:
    """The fields of one configuration, checked as they are read, with what there is to say."""

    where: str
    values: Mapping[str, Any]
    dtype: str = "bf16"
    indexer_dtype: str = "bf16"
    notes: list[str] = field(default_factory=list)

    def fail(self, problem: str, remedy: str) -> LayoutError:
        return LayoutError(f"cannot take a layout from {self.where}: {problem}; {remedy}")

    def has(self, key: str) -> bool:
        """Whether a field says anything: not missing, null, false or 0."""
        return bool(self.values.get(key))

    def count(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = NUMBER_MAX
    ) -> int:
        """A whole number from `low`, or the default; LayoutError if there is neither."""
        value = self.values.get(key)
        if value is None and default is None:
            raise self.fail(f"it lacks {key}", "check that this is the model's config.json")
        try:
            return check_count(default if value is None else value, key, low, high)
        except LayoutError as error:
            raise self.fail(str(error), "correct the file") from None

    def items(self, key: str, layers: int, kind: type) -> list[Any]:
        """A list with one item of a kind per layer (more are cut off: draft layers)."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.fail(f"{key} is not a list of {kind.__name__}", "correct the file")
        if len(value) < layers:
            problem = f"{key} has {len(value)} items for {layers} layers"
            raise self.fail(problem, "correct the list or num_hidden_layers")
        return value[:layers]

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type") or "").lower()


def one_layer_groups(fields: Fields, layers: int) -> list[LayerGroup]:
    """What each layer caches, in model order. Raises LayoutError.

    A model type known for its latents or compressed entries must have their fields: read by its
    attention heads instead, its bytes would be wrong many times over.
    """
    ratios = ("compress_ratios", "compress_rates")
    if fields.model_type in _COMPRESSED or any(fields.has(key) for key in ratios):
        return _compressed_layers(fields, layers)
    if fields.model_type in _LATENT or fields.has("kv_lora_rank"):
        return [_latent_layer(fields)] * layers
    makers = {
        "full_attention": _full_layer,
        "sliding_attention": _sliding_layer,
        "chunked_attention": _chunked_layer,
        "linear_attention": _linear_layer,
    }
    types = _layer_types(fields, layers)
    for unknown in (kind for kind in types if kind not in makers):
        remedy = "describe the model with prefetchd.layout.Layout instead"
        raise fields.fail(f"the layer type {unknown!r} is not known", remedy)
    made = {kind: makers[kind](fields) for kind in dict.fromkeys(types)}
    return [made[kind] for kind in types]


def _layer_types(fields: Fields, layers: int) -> list[str]:
    if fields.has("layer_types"):
        return [str(kind) for kind in fields.items("layer_types", layers, str)]
    if fields.has("attn_type_list"):
        codes = fields.items("attn_type_list", layers, int)
        return ["full_attention" if code else "linear_attention" for code in codes]
    if fields.model_type == "qwen3_next":
        interval = fields.count("full_attention_interval", 4)
        return _last_is_full("linear_attention", interval, layers)
    if fields.model_type in _LINEAR:
        problem = "it lacks both layer_types and attn_type_list"
        raise fields.fail(problem, "add the list of linear and full layers to the file")
    return _sliding_types(fields, layers)


def _sliding_types(fields: Fields, layers: int) -> list[str]:
    """Which layers have a window, for configurations that do not list it layer by layer."""
    full, sliding = ["full_attention"], ["sliding_attention"]
    kind = fields.model_type
    if not fields.has("sliding_window"):
        return full * layers
    if kind in _OPT_IN_SLIDING or "use_sliding_window" in fields.values:
        if not fields.has("use_sliding_window"):
            return full * layers
        first = min(layers, fields.count("max_window_layers", 28, low=0))
        return full * first + sliding * (layers - first)
    if fields.has("sliding_window_pattern") or kind in _PATTERN:
        pattern = fields.count("sliding_window_pattern", _PATTERN.get(kind))
        return _last_is_full("sliding_attention", pattern, layers)
    if kind in _ALL_SLIDING:
        return sliding * layers
    fields.notes.append("sliding_window without layer_types: all layers counted as full ones")
    return full * layers


def _last_is_full(other: str, interval: int, layers: int) -> list[str]:
    return ["full_attention" if (i + 1) % interval == 0 else other for i in range(layers)]


def _heads(fields: Fields) -> tuple[int, int, int]:
    """Attention heads, KV heads and the dimension of a head."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        problem = f"{heads} attention heads do not divide into {kv_heads} KV heads"
        raise fields.fail(problem, "correct num_attention_heads or num_key_value_heads")
    if fields.values.get("head_dim") is not None:
        return heads, kv_heads, fields.count("head_dim")
    hidden = fields.count("hidden_size")
    if hidden % heads:
        problem = f"hidden_size {hidden} does not divide into {heads} attention heads"
        raise fields.fail(problem, "give head_dim, or correct hidden_size or num_attention_heads")
    return heads, kv_heads, hidden // heads


def _full_layer(fields: Fields) -> LayerGroup:
    return attention(1, *_heads(fields), fields.dtype)


def _sliding_layer(fields: Fields) -> LayerGroup:
    if fields.model_type == "gpt_oss":
        fields.notes.append("attention sinks are learned numbers here: no cached tokens")
    return attention(1, *_heads(fields), fields.dtype, window=fields.count("sliding_window"))


def _chunked_layer(fields: Fields) -> LayerGroup:
    fields.notes.append("chunked attention is counted as a window of one chunk")
    return attention(1, *_heads(fields), fields.dtype, window=fields.count("attention_chunk_size"))


def _linear_layer(fields: Fields) -> LayerGroup:
    fields.notes.append("states of linear attention are counted in fp32")
    if "minimax" in fields.model_type:
        heads, _, head_dim = _heads(fields)
        return lightning(1, heads=heads, key_dim=head_dim, value_dim=head_dim)
    heads = fields.count("linear_num_value_heads")
    key_heads = fields.count("linear_num_key_heads")
    key_dim, value_dim = (fields.count(f"linear_{part}_head_dim") for part in ("key", "value"))
    return gated_delta(
        1,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_channels=2 * key_heads * key_dim + heads * value_dim,
        conv_kernel=fields.count("linear_conv_kernel_dim"),
    )


def _latent_layer(fields: Fields) -> LayerGroup:
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    if fields.model_type != "deepseek_v32" and not fields.has("index_topk"):
        return mla(1, latent, rope, fields.dtype)
    return dsa(
        1,
        latent=latent,
        rope=rope,
        indexer=fields.count("index_head_dim"),
        top=fields.count("index_topk"),
        dtype=fields.dtype,
        indexer_dtype=fields.indexer_dtype,
    )


def _compressed_layers(fields: Fields, layers: int) -> list[LayerGroup]:
    ratios = _ratios(fields, layers)
    made = {ratio: _compressed_layer(fields, ratio) for ratio in dict.fromkeys(ratios)}
    return [made[ratio] for ratio in ratios]


def _compressed_layer(fields: Fields, ratio: int) -> LayerGroup:
    indexed = ratio == 4  # the only ratio that has an indexer in published models
    return compressed(
        1,
        ratio,
        fields.count("head_dim"),
        fields.dtype,
        window=fields.count("sliding_window"),
        indexer=fields.count("index_head_dim") if indexed else 0,
        top=fields.count("index_topk") if indexed else None,
        indexer_dtype=fields.indexer_dtype,
    )


def _ratios(fields: Fields, layers: int) -> list[int]:
    """Tokens per compressed entry of each layer; 0 for a layer with the window only."""
    if fields.has("compress_ratios"):
        ratios = fields.items("compress_ratios", layers, int)
    else:
        rates = fields.values.get("compress_rates")
        if not isinstance(rates, dict):
            problem = "it has neither a list compress_ratios nor an object compress_rates"
            raise fields.fail(problem, "correct the file")
        kinds = fields.items("layer_types", layers, str)
        ratios = [0 if kind == "sliding_attention" else rates.get(kind) for kind in kinds]
    if not all(type(ratio) is int and 0 <= ratio <= 2**16 for ratio in ratios):
        raise fields.fail("a layer's compression ratio is not known", "correct the file")
    return ratios
