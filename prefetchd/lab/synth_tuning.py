"""Corrects what the closed forms of the synthetic model leave: trial decodes, measured and nudged.

Decides which aim answers for which measure. Top-k is a contest, so a pick depends on the other
blocks too and a solved overlap comes out a little off; and two parameters, the heads' common drift
and the share of spikes, have no closed form at all.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.synth import collect, shape_like
from prefetchd.lab.synth_fit import AttentionFit, measure
from prefetchd.lab.synth_levels import FAR_CLASSES, SINK, Level
from prefetchd.lab.synth_model import Aims, change_of, first_aims, overlap_of
from prefetchd.lab.text import Told

GAINS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
"""How much of each trial's error is corrected: less and less, since a trial is but one draw."""

Floats = NDArray[np.float64]


def tuned(fit: AttentionFit, told: Told | None = None) -> Aims:
    """Aims whose decodes have the measures of `fit`; the same for the same fit.

    Draws as many trial decodes of the fitted size as `GAINS`; `told` hears of each.
    """
    aims = first_aims(fit)
    for number, gain in enumerate(GAINS):
        trial = measure(collect("trial", aims, shape_like(fit), seed=number), top_k=fit.top_k)
        aims = _nudged(aims, fit, trial, gain)
        if told is not None:
            told(number + 1, len(GAINS))
    return aims


def _nudged(aims: Aims, fit: AttentionFit, trial: AttentionFit, gain: float) -> Aims:
    aim = aims.fit
    change = change_of(np.array(aim.far_overlap_by_layer)) + gain * (
        change_of(np.array(fit.far_overlap_by_layer))
        - change_of(np.array(trial.far_overlap_by_layer))
    )
    wider = np.array(trial.needed_width) / np.array(fit.needed_width) - 1
    novel = np.array(fit.novel_by_layer) - np.array(trial.novel_by_layer)
    recall = np.array(aim.hint_recall_by_layer) + gain * (
        np.array(fit.hint_recall_by_layer) - np.array(trial.hint_recall_by_layer)
    )
    return Aims(
        fit=msgspec.structs.replace(
            aim,
            far_overlap_by_layer=overlap_of(np.clip(change, 1e-4, 12)).tolist(),
            layer_shared=_shared(aim.layer_shared, fit, trial, "layer_shared", gain),
            head_shared=_shared(aim.head_shared, fit, trial, "head_shared", gain),
            hint_recall_by_layer=np.clip(recall, 0.01, 0.999).tolist(),
            levels=_levels(aim, fit, trial, gain),
        ),
        sharing=np.clip(aims.sharing + 2 * gain * wider, 0, 0.95),
        spikes=np.clip(aims.spikes + gain * novel, 0, 0.5),
        hint_bias=np.clip(aims.hint_bias + gain * _hinted_more(fit, trial), -2, 2),
        bent=np.clip(aims.bent + gain * (_mass_logs(fit) - _mass_logs(trial)), -3, 3),
    )


def _hinted_more(fit: AttentionFit, trial: AttentionFit) -> Floats:
    """By how much more hints must name far blocks, as a logarithm, for each of them picked."""
    named = [
        np.log((np.array(one.hint_far_by_layer) + 0.2) / (np.mean(one.far_picks, 1) + 0.2))
        for one in (fit, trial)
    ]
    more: Floats = named[0] - named[1]
    return more


def _mass_logs(fit: AttentionFit) -> Floats:
    logs: Floats = np.log(np.maximum(fit.mass_by_rank, 1e-7))
    return logs


def _shared(
    aim: list[float], fit: AttentionFit, trial: AttentionFit, name: str, gain: float
) -> list[float]:
    """Common picks as a share of all, so that their number is corrected elsewhere."""
    shares = [
        (np.array(getattr(one, name)) + 0.01) / (np.mean(one.far_picks, axis=1) + 0.01)
        for one in (fit, trial)
    ]
    nudge = np.clip(shares[0] / shares[1], 0.5, 2) ** gain
    nudged: list[float] = (np.array(aim) * nudge).tolist()
    return nudged


def _levels(
    aim: AttentionFit, fit: AttentionFit, trial: AttentionFit, gain: float
) -> list[list[list[Level]]]:
    picks = [np.array(one.far_picks) + 0.2 for one in (fit, trial)]
    more = np.clip(picks[0] / picks[1], 0.5, 2) ** gain
    odds = [np.clip(one.sink_mass, 1e-3, 0.999) for one in (fit, trial)]
    heavier = gain * (np.log(odds[0] / (1 - odds[0])) - np.log(odds[1] / (1 - odds[1])))
    return [
        [
            _shifted(head, float(more[layer, number]), float(heavier[layer]))
            for number, head in enumerate(heads)
        ]
        for layer, heads in enumerate(aim.levels)
    ]


def _shifted(classes: list[Level], more: float, heavier: float) -> list[Level]:
    """Far classes with so many times more blocks at each level, the sink with more mass."""
    shifted = list(classes)
    for number in range(FAR_CLASSES.start, FAR_CLASSES.stop):
        level = classes[number]
        shifted[number] = msgspec.structs.replace(
            level, share=level.share * more, share_above=level.share_above * more
        )
    sink = classes[SINK]
    shifted[SINK] = msgspec.structs.replace(
        sink, level=sink.level + heavier, level_above=sink.level_above + heavier
    )
    return shifted
