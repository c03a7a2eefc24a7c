"""Makes synthetic decodes: any context, layers and heads, with the statistics of a fitted trace.

Decides how the fitted process is carried to another size; `synth_heads` draws it. Knows no files.

How it scales. A head's picks, by class of age, stay as many as fitted, whatever the context: the
budget of top-k does not grow with it. The classes of far blocks are shares of the far part of the
context and stretch with it, so far picks come from all of a long context and each block of it is
the less likely. Layers take the parameters of the fitted layer at the same relative depth, heads
those of the fitted heads in turn. A head draws scores for `POOL_BLOCKS` blocks at most: in a
longer context these are its candidates, one of each stretch of the far part, and they differ
between layers and heads as their salient blocks do. Salience is exponential, so the top of a
sample is distributed as the top of all with as many picks would be.

Not modelled: that neighbouring blocks are picked together, and that topics return.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.attention import AttentionTrace
from prefetchd.lab.synth_fit import WINDOW_BLOCKS, AttentionFit
from prefetchd.lab.synth_heads import Heads
from prefetchd.lab.synth_model import Aims, Model, solve
from prefetchd.lab.trace_schema import TraceError

POOL_BLOCKS = 1024
_SPARE = 16  # far blocks that there must be at least

Columns = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a synthetic decode."""

    prompt_tokens: int
    steps: int
    layers: int
    kv_heads: int
    ranks: int = 64
    hint_ranks: int = 48  # 0: no hints
    block_tokens: int = 16

    @property
    def blocks(self) -> int:
        """Blocks at the end."""
        return (self.prompt_tokens + self.steps - 1) // self.block_tokens + 1


@dataclass(frozen=True, slots=True)
class Adversary:
    """Every `every` steps all heads turn to a fresh part of the context (retrieval).

    With `wrong_hints`, hints tell of the part before until the next such jump.
    """

    every: int
    wrong_hints: bool = False


def shape_like(fit: AttentionFit) -> Shape:
    """The size of the trace that was fitted."""
    heads = len(fit.far_picks[0])
    return Shape(
        prompt_tokens=fit.prompt_tokens,
        steps=fit.steps,
        layers=fit.layers,
        kv_heads=heads,
        ranks=fit.ranks,
        hint_ranks=fit.hint_ranks,
        block_tokens=fit.block_tokens,
    )


def generate(
    aims: Aims,
    shape: Shape,
    *,
    seed: int,
    adversary: Adversary | None = None,
    chunk_steps: int = 16,
) -> Iterator[Columns]:
    """Columns of an attention trace, `chunk_steps` steps at a time.

    `block_ids` and `hint_ids` are uint16, or uint32 where the blocks need it; `mass` and
    `hint_mass` float16. The same arguments give the same bytes, whatever `chunk_steps`. Raises
    TraceError as `check_shape`.
    """
    check_shape(aims.fit, shape)
    heads = Heads(
        _resized(solve(aims), shape),
        classes=np.array(aims.fit.classes),
        row_mass=np.array(aims.fit.row_mass)[_depths(aims.fit.layers, shape.layers)],
        columns=min(shape.blocks, POOL_BLOCKS),
        frontier=shape.prompt_tokens // shape.block_tokens,
        random=np.random.Generator(np.random.SFC64(seed)),
    )
    ids_type = np.uint16 if shape.blocks <= 1 << 16 else np.uint32
    rows: list[Columns] = []
    for step in range(shape.steps):
        if adversary is not None and step and step % adversary.every == 0:
            heads.jump(keep_hints=adversary.wrong_hints)
        heads.advance((shape.prompt_tokens + step) // shape.block_tokens)
        rows.append(_row(heads, shape, ids_type))
        if len(rows) == chunk_steps or step == shape.steps - 1:
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            rows = []


def collect(
    name: str, aims: Aims, shape: Shape, *, seed: int, adversary: Adversary | None = None
) -> AttentionTrace:
    """A whole synthetic decode in memory."""
    chunks = list(generate(aims, shape, seed=seed, adversary=adversary))
    columns: dict[str, Any] = {
        column: np.concatenate([chunk[column] for chunk in chunks]) for column in chunks[0]
    }
    return AttentionTrace(
        name=name,
        synthetic=made_from(aims.fit, seed, adversary),
        block_ids=columns["block_ids"],
        mass=columns["mass"],
        hint_ids=columns.get("hint_ids"),
        hint_mass=columns.get("hint_mass"),
        prompt_tokens=shape.prompt_tokens,
        block_tokens=shape.block_tokens,
    )


def made_from(fit: AttentionFit, seed: int, adversary: Adversary | None) -> str:
    """In words, what a synthetic trace is: for everybody who shows figures of it."""
    words = f"generated, not recorded: fitted to {fit.origin}, seed {seed}"
    if adversary is not None:
        words += f", adversarial: the far blocks change every {adversary.every} steps"
        words += " and the hints tell of those before" if adversary.wrong_hints else ""
    return words


def _row(heads: Heads, shape: Shape, ids_type: type[np.unsignedinteger]) -> Columns:
    ids, mass = heads.picks(shape.ranks)
    row: Columns = {"block_ids": ids.astype(ids_type), "mass": mass}
    if shape.hint_ranks:
        ids, mass = heads.hints(shape.hint_ranks)
        row |= {"hint_ids": ids.astype(ids_type), "hint_mass": mass}
    return row


def check_shape(fit: AttentionFit, shape: Shape) -> None:
    """Raises TraceError where no decode of this shape can be made from the fit."""
    if min(shape.steps, shape.layers, shape.kv_heads, shape.ranks) < 1:
        raise TraceError("a synthetic decode needs at least one step, layer, KV head and rank")
    prompt_blocks = shape.prompt_tokens // shape.block_tokens
    least = max(shape.ranks, shape.hint_ranks, WINDOW_BLOCKS) + _SPARE
    if min(prompt_blocks, POOL_BLOCKS) < least:
        raise TraceError(
            f"a prompt of {shape.prompt_tokens} tokens has {prompt_blocks} blocks of "
            f"{shape.block_tokens}; a synthetic decode of {shape.ranks} ranks needs {least}, and "
            f"{POOL_BLOCKS - _SPARE} ranks are the most"
        )
    if shape.hint_ranks and not fit.hint_ranks:
        raise TraceError(f"{fit.origin} has no hints to be like; ask for none")


def _depths(fitted: int, layers: int) -> NDArray[np.int64]:
    """The fitted layer at the same relative depth as each layer."""
    return ((np.arange(layers) + 0.5) * fitted / layers).astype(np.int64)


def _resized(model: Model, shape: Shape) -> Model:
    depth = _depths(len(model.drift), shape.layers)
    heads = np.arange(shape.kv_heads) % model.share.shape[1]
    points = (model.share, model.level, model.share_above, model.level_above)
    share, level, share_above, level_above = (x[depth][:, heads] for x in points)
    return Model(
        drift=model.drift[depth],
        layer_fresh=model.layer_fresh[depth],
        head_fresh=model.head_fresh[depth],
        sharing=model.sharing[depth],
        spikes=model.spikes[depth],
        bent=model.bent[depth],
        hint_bias=model.hint_bias[depth],
        hint_noise=model.hint_noise[depth],
        hint_blind=model.hint_blind[depth],
        hint_fresh=model.hint_fresh,
        share=share,
        level=level,
        share_above=share_above,
        level_above=level_above,
    )
