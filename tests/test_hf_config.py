"""Reading a model's config.json: each family's fields, what is assumed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefetchd.hf_config import from_config
from prefetchd.layout import LayoutError
from prefetchd.presets import preset

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 36, "head_dim": 128}
QWEN3 |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"model_type": "deepseek_v32"}
DEEPSEEK_V32 |= {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
DEEPSEEK_V4: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_topk": 1024,
    "sliding_window": 128,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}
MINIMAX: dict[str, Any] = {
    "model_type": "minimax_text_01",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 6144,
    "head_dim": 128,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "dtype": "bfloat16",
}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27},
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama-3-8b"),
        (QWEN3, "qwen3-8b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (DEEPSEEK_V32, "deepseek-v3.2"),
        (DEEPSEEK_V4, "deepseek-v4-pro"),
        (QWEN3_NEXT, "qwen3-next-80b-a3b"),
        (MINIMAX, "minimax-text-01"),
        (GPT_OSS, "gpt-oss-120b"),
        (GPT_OSS | {"layer_types": None}, "gpt-oss-120b"),
        (GEMMA3, "gemma-3-27b"),
    ],
)
def test_a_models_configuration_gives_its_preset(config: dict[str, Any], name: str) -> None:
    layout = from_config(config)
    assert layout.fingerprint() == preset(name).fingerprint()
    assert layout.stored_bytes(300_000) == preset(name).stored_bytes(300_000)
    assert not any("not known" in note for note in layout.notes)


def test_a_file_or_its_folder_names_the_layout(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    layouts = [from_config(folder), from_config(str(folder / "config.json"))]
    assert [layout.name for layout in layouts] == ["My-Model-7B"] * 2
    assert layouts[0] == layouts[1]
    assert from_config(folder, dtype="fp8", block_tokens=32).page_bytes == 65_536


def windows(config: dict[str, Any]) -> list[int | None]:
    layout = from_config(config)
    return [layout.groups[group].parts[0].window for group in layout.pattern]


def test_sliding_windows_apply_as_each_family_means_them() -> None:
    small = LLAMA | {"num_hidden_layers": 4, "sliding_window": 4096}
    assert windows(small | {"model_type": "mistral"}) == [4096] * 4
    assert windows(small | {"model_type": "mistral", "sliding_window": None}) == [None] * 4
    assert windows(small | {"model_type": "gemma2"}) == [4096, None, 4096, None]
    qwen = small | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}
    assert windows(qwen) == [None, None, None, 4096]
    assert windows(qwen | {"use_sliding_window": False}) == [None] * 4
    pattern = small | {"model_type": "cohere2", "sliding_window_pattern": 2}
    assert windows(pattern) == [4096, None, 4096, None]
    listed = small | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}
    assert windows(listed) == [None, None, None, 4096]
    vague = from_config(small)
    assert vague.stored_bytes(10_000) == from_config(LLAMA).stored_bytes(10_000) // 8
    assert any("counted as full" in note for note in vague.notes)


def test_new_style_v4_configurations_name_their_layers() -> None:
    config = DEEPSEEK_V4 | {"num_hidden_layers": 3, "compress_ratios": None}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    layout = from_config(config | {"layer_types": kinds, "compress_rates": rates})
    assert [group.kind for group in layout.groups] == ["window", "c4a", "c128a"]
    assert layout.block_tokens == 256


def test_what_was_assumed_is_said() -> None:
    unknown = from_config(LLAMA | {"model_type": "newmodel", "num_nextn_predict_layers": 1})
    assert unknown.bytes_per_token == 131_072
    assert any("'newmodel' is not known" in note for note in unknown.notes)
    assert any("draft layers" in note for note in unknown.notes)
    for named in (None, "auto"):
        layout = from_config(LLAMA | {"torch_dtype": named})
        assert layout.bytes_per_token == 131_072
        assert any("counted as bf16" in note for note in layout.notes)
    assert from_config(LLAMA | {"torch_dtype": "float32"}).bytes_per_token == 262_144
    assert any("learned" in note for note in from_config(GPT_OSS).notes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers; check that this is"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 32.0}, "num_hidden_layers is 32.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 30}, "30 attention heads do not divide into 8 KV heads"),
        ({"num_attention_heads": 24}, "hidden_size 4096 does not divide into 24"),
        ({"num_key_value_heads": [8, 8]}, "num_key_value_heads is"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"head_dim": -128}, "head_dim is -128"),
        ({"layer_types": ["full_attention"]}, "1 items for 32 layers"),
        ({"layer_types": "full"}, "not a list of str"),
        ({"layer_types": ["mamba"] * 32}, "layer type 'mamba' is not known"),
        ({"layer_types": ["sliding_attention"] * 32}, "lacks sliding_window"),
        ({"layer_types": ["linear_attention"] * 32}, "lacks linear_num_value_heads"),
        ({"mamba_d_state": 16}, "mamba_d_state tells of layers"),
        ({"model_type": "minimax"}, "lacks both layer_types and attn_type_list"),
        ({"kv_lora_rank": 512}, "lacks qk_rope_head_dim"),
        ({"compress_ratios": [4, "x"] * 16}, "not a list of int"),
        ({"compress_ratios": [-4] * 32}, "ratio is not known"),
        ({"compress_rates": 4}, "nor an object compress_rates"),
        ({"model_type": "deepseek_v4"}, "nor an object compress_rates"),
        ({"model_type": "deepseek_v3"}, "lacks kv_lora_rank"),
        (DEEPSEEK_V3 | {"model_type": "deepseek_v32"}, "lacks index_head_dim"),
    ],
)
def test_a_broken_configuration_says_where_it_is_broken(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    with pytest.raises(LayoutError, match=says) as raised:
        from_config(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "ENOENT"),
        (b"", "is not JSON"),
        (b'{"num_hidden_layers": 3', "is not JSON"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[1, 2]", "no JSON object"),
        (b'"' + b" " * 16 * 2**20 + b'"', "larger than 16 MiB"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LayoutError, match=says) as raised:
        from_config(path)
    assert str(path) in str(raised.value)
