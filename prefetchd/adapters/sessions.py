"""A recording from a folder and a text: loads the model, generates greedily, writes the trace.

Decides how a model is loaded: from files alone, nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefetchd.adapters.recording import Recorder
from prefetchd.lab.trace_schema import TraceError


class _Told:
    """A streamer that counts."""

    def __init__(self, tokens: int, told: Callable[[int, int], None]) -> None:
        self._tokens, self._told, self._done = tokens, told, -1

    def put(self, value: Any) -> None:
        self._done += 1
        self._told(self._done, self._tokens)

    def end(self) -> None:
        """Nothing is held back."""


def record_session(
    model: str,
    text: str,
    out: Path,
    *,
    tokens: int,
    prompt_tokens: int | None,
    name: str,
    licence: str,
    told: Callable[[int, int], None],
) -> int:
    """Returns how many steps were recorded. Raises TraceError for a model that cannot be loaded or
    a prompt that is too short."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        loaded = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).eval()
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise TraceError(f"{model} is no folder with a causal model: {why}") from error
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :prompt_tokens]
    if ids.shape[1] < 2:
        raise TraceError(f"a prompt of {ids.shape[1]} tokens leaves nothing to attend to")
    recorder = Recorder(loaded, out, name=name, licence=licence, how=f"greedy, {tokens} tokens")
    with recorder:
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=_Told(tokens, told),
        )
    return recorder.steps
