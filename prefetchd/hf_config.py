"""Reads a model's `config.json` in Hugging Face's form into a layout.

Decides where the fields are, which data type the cache has and what has to be said or refused
(`hf_layers` makes the layers, `layout` the bytes). It reads one small file, never the network and
never weights. What it assumes stands in the layout's notes; where a guess would give wrong bytes
it refuses.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from prefetchd.hf_layers import KNOWN, Fields, one_layer_groups
from prefetchd.kv_parts import LAYERS_MAX, LayoutError
from prefetchd.layout import Layout
from prefetchd.presets import V4_BLOCK_TOKENS, grouped

CONFIG_BYTES_MAX = 16 * 2**20

_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
_NESTED = ("text_config", "llm_config", "language_config")
_REFUSED = ("linear_attn_config", "hybrid_override_pattern", "attn_layer_period", "ssm_cfg")
"""Fields of layers whose cache this reader cannot count."""
_UNREAD = {
    "num_kv_shared_layers": "layers that share another's cache are counted as having their own",
    "global_head_dim": "full layers are counted with head_dim",
    "num_global_key_value_heads": "full layers are counted with num_key_value_heads",
    "indexer_types": "layers that share another's indexer are counted as having their own",
    "num_nextn_predict_layers": "draft layers for multi-token prediction are not counted",
}


def from_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    dtype: str | None = None,
    indexer_dtype: str | None = None,
    block_tokens: int | None = None,
    name: str | None = None,
) -> Layout:
    """The layout of a model, from its config.json (or the folder with it, or the decoded fields).

    `dtype` is the cache's: the model's own unless given; `indexer_dtype` is `dtype` unless given.
    `block_tokens` is 16, or 256 where entries are compressed. What was assumed or could not be
    read is in the layout's notes. Raises LayoutError.
    """
    where, outer = _load(source)
    inner = next((outer[key] for key in _NESTED if isinstance(outer.get(key), dict)), outer)
    fields = Fields(where, inner)
    fields.dtype = dtype or _model_dtype(fields, outer)
    fields.indexer_dtype = indexer_dtype or fields.dtype
    _say_what_is_unread(fields)
    layers = one_layer_groups(fields, fields.count("num_hidden_layers", high=LAYERS_MAX))
    groups, pattern = grouped(layers)
    strided = any(part.stride > 1 for group in groups for part in group.parts)
    tokens = block_tokens or (V4_BLOCK_TOKENS if strided else 16)
    title = name or _title(source, fields)
    return Layout(title, groups, tokens, pattern, notes=tuple(fields.notes))


def _load(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "the given configuration", source
    path = Path(source)
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "error")
        reason = f"{code} ({os.strerror(error.errno or 0)})"
        raise LayoutError(
            f"cannot read {path}: {reason}; give the path of a model's config.json or its folder"
        ) from error
    if len(text) > CONFIG_BYTES_MAX:
        raise LayoutError(f"{path} is larger than 16 MiB; give a model's config.json, not weights")
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(
            f"{path} is not JSON: {error}; give a model's config.json, whole and unchanged"
        ) from error
    if not isinstance(values, dict):
        raise LayoutError(f"{path} holds no JSON object; give a model's config.json")
    return str(path), values


def _title(source: object, fields: Fields) -> str:
    if isinstance(source, Mapping):
        return fields.model_type or "model"
    path = Path(str(source)).absolute()
    return path.parent.name if path.name == "config.json" else path.stem


def _model_dtype(fields: Fields, outer: Mapping[str, Any]) -> str:
    for values in (fields.values, outer):
        named = values.get("dtype") or values.get("torch_dtype")
        if named is not None:
            known = _DTYPES.get(str(named).removeprefix("torch."))
            if known:
                return known
            fields.notes.append(f"the data type {named!r} is not known: counted as bf16")
            return "bf16"
    fields.notes.append("the configuration names no data type: counted as bf16")
    return "bf16"


def _say_what_is_unread(fields: Fields) -> None:
    if fields.model_type not in KNOWN:
        fields.notes.append(
            f"the model type {fields.model_type or '(none)'!r} is not known here: read by its "
            "generic fields, so compare the bytes per token with the engine's before relying on it"
        )
    fields.notes += [f"{key}: {note}" for key, note in _UNREAD.items() if fields.has(key)]
    refused = [key for key in _REFUSED if fields.has(key)]
    if not fields.has("layer_types"):
        refused += [key for key in fields.values if key.startswith("mamba_")]
    if refused:
        raise fields.fail(
            f"{refused[0]} tells of layers whose cache is not known here, so the bytes would be "
            "wrong",
            "describe the model with prefetchd.layout.Layout instead",
        )
