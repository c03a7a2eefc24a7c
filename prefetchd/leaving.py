"""Pages that are not kept once their readers have gone: those of passes over everything.

Decides when such a page leaves staging: at once, or if it is still on its way, when it has come.
Refuses to know which pages those are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.masks import every
from prefetchd.model import Slots
from prefetchd.staging import READING, READY, Staging


class Leaving:
    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        # Of the reads that end in vain, slot by slot; a later read has another. None until there
        # is one: most runtimes never have any.
        self._generation: NDArray[np.int64] | None = None

    def drop(self, slots: Slots) -> None:
        """Free those of these slots that nobody reads, as soon as they are readable."""
        if len(slots) == 0:
            return
        staging = self._staging
        slots = slots[staging.pins[slots] == 0]
        ready = staging.state[slots] == READY
        if not every(ready):
            coming = slots[staging.state[slots] == READING]
            if self._generation is None:
                self._generation = np.full(staging.slots, -1, np.int64)
            self._generation[coming] = staging.generation[coming]
            slots = slots[ready]
        staging.free(slots)

    def arrived(self, slots: Slots) -> None:
        """These have become readable. One that is read again by now stays."""
        generation = self._generation
        if generation is None:
            return
        self.drop(slots[generation[slots] == self._staging.generation[slots]])
        generation[slots] = -1
