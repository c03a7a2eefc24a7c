"""How heavily blocks of each age are attended to, relative to the edge of being picked.

Decides the classes of age and reads two points of each class's distribution, which is all that
a generator needs of it. A block's level is the logarithm of its mass over the mass of the head's
`top_k`-th block at the same step, so that a level above 0 is a pick whatever the head.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.attention import AttentionTrace

# Ages in blocks where a class of near blocks begins; the far classes begin at shares of the far
# part of the context, so that they stretch with it.
_NEAR = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
FAR_BLOCKS = 64
_FAR = (0.0, 0.125, 0.25, 0.5)
SINK = len(_NEAR) + len(_FAR)  # block 0
CLASSES = SINK + 1
ABSENT = CLASSES  # not written yet
FAR_CLASSES = slice(len(_NEAR), SINK)
_FEW = 8  # picks: fewer show no distribution

Ages = NDArray[np.int64]


class Level(msgspec.Struct, frozen=True, array_like=True):
    """Two points of a class's distribution of levels: share of blocks at or above each level.

    `share` 0: no block of the class was ever recorded.
    """

    share: float
    level: float
    share_above: float
    level_above: float


def classify(blocks: Ages, frontier: Ages | int) -> Ages:
    """The class of each block at the step whose newest block is `frontier`."""
    age = frontier - blocks
    depth = (age - FAR_BLOCKS) / np.maximum(np.asarray(frontier) - FAR_BLOCKS, 1)
    far = len(_NEAR) - 1 + np.searchsorted(_FAR, depth, side="right")
    near = np.searchsorted(_NEAR, age, side="right") - 1
    found = np.where(age >= FAR_BLOCKS, far, near)
    return np.where(age < 0, ABSENT, np.where(blocks == 0, SINK, found))


def block_classes(trace: AttentionTrace, frontiers: Ages) -> Ages:
    """Class of every recorded block: [step, layer, KV head, rank]."""
    return classify(trace.block_ids.astype(np.int64), frontiers[:, None, None, None])


def class_sizes(trace: AttentionTrace, frontiers: Ages) -> NDArray[np.float64]:
    """Mean blocks of each class over the steps, recorded or not."""
    sizes = np.zeros(CLASSES + 1)
    for frontier, steps in zip(*np.unique(frontiers, return_counts=True), strict=True):
        found = classify(np.arange(frontier + 1), int(frontier))
        sizes += steps * np.bincount(found, minlength=CLASSES + 1)
    return sizes[:CLASSES] / len(frontiers)


def levels(trace: AttentionTrace, classes: Ages, top_k: int) -> list[list[list[Level]]]:
    """[layer][head][class]."""
    frontiers = np.array([trace.frontier(step) for step in range(trace.steps)], np.int64)
    sizes = class_sizes(trace, frontiers) * trace.steps
    mass = np.log(np.maximum(trace.mass.astype(np.float64), np.finfo(np.float16).tiny))
    level = mass - mass[..., top_k - 1 : top_k]
    _, layers, heads, _ = classes.shape
    return [
        [_head_levels(level[:, x, y], classes[:, x, y], sizes) for y in range(heads)]
        for x in range(layers)
    ]


def _head_levels(
    level: NDArray[np.float64], classes: Ages, sizes: NDArray[np.float64]
) -> list[Level]:
    return [_level(np.sort(level[classes == x])[::-1], sizes[x]) for x in range(CLASSES)]


def _level(falling: NDArray[np.float64], blocks: float) -> Level:
    """Two points: the edge of being picked, or where it tells nothing the median or the last."""
    if not len(falling):
        return Level(0.0, 0.0, 0.0, 0.0)
    picked = int((falling >= 0).sum())
    point, level = picked, 0.0
    if picked > 0.9 * blocks:
        point = max(1, int(blocks / 2))
        level = float(falling[point - 1])
    elif picked < _FEW:
        point = len(falling)
        level = float(falling[-1])
    above = max(1, point // 4)
    return Level(
        share=float(min(point / blocks, 0.98)),
        level=level,
        share_above=float(min(above / blocks, 0.97)),
        level_above=float(falling[above - 1]),
    )
