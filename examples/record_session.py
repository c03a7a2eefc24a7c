"""Records a model's own decode, and shows what prefetching would do for it.

    python record_session.py MODEL TEXT OUT [--tokens 160]

MODEL is a folder with a Hugging Face causal model, TEXT a file that it goes on with. `prefetchd
trace record` does the same for greedy decoding; here the session is yours to choose.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefetchd.adapters.recording import Recorder
from prefetchd.lab.attention import read_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=160)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True).eval()
    ids = tokenizer(options.text.read_text(), return_tensors="pt").input_ids
    torch.manual_seed(1)
    with Recorder(model, options.out, name=options.text.stem, how="sampled at 0.8") as recorder:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.tokens,
            do_sample=True,
            temperature=0.8,
        )

    trace = read_attention(options.out)
    top_k = min(16, trace.ranks)
    foreseen = [
        np.isin(trace.geometry.page_ids(trace.need(step, layer, top_k)[0], layer), hint.pages)
        for step in range(trace.steps)
        for layer in range(trace.geometry.layers)
        if (hint := trace.hint(step, layer, top_k)) is not None
    ]
    share = np.concatenate(foreseen).mean() if foreseen else float("nan")
    print(f"{recorder.steps} steps; hints foresee {share:.0%} of the needed pages")
    print(f"next: prefetchd simulate decode {options.out} --top-k {top_k}")


if __name__ == "__main__":
    main()
