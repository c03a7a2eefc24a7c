"""Demands as turns of layers: which pages belong to which turn.

Decides how an array of pages is cut where the layer changes. Knows nothing of what is learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefetchd.model import Geometry, Ids


@dataclass(frozen=True, slots=True)
class Turns:
    """Demands of one layer each, one after the other, no layer twice.

    `blocks` (int64) of all pages demanded, and `which` (int64): the number of the turn that each
    belongs to, never falling. One entry a turn (int64): `layers`, and where its pages start in
    `blocks` and how many they are.
    """

    blocks: Ids
    which: Ids
    layers: Ids
    starts: Ids
    counts: Ids

    def __len__(self) -> int:
        return len(self.layers)

    def each(self) -> Iterator[tuple[int, Ids]]:
        """Layer and blocks of one turn after the other."""
        starts = self.starts.tolist()
        ends = [*starts[1:], len(self.blocks)]
        for layer, start, end in zip(self.layers.tolist(), starts, ends, strict=True):
            yield layer, self.blocks[start:end]


def turns_of(pages: Ids, geometry: Geometry) -> list[tuple[Turns, Ids | slice]]:
    """All of `pages` as turns, and which of the pages these are: one entry, or none.

    In the order given, unless a layer comes in pieces: then in rising order of layers.
    """
    if len(pages) == 0:
        return []
    blocks = geometry.block_of(pages)
    of_page = pages - blocks * geometry.layers
    turns = _cut(blocks, of_page)
    if len(set(turns.layers.tolist())) == len(turns):
        return [(turns, slice(None))]
    order = of_page.argsort(kind="stable")
    return [(_cut(blocks[order], of_page[order]), order)]


def _cut(blocks: Ids, of_page: Ids) -> Turns:
    """A turn wherever the layer, `of_page`, changes."""
    (changes,) = (of_page[1:] != of_page[:-1]).nonzero()
    starts = np.zeros(len(changes) + 1, np.int64)
    starts[1:] = changes + 1
    counts = np.empty_like(starts)
    counts[:-1], counts[-1] = starts[1:], len(of_page)
    counts -= starts
    which = np.arange(len(starts)).repeat(counts)
    return Turns(blocks, which, of_page[starts], starts, counts)


def one_turn(pages: Ids, geometry: Geometry) -> tuple[int, Ids] | None:
    """Layer and blocks of `pages`, if these are of one layer and there are any."""
    if len(pages) == 0 or int(pages[0] - pages[-1]) % geometry.layers:
        return None
    blocks = pages // geometry.layers
    of_page = pages - blocks * geometry.layers
    layer = int(of_page[0])
    return (layer, blocks) if (of_page == layer).all() else None
