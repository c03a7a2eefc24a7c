"""What a decode's attention looks like in numbers: the measures that a synthetic trace must match.

Decides which statistics describe locality and counts them from a trace, a layer at a time. Knows
nothing of how a trace with such statistics is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.attention import AttentionTrace
from prefetchd.lab.synth_levels import Level, block_classes, class_sizes, levels
from prefetchd.lab.text import Told
from prefetchd.lab.trace_schema import TraceError
from prefetchd.model import Mask

LAGS = (1, 2, 4, 8, 16, 32)  # steps
WINDOW_BLOCKS = 64  # the last 1,024 tokens of 16-token blocks: not far
TOP_K = 16
_NOVEL_STEPS = 16
_VERSION = 1

Counts = NDArray[np.float64]


class AttentionFit(msgspec.Struct, frozen=True, kw_only=True):
    """Measures of one trace. Lists over layers, KV heads or lags (`LAGS`), outermost first.

    "Picked" is in a head's top `top_k` at a step; far is neither block 0 nor one of the newest
    64. Overlaps are shares of the later set, or of the upper layer's, that were in the other.
    """

    version: int
    origin: str
    top_k: int
    steps: int
    prompt_tokens: int
    block_tokens: int
    ranks: int
    hint_ranks: int  # 0: the trace has no hints
    needed_overlap: list[float]  # [lag], union over heads, window and sink included
    far_overlap: list[float]  # [lag], per head
    far_overlap_by_layer: list[list[float]]  # [layer][lag], per head
    layer_overlap: float  # far, per head, with the layer below
    layer_shared: list[float]  # [layer], far picks common to neighbours, per head and step
    head_shared: list[float]  # [layer], far picks common to two heads, per pair and step
    far_picks: list[list[float]]  # [layer][head], per step
    far_share: float  # of all picks
    recent: list[float]  # [lag], share of far picks that were picked in the last `lag` steps
    novel_by_layer: list[float]  # [layer], share of far picks not picked in the last 16 steps
    needed_width: list[float]  # [layer], blocks picked by any head, per step
    never: float  # share of far picks after step 16 that were not picked before at all
    sink_mass: list[float]  # [layer], block 0
    window_mass: list[float]  # [layer], the newest 64 blocks
    row_mass: list[float]  # [layer], all recorded ranks
    mass_by_rank: list[list[float]]  # [layer][rank], mean of heads and steps
    hint_recall: list[float]  # [k, 2k], far picks that a head's first k or 2k hints name
    hint_precision: list[float]  # [k, 2k], far blocks so named that were picked
    hint_far_picks: list[float]  # [k, 2k], far blocks so named, per head and step
    hint_far_by_layer: list[float]  # [layer], far blocks that k hints name, per head and step
    hint_recall_by_layer: list[list[float]]  # [layer][k, 2k]
    hint_miss_again: float  # a pick that 2k hints missed is missed again if picked the step after
    classes: list[float]  # mean blocks of each class of age, see `synth_levels`
    levels: list[list[list[Level]]]  # [layer][head][class]

    @property
    def layers(self) -> int:
        return len(self.levels)

    @property
    def novelty(self) -> float:
        """Share of far picks that were not picked in the 16 steps before."""
        return 1 - self.recent[LAGS.index(_NOVEL_STEPS)]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_fit(path: Path) -> AttentionFit:
    """A fit that was saved as JSON. Raises TraceError where it cannot be used."""
    try:
        fit = msgspec.json.decode(path.read_bytes(), type=AttentionFit)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise TraceError(f"{path} is no fit of an attention trace: {error}") from error
    if fit.version != _VERSION:
        raise TraceError(f"{path} is a fit of version {fit.version}, not {_VERSION}; fit again")
    return fit


def measure(trace: AttentionTrace, *, top_k: int = TOP_K, told: Told | None = None) -> AttentionFit:
    """Count the measures of a trace; `told` hears layers. Raises TraceError for one too short."""
    if trace.steps <= _NOVEL_STEPS:
        raise TraceError(
            f"{trace.name} holds {trace.steps} steps; a fit needs more than {_NOVEL_STEPS}"
        )
    top_k = min(top_k, trace.ranks)
    frontiers = np.array([trace.frontier(step) for step in range(trace.steps)], np.int64)
    tally = _Tally(trace, top_k, frontiers)
    layers = trace.geometry.layers
    for layer in range(layers):
        tally.add(layer)
        if told is not None:
            told(layer + 1, layers)
    return tally.fit()


@dataclass
class _Tally:
    """Counts, summed a layer at a time so that memory holds one layer's picks."""

    trace: AttentionTrace
    top_k: int
    frontiers: NDArray[np.int64]
    below: Mask | None = None
    rows: dict[str, list[Counts]] = field(default_factory=dict)

    def add(self, layer: int) -> None:
        ids = self.trace.block_ids[:, layer].astype(np.int64)
        mass = self.trace.mass[:, layer].astype(np.float64)
        picked = _marked(ids[..., : self.top_k], self.trace.geometry.blocks)
        far_blocks = self._far_blocks()
        far = picked & far_blocks[:, None]
        steps, heads = ids.shape[:2]
        per = steps * heads
        needed: Mask = np.logical_or.reduce(picked, axis=1)
        self._put("needed", _overlaps(needed))
        self._put("far", _overlaps(far))
        self._put("width", [needed.sum() / steps])
        self._put("recent", _recent(far))
        self._put("far_picks", far.sum((0, 2)) / steps)
        below = 0.0 if self.below is None else (far & self.below).sum() / per
        self._put("layer_shared", [below])
        self._put("head_shared", [_head_shared(far)])
        sink = (mass * (ids == 0)).sum() / per
        near = (mass * ((ids > 0) & ~_taken(far_blocks, ids))).sum() / per
        self._put("mass", [sink, near, mass.sum() / per])
        self._put("by_rank", mass.mean((0, 1)))
        if self.trace.hint_ids is not None and layer > 0:
            self._put("hints", self._hints(self.trace.hint_ids[:, layer], far, far_blocks))
        self.below = far

    def _far_blocks(self) -> Mask:
        blocks = np.arange(self.trace.geometry.blocks)
        far: Mask = (blocks > 0) & (blocks <= self.frontiers[:, None] - WINDOW_BLOCKS)
        return far

    def _hints(self, hint_ids: NDArray[np.integer], far: Mask, far_blocks: Mask) -> Sequence[float]:
        """Picks found and far blocks named at k and 2k; picks; misses that could and did recur."""
        per = far.shape[0] * far.shape[1]
        found, named = [], []
        for count in (self.top_k, 2 * self.top_k):
            hinted = _marked(hint_ids[..., :count].astype(np.int64), far.shape[2])
            hinted &= far_blocks[:, None]
            found.append((hinted & far).sum() / per)
            named.append(hinted.sum() / per)
        missed = far & ~hinted
        chances = (missed[:-1] & far[1:]).sum() / per
        return [*found, *named, far.sum() / per, (missed[1:] & missed[:-1]).sum() / per, chances]

    def _put(self, name: str, values: Sequence[float] | Counts) -> None:
        self.rows.setdefault(name, []).append(np.asarray(values, np.float64))

    def fit(self) -> AttentionFit:
        rows = {name: np.array(values) for name, values in self.rows.items()}
        far, needed, recent = (rows[name].sum(0) for name in ("far", "needed", "recent"))
        picks = rows["far_picks"]
        count = len(LAGS)
        novel = LAGS.index(_NOVEL_STEPS)
        old, base = rows["recent"][:, [novel]], rows["recent"][:, [count + novel]]
        ages = block_classes(self.trace, self.frontiers)
        return AttentionFit(
            **_hint_measures(rows.get("hints", np.zeros((len(picks) - 1, 7)))),
            version=_VERSION,
            origin=self.trace.name,
            top_k=self.top_k,
            steps=self.trace.steps,
            prompt_tokens=self.trace.prompt_tokens,
            block_tokens=self.trace.block_tokens,
            ranks=self.trace.ranks,
            hint_ranks=0 if self.trace.hint_ids is None else self.trace.hint_ids.shape[3],
            needed_overlap=_share(needed[:count], needed[count:]),
            far_overlap=_share(far[:count], far[count:]),
            far_overlap_by_layer=_drawn_to(
                rows["far"][:, :count], rows["far"][:, count:], far[:count], far[count:]
            ),
            layer_overlap=float(rows["layer_shared"].sum() / max(picks[1:].mean(1).sum(), 1e-12)),
            layer_shared=rows["layer_shared"][:, 0].tolist(),
            head_shared=rows["head_shared"][:, 0].tolist(),
            far_picks=picks.tolist(),
            far_share=float(picks.mean() / self.top_k),
            recent=_share(recent[:count], recent[count : 2 * count]),
            novel_by_layer=[1 - x[0] for x in _drawn_to(old, base, old.sum(0), base.sum(0))],
            needed_width=rows["width"][:, 0].tolist(),
            never=float(recent[-2] / max(recent[-1], 1)),
            sink_mass=rows["mass"][:, 0].tolist(),
            window_mass=rows["mass"][:, 1].tolist(),
            row_mass=rows["mass"][:, 2].tolist(),
            mass_by_rank=rows["by_rank"].tolist(),
            classes=class_sizes(self.trace, self.frontiers).tolist(),
            levels=levels(self.trace, ages, self.top_k),
        )


def _hint_measures(hints: Counts) -> dict[str, Any]:
    """Of rows as `_Tally._hints` makes them, from layer 1 on."""
    found, named, picked, again, chances = np.split(hints.sum(0), [2, 4, 5, 6])
    by_layer = _drawn_to(hints[:, :2], hints[:, 4:5], found, picked, weight=1.0)
    return {
        "hint_recall": _share(found, picked),
        "hint_precision": _share(found, named),
        "hint_far_picks": (named / max(len(hints), 1)).tolist(),
        "hint_far_by_layer": [0.0, *hints[:, 2].tolist()],
        "hint_recall_by_layer": [[1.0, 1.0], *by_layer],
        "hint_miss_again": _share(again, chances)[0],
    }


def _marked(ids: NDArray[np.int64], blocks: int) -> Mask:
    """Which blocks are among the ids: [..., rank] to [..., block]."""
    marked = np.zeros((*ids.shape[:-1], blocks), bool)
    np.put_along_axis(marked, ids, True, axis=-1)
    return marked


def _taken(far_blocks: Mask, ids: NDArray[np.int64]) -> Mask:
    steps = np.arange(len(ids))[:, None, None]
    taken: Mask = far_blocks[steps, ids]
    return taken


def _overlaps(picked: Mask) -> Sequence[float]:
    """Common picks at each lag, then the picks that could have been common."""
    common = [float((picked[lag:] & picked[:-lag]).sum()) for lag in LAGS]
    return [*common, *(float(picked[lag:].sum()) for lag in LAGS)]


def _recent(far: Mask) -> Sequence[float]:
    """Picks seen in the last so many steps and all that could be; then never seen, and all."""
    times = np.cumsum(far, axis=0, dtype=np.int32)
    seen, base = [], []
    for lag in LAGS:
        before = times[lag - 1 : -1].copy()
        before[1:] -= times[: -lag - 1]
        seen.append(float((far[lag:] & (before > 0)).sum()))
        base.append(float(far[lag:].sum()))
    late = far[_NOVEL_STEPS:]
    never = late & (times[_NOVEL_STEPS - 1 : -1] == 0)
    return [*seen, *base, float(never.sum()), float(late.sum())]


def _head_shared(far: Mask) -> float:
    """Mean common far picks of two neighbouring heads; with one head, its own."""
    other = np.roll(far, 1, axis=1)
    return float((far & other).sum() / (far.shape[0] * far.shape[1]))


def _share(part: Counts, whole: Counts) -> list[float]:
    shares: list[float] = np.broadcast_to(part / np.maximum(whole, 1e-12), part.shape).tolist()
    return shares


def _drawn_to(
    part: Counts, whole: Counts, parts: Counts, wholes: Counts, *, weight: float = 300.0
) -> list[list[float]]:
    """Shares by layer, drawn towards the mean of all with the weight of so many picks: a layer
    that picks few far blocks shows little of its own."""
    mean = parts / np.maximum(wholes, 1e-12)
    shares: list[list[float]] = ((part + weight * mean) / (whole + weight)).tolist()
    return shares
