"""Puts beside one another: which may begin now, and which gives up when together they have no room.

What a put has stored is held until it ends, so puts that each fit can fill a store together and
never end. So they begin in order, as many at once as the store has room for together. Where what
others read leaves less room than that, the youngest gives way. Decides nothing about one put alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prefetchd.catalog import Catalog
from prefetchd.tickets import PutTicket


class Turns:
    """`putting`: the puts that have not ended, by numbers that rise. All methods are called under
    the engine's lock."""

    def __init__(self, putting: Mapping[int, PutTicket], catalog: Catalog, *, evicts: bool) -> None:
        self._putting = putting
        self._catalog = catalog
        self._evicts = evicts
        self._stuck: set[int] = set()

    def may_begin(self, put: int) -> bool:
        """Whether it has room beside all that came before it."""
        if not self._evicts:
            return True  # no end of another would make room
        before = sum(len(other.blocks_so_far) for n, other in self._putting.items() if n < put)
        own = len(self._putting[put].blocks_so_far)
        most = min(self._catalog.blocks_max, self._catalog.mine_max)
        return before == 0 or before + own <= most

    def stored(self, put: int) -> int:
        """How many blocks are held for it."""
        return int(np.count_nonzero(self._putting[put].blocks_so_far >= 0))

    def stored_by_others(self, put: int) -> int:
        return sum(self.stored(other) for other in self._putting if other != put)

    def waits(self, put: int) -> bool:
        """Whether a put for which nothing can be evicted waits for the others to end.

        Not if they hold nothing, nor if all of them wait as well and it is the youngest of those
        that hold something: its end is what makes room for them.
        """
        others = {n for n in self._putting if n != put and self.stored(n)}
        if not self._evicts or not others:
            return False
        self._stuck.add(put)
        return not (others <= self._stuck and self.stored(put) and put > max(others))

    def goes_on(self, put: int) -> None:
        """It waits no more: it has room, or has given up."""
        self._stuck.discard(put)
