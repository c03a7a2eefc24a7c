"""The table of a fit: what was measured of a trace and, beside it, of a decode made like it.

Decides which measures stand in it and their words. Computes nothing but means.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from rich import box
from rich.table import Table

from prefetchd.lab.synth_fit import LAGS, AttentionFit

Row = tuple[str, Callable[[AttentionFit], float]]

_AT_LAGS: tuple[tuple[str, Callable[[AttentionFit], list[float]]], ...] = (
    ("needed set as {} steps before", lambda fit: fit.needed_overlap),
    ("far picks as {} steps before", lambda fit: fit.far_overlap),
    ("far picks seen in the last {} steps", lambda fit: fit.recent),
)


def _at(get: Callable[[AttentionFit], list[float]], index: int) -> Callable[[AttentionFit], float]:
    return lambda fit: get(fit)[index]


MEASURES: tuple[Row, ...] = (
    *((words.format(lag), _at(get, i)) for words, get in _AT_LAGS for i, lag in enumerate(LAGS)),
    ("far picks never seen before", lambda fit: fit.never),
    ("far picks as the layer below", lambda fit: fit.layer_overlap),
    (
        "far picks as another head",
        lambda fit: float(np.sum(fit.head_shared) / max(np.mean(fit.far_picks, 1).sum(), 1e-9)),
    ),
    ("far of all picks", lambda fit: fit.far_share),
    ("mass of block 0", lambda fit: float(np.mean(fit.sink_mass))),
    ("mass of the last 64 blocks", lambda fit: float(np.mean(fit.window_mass))),
    ("mass of the heaviest block", lambda fit: float(np.mean(fit.mass_by_rank, 0)[0])),
    ("mass of the 8th", lambda fit: float(np.mean(fit.mass_by_rank, 0)[:8][-1])),
    ("hints' recall at k", lambda fit: fit.hint_recall[0]),
    ("hints' recall at 2k", lambda fit: fit.hint_recall[1]),
    ("hints' precision at k", lambda fit: fit.hint_precision[0]),
    ("hints' precision at 2k", lambda fit: fit.hint_precision[1]),
)
"""Shares, all of them: in words, and how a fit tells them."""


def fit_table(fit: AttentionFit, made: AttentionFit | None = None) -> Table:
    """Percentages; far means neither block 0 nor one of the last 64."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{fit.origin}: top-{fit.top_k}, {fit.layers} layers, {fit.steps} steps",
        title_justify="left",
        show_edge=False,
    )
    table.add_column("share of")
    table.add_column("fitted %", justify="right")
    if made is not None:
        table.add_column("SYNTHETIC %", justify="right")
    for words, get in MEASURES:
        if fit.hint_ranks or "hint" not in words:
            told = [get(one) for one in (fit, made) if one is not None]
            table.add_row(words, *(f"{100 * value:.1f}" for value in told))
    return table
