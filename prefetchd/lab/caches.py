"""How often a policy finds blocks in staging, over a recorded stream of uses and nothing else.

Decides only in what order the core's own staging and policy are told of each use, so that nothing
here can differ from what runs in production but the moment of telling: a policy hears of a demand
before room is made for it, as published algorithms do, and the core tells it afterwards. Knows no
time, device or predictor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefetchd.eviction import EVICTIONS
from prefetchd.foresight import RESTS
from prefetchd.lab.requests import Requests
from prefetchd.model import Geometry, Ids, IoClass, Mask
from prefetchd.staging import READY, Staging


class BlockCache:
    """Staging of `slots` whole blocks (one page each) under an eviction policy, empty at first."""

    def __init__(self, policy: str, slots: int, blocks: int) -> None:
        geometry = Geometry(1, blocks)
        self._policy = EVICTIONS[policy](slots, geometry)
        self._staging = Staging(slots, geometry, self._policy)

    def demand(self, blocks: Ids) -> Mask:
        """Use distinct blocks together; which of them (bool, one a block) were here. All are now.

        Raises ValueError for more of them than there are slots.
        """
        staging = self._staging
        if len(blocks) > staging.slots:
            raise ValueError(f"{len(blocks)} blocks demanded of {staging.slots} slots")
        slots = staging.slot_of[blocks]
        here: Mask = slots >= 0
        self._policy.demanded(blocks, None)
        if not here.all():
            staging.pins[slots[here]] += 1
            self._place(blocks[~here], IoClass.DEMAND)
            staging.pins[slots[here]] -= 1
        staging.tell()
        self._policy.touched(staging.slot_of[blocks].astype(np.int64), blocks, None)
        return here

    def here(self, blocks: Ids) -> Mask:
        """Which of these are (bool, one a block)."""
        mask: Mask = self._staging.slot_of[blocks] >= 0
        return mask

    def bring(self, blocks: Ids) -> None:
        """Put distinct blocks that are not here, as far as there is room."""
        self._place(blocks[: self._staging.slots], IoClass.WRITE_BACK)
        self._staging.tell()

    def ended(self, blocks: Ids, *, rests: bool = False) -> None:
        """A request over these blocks, in prefix order, is over and may be back, after a rest."""
        slots = self._staging.slot_of[blocks[::-1]].astype(np.int64)
        (self._policy.rests if rests else self._policy.returns)(slots[slots >= 0])

    def _place(self, blocks: Ids, io_class: IoClass) -> None:
        slots, _ = self._staging.place(blocks, io_class)
        self._staging.state[slots] = READY


def single_hits(policy: str, blocks: Ids, slots: int) -> Mask:
    """Which uses (bool, one a use) of this stream of blocks, one at a time, find their block.

    A block that is absent is read in its place. This is the hit rate of the literature.
    """
    cache = BlockCache(policy, slots, int(blocks.max(initial=0)) + 1)
    found = [cache.demand(blocks[use : use + 1]) for use in range(len(blocks))]
    return np.concatenate([np.zeros(0, np.bool_), *found])


def restore_hits(policy: str, requests: Requests, slots: int) -> NDArray[np.int64]:
    """How many blocks each request (int64) finds, requests one after another as in `restore`.

    Of a request what an earlier one had is demanded together, the rest is put; at its end it is
    said to be back. The store forgets nothing.
    """
    cache = BlockCache(policy, slots, requests.distinct)
    reusable = requests.reusable()
    hits = np.zeros(len(requests), np.int64)
    for number in range(len(requests)):
        chain, known = requests.chain(number), int(reusable[number])
        hits[number] = np.count_nonzero(cache.demand(chain[:known]))
        cache.bring(chain[known:])
        cache.ended(chain, rests=requests.stops[number] in RESTS)
    return hits
