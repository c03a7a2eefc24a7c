"""A language model of a few thousand random weights, for tests that need torch. Skips those that
import it where torch or transformers is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e .[dev]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

LAYERS, VOCABULARY = 4, 128
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

torch.set_num_threads(1)  # so small a model only loses by more


def tiny_model(seed: int = 1, dtype: str = "float32", **changes: Any) -> Any:
    """A Llama of four layers, two KV heads and pages of 4 KiB (float32)."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes}))
    return model.eval().to(getattr(torch, dtype))


def prompt(tokens: int, seed: int = 1) -> Any:
    """Token ids, (1, tokens), any token among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (1, tokens), generator=generator)


def builtin_cache(model: Any, ids: Any) -> Any:
    """The built-in cache of a prompt without its last token, computed in the same parts as a stored
    one: in other parts, numbers are rounded differently, and half precision shows it."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        for part in ids[:, :-1].split(64, dim=1):
            if part.shape[1]:
                model(part, **{word(): cache}, use_cache=True)
    return cache


def word() -> str:
    """What this version of transformers calls a cache."""
    return "cache" if transformers.__version__ >= "5.24" else "past_key_values"


def usual(model: Any, ids: Any, tokens: int) -> list[int]:
    """What the built-in cache gives after the prompt."""
    given = {"attention_mask": torch.ones_like(ids), word(): builtin_cache(model, ids)}
    out = model.generate(ids, max_new_tokens=tokens, **given, **GREEDY)
    said: list[int] = out[0, ids.shape[1] :].tolist()
    return said


def stored(kv: Any, ids: Any, tokens: int, **options: Any) -> list[int]:
    """The same with a stored cache."""
    out = kv.generate(ids, max_new_tokens=tokens, **GREEDY, **options)
    said: list[int] = out[0, ids.shape[1] :].tolist()
    return said


def save_tiny(folder: Path) -> Path:
    """A tiny model and its tokenizer, a token for every ASCII character, as files."""
    import tokenizers

    words = tokenizers.models.WordLevel({chr(n): n for n in range(VOCABULARY)}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    each = tokenizers.Regex(r"[\s\S]")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(each, "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    fast.save_pretrained(folder)
    tiny_model().save_pretrained(folder)
    return folder
