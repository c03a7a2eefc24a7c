"""The parameters of a synthetic decode, solved in closed form from the measures of a real one.

Decides what kind of process attention is taken to be. Draws nothing and keeps no state.

A block's score is E + G. E, its salience, is exponential with mean 1: masses with such logarithms
are Zipf-like, and what lies above one edge is distributed as what lies above another, so overlaps
hardly depend on how many blocks are picked, which is what real traces show. G is normal and drifts:
a sum of parts, each redrawn anew with a chance of 1 - exp(-1 / memory) a step. Where few
blocks exceed the edge, n of one set and m of another with standard deviation s of the difference
of their G and the same E, the expected overlap is that of two lognormals, E min(X, Y)
(Margrabe, "The value of an option to exchange one asset for another", 1978):
n Φ(ln(m/n)/s - s/2) + m Φ(ln(n/m)/s - s/2), and 2 Φ(-s/2) as a share if n = m. Every overlap
that was measured thus gives a variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.synth_fit import LAGS, AttentionFit
from prefetchd.lab.synth_levels import CLASSES, FAR_CLASSES

MEMORIES = (0, 2, 8, 32)  # steps: how long each part of G lasts; 0 is fresh at every step
SCORES = np.linspace(-8, 45, 2048)
_NEVER = -1e4  # a level that no block reaches

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Aims:
    """Measures to solve for, and what no measure gives in closed form; float64."""

    fit: AttentionFit
    sharing: Floats  # [layer], part of the variance of G that a layer's heads have in common
    spikes: Floats  # [layer], share of far picks that come from nowhere and are gone the step after
    bent: Floats  # [layer, rank], by how much more the logarithm of the mass at a rank is
    hint_bias: Floats  # [layer], what hints add to the scores of far blocks


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters, float64, of the layers and heads of the trace that was fitted."""

    drift: Floats  # [layer, memory], variances of the parts of G
    layer_fresh: Floats  # [layer], chance that a block's E is not that of the layer below
    head_fresh: Floats  # [layer], chance that a block's E is not that of its layer
    sharing: Floats  # as in Aims
    spikes: Floats
    bent: Floats
    hint_bias: Floats
    hint_noise: Floats  # [layer], standard deviation of what hints add to a score
    hint_blind: Floats  # [layer], chance that hints do not see a far block at all
    hint_fresh: float  # chance a step that either is drawn anew
    share: Floats  # [layer, head, class], share of blocks at or above `level`
    level: Floats
    share_above: Floats
    level_above: Floats


def first_aims(fit: AttentionFit) -> Aims:
    """The measures as they are."""
    none = np.zeros(fit.layers)
    bent = np.zeros((fit.layers, fit.ranks))
    return Aims(fit, sharing=none, spikes=none + 0.02, bent=bent, hint_bias=none)


def solve(aims: Aims) -> Model:
    """The model whose decodes have the measures aimed at, as far as the closed forms hold."""
    fit = aims.fit
    drift = _drift(np.array(fit.far_overlap_by_layer) / (1 - aims.spikes[:, None]))
    wander = drift.sum(1)
    picks = np.array(fit.far_picks)
    head_fresh = _head_fresh(fit, picks, wander * (1 - aims.sharing))
    points = np.array(
        [[[(x.share, x.level, x.share_above, x.level_above) for x in y] for y in z]
         for z in fit.levels]
    )  # fmt: skip
    noise, blind = _hint_noise(fit)
    return Model(
        drift=drift,
        layer_fresh=_layer_fresh(fit, picks, wander, head_fresh),
        head_fresh=head_fresh,
        sharing=aims.sharing,
        spikes=aims.spikes,
        bent=aims.bent,
        hint_bias=aims.hint_bias,
        hint_noise=noise,
        hint_blind=blind,
        hint_fresh=1 - min(fit.hint_miss_again, 0.95),
        share=points[..., 0],
        level=points[..., 1],
        share_above=points[..., 2],
        level_above=points[..., 3],
    )


def survivals(model: Model) -> Floats:
    """Share of blocks whose score exceeds each of `SCORES`, [layer, score]: E + G's survival."""
    variance = np.maximum(model.drift.sum(1), 1e-6)[:, None]
    spread = np.sqrt(variance)
    survival: Floats = _phi(-SCORES / spread) + np.exp(variance / 2 - SCORES) * _phi(
        (SCORES - variance) / spread
    )
    return survival


def offsets(model: Model, survival: Floats, crowd: Floats) -> tuple[Floats, Floats]:
    """What turns scores into levels: level = offset + scale x score, each [layer, head, class].

    `crowd` (float64, [class]) is by how many times more blocks of a class are drawn than the fit
    has, so that the number of picks stays. Where the fit never saw a block of a class, the offset
    is out of reach.
    """
    lasting = np.ones((len(survival), 1, CLASSES))
    lasting[..., FAR_CLASSES] -= model.spikes[:, None, None]
    lower, upper = (
        _score_at(np.clip(share * lasting / crowd, 1e-12, most), survival)
        for share, most in ((model.share, 0.98), (model.share_above, 0.97))
    )
    slope = (model.level_above - model.level) / np.maximum(upper - lower, 0.02)
    scale = np.clip(slope, 0.05, 5)
    return np.where(model.share > 0, model.level - scale * lower, _NEVER), scale


def _score_at(share: Floats, survival: Floats) -> Floats:
    """The score that a share of blocks exceeds, both [layer, head, class]."""
    found = np.empty(share.shape)
    for layer, row in enumerate(-np.log(np.maximum(survival, 1e-300))):
        found[layer] = np.interp(-np.log(share[layer]), row, SCORES)
    return found


def spike_floor(model: Model) -> Floats:
    """The least score of a spike, [layer], if every far block had one each step.

    Above any edge there are then as many spikes to other picks as `spikes` to the rest of 1.
    """
    spikes = np.clip(model.spikes, 1e-6, 0.9)
    floor: Floats = model.drift.sum(1) / 2 + np.log(spikes / (1 - spikes))
    return floor


def common(first: Floats, second: Floats, spread: Floats) -> Floats:
    """Expected overlap of sets of `first` and `second` blocks, see the module's text."""
    first, second = np.maximum(first, 1e-9), np.maximum(second, 1e-9)
    spread = np.maximum(spread, 1e-3)
    ratio = np.log(second / first) / spread
    both: Floats = first * _phi(ratio - spread / 2) + second * _phi(-ratio - spread / 2)
    return both


def change_of(overlaps: Floats) -> Floats:
    """v, half the variance of G's change over a lag, of which 2 Φ(-√(v/2)) stay picked."""
    halves = np.clip(overlaps, 1e-3, 0.9999) / 2
    change: Floats = 2 * np.vectorize(NormalDist().inv_cdf)(halves) ** 2
    return change


def overlap_of(change: Floats) -> Floats:
    """The inverse of `change_of`."""
    overlap: Floats = 2 * _phi(-np.sqrt(np.maximum(change, 0) / 2))
    return overlap


def _drift(overlaps: Floats) -> Floats:
    """Variances of G's parts, [layer, memory], from overlaps [layer, lag].

    The change over a lag is a sum of variance x (1 - exp(-lag / memory)) over the parts: least
    squares that stay positive, by the multiplicative updates of Lee and Seung, "Algorithms for
    non-negative matrix factorization" (2001).
    """
    change = change_of(overlaps)
    lags = np.array(LAGS, np.float64)
    memories = np.maximum(np.array(MEMORIES, np.float64), 1e-9)
    risen = 1 - np.exp(-lags[None] / memories[:, None])  # [memory, lag]
    parts: Floats = np.full((len(overlaps), len(memories)), 0.1)
    for _ in range(3000):
        parts = parts * (change @ risen.T) / np.maximum(parts @ risen @ risen.T, 1e-12)
    return parts


def _head_fresh(fit: AttentionFit, picks: Floats, wander: Floats) -> Floats:
    other = np.roll(picks, 1, axis=1)
    expected = common(picks, other, np.sqrt(2 * wander)[:, None]).mean(1)
    # Two heads share a block's E only if neither has one of its own.
    kept = np.array(fit.head_shared) / np.maximum(expected, 1e-9)
    fresh: Floats = 1 - np.sqrt(np.clip(kept, 0, 1))
    return fresh


def _layer_fresh(fit: AttentionFit, picks: Floats, wander: Floats, head_fresh: Floats) -> Floats:
    fresh = np.ones(len(picks))
    spread = np.sqrt(wander[1:] + wander[:-1])
    expected = common(picks[1:], picks[:-1], spread[:, None]).mean(1)
    expected *= (1 - head_fresh[1:]) * (1 - head_fresh[:-1])
    kept = np.array(fit.layer_shared)[1:] / np.maximum(expected, 1e-9)
    fresh[1:] = 1 - np.clip(kept, 0, 1)
    return fresh


def _hint_noise(fit: AttentionFit) -> tuple[Floats, Floats]:
    """Noise and blindness, [layer], that give the recall at k and at 2k.

    Noise alone would let twice the budget find nearly all; what it does not find is not seen.
    """
    recall = np.array(fit.hint_recall_by_layer)
    picks = max(float(np.mean(fit.far_picks)), 1e-9)
    named = np.maximum(np.array(fit.hint_far_picks) / picks, 1e-3)
    spreads = np.linspace(0.01, 6, 600)
    one = np.ones(len(spreads))
    found = np.array([common(one, one * share, spreads) for share in named])  # [k or 2k, spread]
    gain = found[1] / found[0]
    wanted = recall[:, 1] / np.maximum(recall[:, 0], 1e-6)
    noise = np.interp(wanted, np.maximum.accumulate(gain), spreads)
    seen = recall[:, 0] / np.interp(noise, spreads, found[0])
    return noise, 1 - np.clip(seen, 0, 1)


def _phi(values: Floats) -> Floats:
    erf: Floats = np.vectorize(math.erf, otypes=[np.float64])(values / math.sqrt(2))
    return (1 + erf) / 2
