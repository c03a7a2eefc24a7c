"""`prefetchd trace synth`: a synthetic decode like a given one, of any size.

Decides options and words. The measures are `synth_fit`'s, the decode is `synth`'s.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prefetchd.hostinfo import blaming
from prefetchd.lab.attention import read_attention
from prefetchd.lab.synth import Adversary, Shape, check_shape, generate, made_from, shape_like
from prefetchd.lab.synth_fit import TOP_K, AttentionFit, measure, read_fit
from prefetchd.lab.synth_tables import fit_table
from prefetchd.lab.synth_tuning import tuned
from prefetchd.lab.trace_saving import check_out, progress_bars, save, say
from prefetchd.lab.trace_schema import TraceError, TraceHeader
from prefetchd.units import parse_bytes

_EMBEDDED = "summ_pydocs_demo.npz"
_ZIP_MAGIC = b"PK"


def synth(
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace to write.")],
    fit_from: Annotated[
        Path | None,
        typer.Argument(
            help="A decode trace to be like, or a fit of one as JSON; default: the embedded trace."
        ),
    ] = None,
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
            check_out(path, force)
    if wrong_hints and not adversarial:
        raise TraceError("--wrong-hints tells of the blocks before a jump; add --adversarial")
    adversary = Adversary(jump_every, wrong_hints) if adversarial else None
    fit = _fit(fit_from, top_k)
    shape = _shape(fit, tokens, steps, layers, kv_heads)
    check_shape(fit, shape)
    if fit_out is not None:
        with blaming(fit_out):
            fit_out.write_bytes(fit.encode())
    made = None
    header = _header(out.stem, fit, shape, made_from(fit, seed, adversary))
    with progress_bars() as bars:
        aims = tuned(fit, bars("fitting"))
        chunks = generate(aims, shape, seed=seed, adversary=adversary)
        writing = bars("writing")  # the header does not know yet how many rows there will be
        written = save(out, header, chunks, lambda rows, _: writing(rows, shape.steps))
        if check:
            made = measure(read_attention(out), top_k=fit.top_k, told=bars("measuring"))
    Console(highlight=False, soft_wrap=True).print(fit_table(fit, made))
    say(out, f"{written}; SYNTHETIC: {header.how}")


def _fit(path: Path | None, top_k: int) -> AttentionFit:
    if path is None:
        with as_file(files("prefetchd.data") / _EMBEDDED) as embedded:
            return measure(read_attention(embedded), top_k=top_k)
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


def _header(name: str, fit: AttentionFit, shape: Shape, how: str) -> TraceHeader:
    return TraceHeader(
        kind="decode",
        name=name,
        origin=fit.origin,
        synthetic=True,
        how=how,
        block_tokens=shape.block_tokens,
        prompt_tokens=shape.prompt_tokens,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
    )
