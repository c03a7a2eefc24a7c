"""A chat over a long document whose keys and values survive a restart.

    python chat_restart.py MODEL DOCUMENT "A question?" [--store FOLDER] [--tokens 64]

MODEL is a folder with a Hugging Face causal model. Run it twice: the second time, the document is
not computed again, whatever is asked; its blocks are found by its tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefetchd.adapters import transformers as stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("document", type=Path)
    parser.add_argument("question")
    parser.add_argument("--store", type=Path, default=Path("chat-kv"))
    parser.add_argument("--tokens", type=int, default=64, help="of the answer, at most")
    parser.add_argument("--sparse", type=int, help="far blocks a layer reads for each new token")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True).eval()
    # The document comes first, so that its blocks are the same whatever is asked about it.
    text = f"{options.document.read_text()}\n\nQuestion: {options.question}\nAnswer:"
    ids = tokenizer(text, return_tensors="pt").input_ids
    sparse = stored.Sparse(blocks=options.sparse) if options.sparse else None

    blocks = 4 * (ids.shape[1] + options.tokens) // 16 + 4  # room for a few documents
    with stored.open(model, options.store, blocks=blocks) as kv:
        began = time.monotonic()
        cache = kv.cache(ids, sparse)
        known = cache.get_seq_length()
        cache.close()
        out = kv.generate(ids, sparse=sparse, max_new_tokens=options.tokens, do_sample=False)
        seconds = time.monotonic() - began
    print(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    print(f"{known} of {ids.shape[1]} tokens were in the store; {seconds:.1f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
