"""`prefetchd trace record`: a trace of a model's own decode.

Decides options and words. What is recorded is `prefetchd.adapters.recording`'s, which needs torch
and transformers; nothing of them is imported before the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefetchd.lab.trace_saving import check_out, progress_bars, say
from prefetchd.lab.trace_schema import TraceError


def record(
    model: Annotated[str, typer.Argument(help="A folder with a Hugging Face causal model.")],
    prompt: Annotated[Path, typer.Option(help="A text file: what the model is to go on with.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 160,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of the prompt, keep the first so many.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call the trace.")] = None,
    licence: Annotated[str, typer.Option(help="The licence it is under.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = (
        False
    ),
) -> None:
    """Record which blocks a model's attention needs while it generates, greedily."""
    check_out(out, force)
    try:
        from prefetchd.adapters.sessions import record_session
    except ImportError as error:
        raise TraceError(
            f"recording needs torch and transformers ({error}); install them: "
            "pip install prefetchd[transformers]"
        ) from error
    text = prompt.read_text()
    with progress_bars() as bars:
        steps = record_session(
            model,
            text,
            out,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            name=name or out.stem,
            licence=licence,
            told=bars("generating"),
        )
    say(out, f"{steps} steps, {out.stat().st_size} bytes")
