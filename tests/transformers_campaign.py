"""What the transformers adapter costs and gains with a real small model, measured and printed.

    python -m tests.transformers_campaign --prompt 2000 --tokens 64 [--only time needle ...]

Needs the small model (`tests.small_model`) and minutes. One figure a line; see each part.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prefetchd import Options
from prefetchd.adapters import transformers as adapter
from prefetchd.adapters.models import rotation_of
from prefetchd.adapters.paged import PagedSequence
from prefetchd.adapters.selection import Queries
from prefetchd.adapters.summaries import exact_logits, masses, scaled, summary
from tests.small_model import small_model, torch, transformers

small_model = cache(small_model)  # reading it takes seconds
ROOT = Path(__file__).parent.parent
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
NEEDLE = "The access code of the green vault is 48213."
QUESTION = "What is the access code of the green vault?"
KINDS = ("mean", "minmax", "2bit", "4bit")
TOP, SINKS, WINDOW = 32, 1, 4


def prompt_ids(tokenizer: Any, tokens: int) -> Any:
    text = (ROOT / "LICENSE").read_text() + (ROOT / "docs" / "store.md").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids
    return ids.repeat(1, 1 + tokens // ids.shape[1])[:, :tokens]


def needle_ids(tokenizer: Any, tokens: int = 2100, place: int = 500) -> Any:
    """A long licence with one fact in it, and the question at the end."""
    words = tokenizer((ROOT / "LICENSE").read_text(), return_tensors="pt").input_ids[0]
    before, after = (tokenizer.decode(part) for part in (words[:place], words[place : tokens - 60]))
    text = f"{before}\n\n{NEEDLE}\n\n{after}\n\n{QUESTION}"
    turn = [{"role": "user", "content": text}]
    given = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tokenizer(given, return_tensors="pt").input_ids


def builtin_prefilled(model: Any, ids: Any) -> Any:
    """The built-in cache of all but the last token."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        for part in ids[:, :-1].split(adapter.PREFILL_TOKENS, dim=1):
            model(part, **{adapter.cache_word(model): cache}, use_cache=True)
    return cache


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self._at: list[tuple[float, float]] = []

    def put(self, value: Any) -> None:
        self._at.append((time.monotonic(), time.process_time()))

    def end(self) -> None: ...

    @property
    def token_ms(self) -> tuple[float, float]:
        """Medians over the tokens after the third: by the wall, and of processor time."""
        wall, cpu = np.median(np.diff(np.array(self._at)[3:], axis=0), axis=0) * 1e3
        return float(wall), float(cpu)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The most that a sequence held at the end of a pass, with the block that is being put."""
    peak = [0]
    usual = PagedSequence._seal

    def seal(sequence: PagedSequence) -> None:
        block_bytes = sequence.shape.page_bytes * sequence.shape.layers
        peak[0] = max(peak[0], sequence.memory_bytes + block_bytes)
        usual(sequence)

    PagedSequence._seal = seal  # type: ignore[method-assign, assignment]
    try:
        yield peak
    finally:
        PagedSequence._seal = usual  # type: ignore[method-assign]


def time_and_memory(folder: Path, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Exact mode beside the built-in cache: the same tokens, in which time, in how much memory."""
    model, tokenizer = small_model()
    ids = prompt_ids(tokenizer, prompt)
    builtin = builtin_prefilled(model, ids)
    usual_bytes = sum(one.keys.nbytes + one.values.nbytes for one in builtin.layers)
    usual_bytes = usual_bytes // (prompt - 1) * (prompt + tokens)
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "built-in": []}
    same = True
    blocks = -(-(prompt + tokens) // 16)
    with adapter.open(model, folder / "time", blocks=blocks) as kv, peak_memory() as peak:
        for _ in range(rounds):
            clock = Clock()
            given = {adapter.cache_word(model): copy.deepcopy(builtin)}
            given["attention_mask"] = torch.ones_like(ids)
            wanted = model.generate(ids, streamer=clock, max_new_tokens=tokens, **given, **GREEDY)
            found["built-in"].append(clock.token_ms)
            clock = Clock()
            said = kv.generate(ids, streamer=clock, max_new_tokens=tokens, **GREEDY)
            found["ours"].append(clock.token_ms)
            same &= torch.equal(said, wanted)
        parts, stats = kv.runtime._parts, kv.runtime.stats()
    ours, theirs = (np.median(np.array(found[name]), axis=0) for name in ("ours", "built-in"))
    held = parts.staging.nbytes + parts.scratch.nbytes + peak[0]
    return {
        "same tokens": same,
        "ms a token, wall and cpu, ours": ours.round(1).tolist(),
        "ms a token, wall and cpu, built-in": theirs.round(1).tolist(),
        "time ratio (asked: 1.15), wall and cpu": (ours / theirs).round(3).tolist(),
        "memory ratio (asked: 0.4)": round(held / usual_bytes, 3),
        "MiB: staging, write buffers, sequence, built-in": [
            round(n / 2**20, 1)
            for n in (parts.staging.nbytes, parts.scratch.nbytes, peak[0], usual_bytes)
        ],
        "staging share": round(stats.slots / (blocks * parts.geometry.layers), 3),
    }


def first_token(folder: str, prompt: int, *, stored: bool) -> dict[str, Any]:
    """In a process of its own: the time until the first token, model loaded."""
    torch.set_num_threads(1)
    model, tokenizer = small_model()
    ids = prompt_ids(tokenizer, prompt)
    began, opened = time.monotonic(), 0.0
    if stored:
        with adapter.open(model, folder, blocks=prompt // 16 + 8) as kv:
            opened = time.monotonic() - began
            said = kv.generate(ids, max_new_tokens=1, **GREEDY)
            seconds = time.monotonic() - began
    else:
        given = {"attention_mask": torch.ones_like(ids)}
        said = model.generate(ids, max_new_tokens=1, **given, **GREEDY)
        seconds = time.monotonic() - began
    return {"token": int(said[0, -1]), "s": round(seconds, 3), "of that opening": round(opened, 3)}


def restore(folder: Path, prompt: int) -> dict[str, Any]:
    """A new process each: computes, computes and stores, restores."""
    told = {}
    for name, stored in (("computing", False), ("storing", True), ("restoring", True)):
        words = ["--child", str(folder / "restore"), "--prompt", str(prompt)]
        command = [sys.executable, "-m", "tests.transformers_campaign", *words]
        command += ["--stored"] if stored else []
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        told[name] = json.loads(done.stdout.splitlines()[-1])
    ratio = told["restoring"]["s"] / told["computing"]["s"]
    same = len({one["token"] for one in told.values()}) == 1
    return {**told, "same token": same, "ratio (asked: 0.15)": round(ratio, 3)}


def needle(folder: Path, ids: Any) -> dict[str, str]:
    """What is answered: dense, with 16 far blocks, and from sinks and recent tokens alone. What it
    computes stays in `folder`."""
    model, tokenizer = small_model()
    answers = {"prompt tokens": str(ids.shape[1])}
    with adapter.open(model, folder, blocks=blocks_of(ids)) as kv:
        for name, sparse in (("dense", None), ("sparse", adapter.Sparse(blocks=16))):
            said = kv.generate(ids, sparse=sparse, max_new_tokens=16, **GREEDY)
            answers[name] = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
        whole = builtin_of(kv, ids)
    for blocks in (16, 32):
        answers[f"sink and {blocks} recent blocks"] = tokenizer.decode(
            _without_far(model, whole, ids, blocks, 16), skip_special_tokens=True
        )
    return answers


def blocks_of(ids: Any) -> int:
    """A store's, for one prompt and a few answers."""
    return int(ids.shape[1] // 16 + 16)


def builtin_of(kv: Any, ids: Any) -> Any:
    """The built-in cache of all but the last token, read from a store instead of computed."""
    stored = kv.cache(ids)
    kv.prefill(stored, ids)
    made, sequence = transformers.DynamicCache(), stored.sequence
    far = range(sequence.near.base // 16)
    blocks = [sequence.far.read_block(place) for place in far]
    for layer in range(sequence.shape.layers):
        parts = [*(block[layer] for block in blocks), sequence.near.recent(layer)]
        keys, values = torch.cat(parts, dim=2)
        made.update(keys[None], values[None], layer)
    stored.close()
    return made


def _without_far(model: Any, whole: Any, ids: Any, blocks: int, tokens: int) -> list[int]:
    cache = copy.deepcopy(whole)
    for layer in cache.layers:
        for name in ("keys", "values"):
            whole = getattr(layer, name)
            parts = [whole[:, :, :16], whole[:, :, -16 * blocks :]]
            setattr(layer, name, torch.cat(parts, dim=2))
    said: list[int] = []
    following, place = ids[:, -1:], ids.shape[1] - 1
    with torch.no_grad():
        while len(said) < tokens and (not said or said[-1] != model.config.eos_token_id):
            given = {adapter.cache_word(model): cache, "position_ids": torch.tensor([[place]])}
            following = model(following, **given).logits[:, -1:].argmax(-1)
            said.append(int(following))
            place += 1
    return said


def recall(cache: Any, ids: Any, tokens: int) -> dict[str, Any]:
    """Of the 32 far blocks that exact scores choose, the share that each kind of summary does, in
    every fourth of the steps that go on with a built-in `cache` of a prompt."""
    model, _ = small_model()
    asked: dict[int, Any] = {}

    def told(layer: int, query: Any, following: Any) -> bool:
        asked[layer] = query
        return False

    queries = Queries(model, rotation_of(model), told)
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    bytes_of = dict.fromkeys(KINDS, 0)
    following = ids[:, -1:]
    with torch.no_grad():
        for step in range(tokens):
            given = {adapter.cache_word(model): cache}
            following = model(following, **given).logits[:, -1:].argmax(-1)
            for layer, query in asked.items() if step % 4 == 0 else ():
                keys = cache.layers[layer].keys[0]
                end = keys.shape[1] // 16 - WINDOW
                far = keys[:, 16 * SINKS : 16 * end].unflatten(1, (-1, 16))
                turned = scaled(query, len(keys))
                best = torch.topk(masses(exact_logits(far, turned)), TOP).indices.tolist()
                for kind in KINDS:
                    made = summary(kind)
                    made.add(far)
                    mine = torch.topk(masses(made.logits(turned)), TOP).indices.tolist()
                    shares[kind].append(len({*best} & {*mine}) / TOP)
                    bytes_of[kind] = made.nbytes * 100 // far.nbytes
    queries.remove()
    return {
        kind: {"recall": round(float(np.mean(shares[kind])), 3), "% of keys": bytes_of[kind]}
        for kind in KINDS
    }


def hints(folder: Path, ids: Any, tokens: int, warmup_steps: int = 16) -> dict[str, Any]:
    """Sparse decoding with 25 % staging: pages missed with hints and without, after warm-up."""
    model, _ = small_model()
    layout = adapter.layout_of(model)
    blocks = -(-(ids.shape[1] + tokens) // 16)
    staging_bytes = blocks * layout.layers // 4 * layout.page_bytes
    told: dict[str, Any] = {}
    for name in ("none", "attention"):
        options = Options(predictor=name, staging_bytes=staging_bytes, write_buffers=4)
        with adapter.open(model, folder, blocks=blocks_of(ids), options=options) as kv:
            meter = kv.meter(warmup_steps)
            sparse = adapter.Sparse(blocks=16, hints=name != "none")
            kv.generate(ids, sparse=sparse, meter=meter, max_new_tokens=tokens, **GREEDY)
            run = meter.figures(name)
        told[name] = {
            "miss %": round(100 * (run.miss_rate or 0), 2),
            "late %": round(100 * (run.late_rate or 0), 2),
            "stalled share": round(run.stalled_share or 0, 3),
            "misses by layer": run.per_layer.miss,
        }
    missed = [told[name]["miss %"] for name in ("attention", "none")]
    return {**told, "misses fewer by (asked: 0.6)": round(1 - missed[0] / max(missed[1], 1e-9), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--stored", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.child:
        print(json.dumps(first_token(asked.child, asked.prompt, stored=asked.stored)))
        return
    with tempfile.TemporaryDirectory(prefix="prefetchd-") as name:
        folder = Path(name)
        tokens = asked.tokens

        def ids() -> Any:
            return prompt_ids(small_model()[1], asked.prompt)

        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "needle": lambda: needle(folder / "needle", needle_ids(small_model()[1])),
            "recall": lambda: recall(builtin_prefilled(small_model()[0], ids()), ids(), tokens),
            "hints": lambda: hints(folder / "hints", ids(), tokens),
            "restore": lambda: restore(folder, asked.prompt),
            "time": lambda: time_and_memory(folder, asked.prompt, asked.tokens, asked.rounds),
        }
        for part, run in parts.items():
            if not asked.only or part in asked.only:
                for what, value in run().items():
                    print(f"{part}: {what}: {value}", flush=True)


if __name__ == "__main__":
    main()
