"""`prefetchd trace synth`: a synthetic decode like a given one, of any size.

Decides options and words. The measures are `synth_fit`'s, the decode is `synth`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from prefetchd.lab.attention import read_attention
from prefetchd.lab.synth import Adversary, Shape, check_shape, generate, made_from, shape_like
from prefetchd.lab.synth_fit import TOP_K, AttentionFit, measure, read_fit
from prefetchd.lab.synth_tables import fit_table
from prefetchd.lab.synth_tuning import GAINS, tuned
from prefetchd.lab.trace_format import TraceWriter, check_free
from prefetchd.lab.trace_schema import TraceError, TraceHeader
from prefetchd.units import parse_bytes

_ZIP_MAGIC = b"PK"


def synth(
    fit_from: Annotated[
        Path, typer.Argument(help="A decode trace to be like, or a fit of one as JSON.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace to write.")],
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the prompt: 131072, 128K or 1M.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to decode.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads of a layer.")] = None,
    top_k: Annotated[int, typer.Option(min=1, help="Picks of a head, for the fit.")] = TOP_K,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same trace.")] = 1,
    adversarial: Annotated[
        bool, typer.Option("--adversarial", help="All heads jump to other far blocks, often.")
    ] = False,
    jump_every: Annotated[int, typer.Option(min=1, help="Steps between jumps.")] = 16,
    wrong_hints: Annotated[
        bool, typer.Option("--wrong-hints", help="Hints tell of the blocks before the jump.")
    ] = False,
    fit_out: Annotated[Path | None, typer.Option(help="Save the fit as JSON.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the new trace too and show both.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Make a SYNTHETIC decode with the statistics of a recorded one, for sizes nobody recorded.

    What is not said stays as in the trace that it is like.
    """
    for path in (out, fit_out):
        if path is not None:
            check_free(path, force=force)
    if wrong_hints and not adversarial:
        raise TraceError("--wrong-hints tells of the blocks before a jump; add --adversarial")
    adversary = Adversary(jump_every, wrong_hints) if adversarial else None
    made = None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        fit = _fit(fit_from, top_k)
        shape = _shape(fit, tokens, steps, layers, kv_heads)
        check_shape(fit, shape)
        if fit_out is not None:
            fit_out.write_bytes(fit.encode())
        _write(out, fit, shape, seed, adversary, progress)
        if check:
            progress.reset(task, description="measuring what was made")
            made = measure(read_attention(out), top_k=fit.top_k)
    console = Console(highlight=False, soft_wrap=True)
    console.print(fit_table(fit, made))
    words = (
        f"{shape.steps} steps, {shape.layers} layers, {shape.kv_heads} KV heads, "
        f"{shape.prompt_tokens} tokens, {out.stat().st_size} bytes; SYNTHETIC: "
        f"{made_from(fit, seed, adversary)}"
    )
    console.print(f"{out}: {words}", markup=False)


def _fit(path: Path, top_k: int) -> AttentionFit:
    try:
        with path.open("rb") as file:
            is_trace = file.read(2) == _ZIP_MAGIC
    except FileNotFoundError:
        raise TraceError(f"there is no trace {path}") from None
    return measure(read_attention(path), top_k=top_k) if is_trace else read_fit(path)


def _shape(
    fit: AttentionFit,
    tokens: str | None,
    steps: int | None,
    layers: int | None,
    kv_heads: int | None,
) -> Shape:
    like = shape_like(fit)
    return Shape(
        prompt_tokens=like.prompt_tokens if tokens is None else parse_bytes(tokens),
        steps=steps or like.steps,
        layers=layers or like.layers,
        kv_heads=kv_heads or like.kv_heads,
        ranks=like.ranks,
        hint_ranks=like.hint_ranks,
        block_tokens=like.block_tokens,
    )


def _write(
    out: Path,
    fit: AttentionFit,
    shape: Shape,
    seed: int,
    adversary: Adversary | None,
    progress: Progress,
) -> None:
    header = TraceHeader(
        kind="decode",
        name=out.stem,
        origin=fit.origin,
        synthetic=True,
        how=made_from(fit, seed, adversary),
        block_tokens=shape.block_tokens,
        prompt_tokens=shape.prompt_tokens,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
    )
    task = progress.add_task("fitting", total=len(GAINS))
    aims = tuned(fit, lambda _: progress.advance(task))
    task = progress.add_task("writing", total=shape.steps)
    with TraceWriter(out, header) as writer:
        for columns in generate(aims, shape, seed=seed, adversary=adversary):
            writer.write(columns)
            progress.advance(task, len(columns["block_ids"]))
