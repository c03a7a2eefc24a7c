"""Draws the scores of all heads of a synthetic decode, a step at a time, in bounded memory.

Decides how the process of `synth_model` is drawn with numpy: which block a column of scores stands
for, what is redrawn when. Knows neither the fit nor the trace that it is for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.lab.synth_levels import (
    CLASSES,
    FAR_BLOCKS,
    FAR_CLASSES,
    SINK,
    classify,
)
from prefetchd.lab.synth_model import MEMORIES, Model, offsets, spike_floor, survivals
from prefetchd.model import Mask

_SPIKES_LEAST = 2.0  # lower spikes than this are picked by no head, and are not drawn
_UNSEEN = np.float32(-1e3)
_ABSENT_LEVEL = -1e6

Floats = NDArray[np.float64]
Single = NDArray[np.float32]
Half = NDArray[np.float16]
Blocks = NDArray[np.int64]


class Heads:
    """Scores are [layer, head, column]. Column 0 is block 0; the others stand for a block each.

    With as many columns as there will be blocks, column = block. With fewer, a far column stands
    for one block of a stretch of the context, its own for every layer and head, and a new block
    takes the next column in turn. `classes`: mean blocks of each class in the fitted trace.
    """

    def __init__(
        self,
        model: Model,
        *,
        classes: Floats,
        row_mass: Floats,
        columns: int,
        frontier: int,
        random: np.random.Generator,
    ) -> None:
        self._model, self._random = model, random
        self._classes_fitted, self._row_mass = classes, row_mass
        self._frontier, self._next = frontier, 1
        layers, heads = model.share.shape[:2]
        self._size = (layers, heads, columns)
        deviations = np.sqrt(model.drift).T[:, :, None, None]  # [memory, layer, 1, 1]
        sharing = model.sharing[:, None, None]
        self._own_deviations = (deviations * np.sqrt(1 - sharing)).astype(np.float32)
        self._shared_deviations = (deviations * np.sqrt(sharing)).astype(np.float32)
        self._survival = survivals(model)
        self._spike_floor = spike_floor(model).astype(np.float32)
        self._own = self._normal((len(MEMORIES), *self._size))
        self._shared = self._normal((len(MEMORIES), layers, 1, columns))
        self._noise = self._normal(self._size)
        self._blind = self._draw_blind()
        self._scores = self._salience = np.zeros(self._size, np.float32)
        self._stretches = _stretches(columns, frontier)  # empty: columns are blocks
        far = len(self._stretches) - 1
        self._blocks = np.arange(columns)  # of each column, or the first of its stretch
        if far > 0:
            self._blocks[1 : 1 + far] = self._stretches[:-1]
            self._blocks[1 + far :] += frontier + 1 - columns
        self._ids = np.broadcast_to(self._blocks, self._size).copy()
        self._stale: tuple[Blocks, Single] | None = None
        self._place(np.arange(columns))

    def advance(self, frontier: int) -> None:
        """Everything drifts by a step, at which `frontier` is the newest block."""
        if frontier != self._frontier:
            self._frontier = frontier
            if frontier >= self._size[2]:
                self._reuse_column()
            self._classify()
        for part, memory in enumerate(MEMORIES):
            fresh = 1.0 if memory == 0 else -float(np.expm1(-1 / memory))
            self._redraw(self._own[part], fresh)
            self._redraw(self._shared[part], fresh)
        fresh = self._model.hint_fresh
        self._redraw(self._noise, fresh)
        again = self._random.random(self._size, dtype=np.float32) < fresh
        self._blind = np.where(again, self._draw_blind(), self._blind)
        self._scores = self._drawn_scores()

    def jump(self, *, keep_hints: bool) -> None:
        """All heads turn to other far blocks; hints may go on telling of the ones before."""
        if keep_hints:
            self._stale = (self._ids.copy(), self._scores)
        kinds = classify(self._blocks, self._frontier)
        far = np.flatnonzero((kinds >= FAR_CLASSES.start) & (kinds < SINK))
        self._own[..., far] = self._normal((*self._own.shape[:-1], len(far)))
        self._shared[..., far] = self._normal((*self._shared.shape[:-1], len(far)))
        self._place(far)

    def picks(self, ranks: int) -> tuple[Blocks, Half]:
        """The heaviest blocks and their masses, [layer, head, rank]."""
        return self._heaviest(self._ids, self._offset + self._scale * self._scores, ranks)

    def hints(self, ranks: int) -> tuple[Blocks, Half]:
        """What is foreseen of `picks` one layer ahead; of layer 0 nothing, with no mass."""
        ids, scores = self._stale or (self._ids, self._scores)
        noise = self._noise * self._model.hint_noise[:, None, None].astype(np.float32)
        noise += self._is_far * self._model.hint_bias[:, None, None].astype(np.float32)
        levels = self._offset + self._scale * (scores + noise)
        levels = np.where(self._blind & self._is_far, _UNSEEN, levels)
        ids, mass = self._heaviest(ids, levels, ranks)
        ids[0], mass[0] = np.arange(ranks), 0
        return ids, mass

    def _place(self, columns: Blocks) -> None:
        """Draw salience anew for the columns and, where they are candidates, their blocks.

        Saliences are spread evenly over every run of blocks, so that how many of them a layer
        picks depends little on the seed.
        """
        below = _saliences(len(columns), self._random), self._candidates(columns)
        salience = np.array(self._salience)
        for layer in range(self._size[0]):
            below = self._renewed(below, self._model.layer_fresh[layer], columns)
            for head in range(self._size[1]):
                own = self._renewed(below, self._model.head_fresh[layer], columns)
                salience[layer, head, columns], self._ids[layer, head, columns] = own
        salience[..., 0] = np.log(2)  # block 0 is a class of its own, and always the median of it
        self._salience = salience
        self._classify()

    def _renewed(
        self, one: tuple[Floats, Blocks], chance: float, columns: Blocks
    ) -> tuple[Floats, Blocks]:
        """Of each column with that chance another block with another salience."""
        fresh = self._random.random(len(columns)) < chance
        if not fresh.any():
            return one
        other = _saliences(len(columns), self._random), self._candidates(columns)
        return np.where(fresh, other[0], one[0]), np.where(fresh, other[1], one[1])

    def _candidates(self, columns: Blocks) -> Blocks:
        """A block for each column: any of its stretch if it has one."""
        blocks = self._blocks[columns]
        stretch = columns - 1
        is_far = (stretch >= 0) & (stretch < len(self._stretches) - 1)
        is_far &= blocks <= self._frontier - FAR_BLOCKS
        if is_far.any():
            stretch = stretch[is_far]
            starts, ends = self._stretches[stretch], self._stretches[stretch + 1]
            drawn = self._random.random(len(stretch)) * (ends - starts)
            blocks[is_far] = starts + drawn.astype(np.int64)
        return blocks

    def _reuse_column(self) -> None:
        """The newest block takes the column of an old candidate."""
        column = self._next
        self._next = self._next % (self._size[2] - 1) + 1
        self._blocks[column] = self._ids[:, :, column] = self._frontier
        self._salience[:, :, column] = self._random.exponential(size=(self._size[0], 1))
        self._own[..., column] = self._normal(self._own.shape[:-1])
        self._shared[..., column] = self._normal(self._shared.shape[:-1])

    def _classify(self) -> None:
        """Blocks have grown older: which offset and scale each column has."""
        kinds = classify(self._blocks, self._frontier)
        counts = np.bincount(kinds, minlength=CLASSES + 1)[:CLASSES]
        crowd = np.ones(CLASSES)
        more = np.maximum(counts, 1) / np.maximum(self._classes_fitted, 1)
        crowd[FAR_CLASSES] = more[FAR_CLASSES]
        offset, scale = offsets(self._model, self._survival, crowd)
        absent = np.full((*offset.shape[:2], 1), _ABSENT_LEVEL)
        self._offset = np.concatenate([offset, absent], 2)[:, :, kinds].astype(np.float32)
        self._scale = np.concatenate([scale, 0 * absent], 2)[:, :, kinds].astype(np.float32)
        self._is_far = (kinds >= FAR_CLASSES.start) & (kinds < SINK)

    def _drawn_scores(self) -> Single:
        shared = (self._shared * self._shared_deviations).sum(0)
        scores: Single = self._salience + shared
        for part, deviation in zip(self._own, self._own_deviations, strict=True):
            scores += part * deviation
        self._add_spikes(scores)
        return scores

    def _add_spikes(self, scores: Single) -> None:
        count = self._random.poisson(scores.size * np.exp(-_SPIKES_LEAST))
        where = self._random.integers(0, scores.size, count)
        layer = where // (scores.size // len(scores))
        height = _SPIKES_LEAST + self._random.standard_exponential(count, dtype=np.float32)
        height += self._spike_floor[layer]
        height[~self._is_far[where % self._size[2]]] = _UNSEEN
        flat = scores.reshape(-1)
        flat[where] = np.maximum(flat[where], height)

    def _redraw(self, values: Single, share: float) -> None:
        """Draw that share of values anew, whichever they are."""
        flat = values.reshape(-1)
        if share >= 1:
            self._random.standard_normal(out=flat, dtype=np.float32)
            return
        where = np.flatnonzero(self._random.random(len(flat), dtype=np.float32) < share)
        flat[where] = self._normal((len(where),))

    def _normal(self, size: tuple[int, ...]) -> Single:
        return self._random.standard_normal(size, dtype=np.float32)

    def _draw_blind(self) -> Mask:
        chance = self._model.hint_blind[:, None, None]
        return self._random.random(self._size, dtype=np.float32) < chance

    def _heaviest(self, ids: Blocks, levels: Single, ranks: int) -> tuple[Blocks, Half]:
        top = np.argpartition(levels, -ranks, axis=2)[..., -ranks:]
        found = np.take_along_axis(levels, top, 2)
        order = np.argsort(-found, axis=2, kind="stable")
        top, found = np.take_along_axis(top, order, 2), np.take_along_axis(found, order, 2)
        known = self._model.bent.shape[1]
        bent = self._model.bent[:, np.minimum(np.arange(ranks), known - 1)].astype(np.float32)
        mass = np.exp(found - found[..., :1] + bent[:, None])
        mass = np.minimum.accumulate(mass, axis=2)
        mass *= (self._row_mass[:, None] / mass.sum(2))[..., None]
        return np.take_along_axis(ids, top, 2), mass.astype(np.float16)


def _stretches(columns: int, frontier: int) -> Blocks:
    """Where the far columns' stretches of the context begin, and the last one's end."""
    near = FAR_BLOCKS + 1
    if columns > frontier:
        return np.zeros(0, np.int64)
    return 1 + np.linspace(0, frontier - near, columns - near).astype(np.int64)


def _saliences(count: int, random: np.random.Generator) -> Floats:
    """Exponential saliences of blocks in order, of which every aligned run of 2**n has one in each
    2**n-th of the distribution: a van der Corput sequence, its digits flipped at random as in Owen,
    "Randomly permuted (t, m, s)-nets and (t, s)-sequences" (1995).
    """
    index, digits = np.arange(count), count.bit_length()
    shares = random.random(count) * 0.5**digits
    for digit in range(digits):
        flips = random.integers(0, 2, 1 << digit)
        flipped = (index >> digit & 1) ^ flips[index & ((1 << digit) - 1)]
        shares += flipped * 0.5 ** (digit + 1)
    return -np.log1p(-shares)
