"""Advice from a running engine: what it knows of blocks and of its device, asked in one moment.

Decides which blocks can be had at all. What is advised is `advice`'s to decide.
"""

from __future__ import annotations

import numpy as np

from prefetchd.advice import Advice, Prefill, advise
from prefetchd.assembly import Parts
from prefetchd.engine import Engine
from prefetchd.model import Geometry, Ids
from prefetchd.staging import READY


class Advising:
    engine: Engine
    geometry: Geometry
    _parts: Parts

    def advise(
        self,
        blocks: Ids,
        *,
        prefill_tokens_s: float,
        block_tokens: int = 16,
        pairs_s: float | None = None,
    ) -> Advice:
        """Whether to load a prefix, recompute it, or load its first blocks: see `Advice`.

        `blocks` (int64) are those of a prefix, from its beginning, as `find` gives them;
        `prefill_tokens_s` and `pairs_s` are what the caller's model computes, see `Prefill`. Reads
        are timed as they happen; what was not measured is not estimated. A block that has gone, or
        lies on a path that has failed, ends the prefix.
        Raises ValueError, and EngineError when stopped.
        """
        prefill = Prefill(prefill_tokens_s, block_tokens, pairs_s)
        blocks = np.asarray(blocks, np.int64)
        if blocks.ndim != 1 or ((blocks < 0) | (blocks >= self.geometry.blocks)).any():
            raise ValueError(f"blocks are a 1-d array of indices below {self.geometry.blocks}")
        with self.engine.lock:
            self.engine.check()
            core = self._parts.core
            blocks = self._to_be_had(blocks)
            slots = core.staging.slot_of.reshape(-1, self.geometry.layers)[blocks]
            here = slots >= 0
            on_the_way = here & (core.staging.state[slots] != READY)
            absent = self.geometry.layers - np.count_nonzero(here, axis=1)
            reads = core.reads
            rate = reads.meter.rate(self.engine.clock())
            ahead = reads.in_flight
        return advise(absent.astype(np.int64), on_the_way.any(axis=1), ahead, rate, prefill)

    def _to_be_had(self, blocks: Ids) -> Ids:
        """The longest prefix of them that is stored where it can be read."""
        catalog, paths = self._parts.catalog, self._parts.driver.paths
        there = catalog.index.stored(blocks)
        if paths.down:
            there &= ~paths.unreadable[catalog.superblock.files(blocks)]
        gone = np.flatnonzero(~there)
        return blocks[: gone[0]] if len(gone) else blocks
