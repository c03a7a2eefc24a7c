"""Free extents of a store, and the paths of which none is to be given out.

Decides the order in which extents are used. Refuses to know what lies in the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from prefetchd.model import Ids, Mask


class FreeExtents:
    """Extent b lies on path b % stripes."""

    def __init__(self, free: Ids, stripes: int) -> None:
        self._stripes = stripes
        self._free: list[int] = free[::-1].tolist()  # a stack
        self._parked: list[int] = []  # on paths that are barred
        self.barred: set[int] = set()

    def __bool__(self) -> bool:
        """Whether `take` would give one."""
        return bool(self._free)

    def __len__(self) -> int:
        return len(self._free) + len(self._parked)

    def __iter__(self) -> Iterator[int]:
        yield from self._free
        yield from self._parked

    def outside(self, paths: Sequence[int]) -> int:
        """How many `take` would give if none of these paths gave any."""
        free = np.array(self._free, np.int64)
        return int(np.count_nonzero(~np.isin(free % self._stripes, paths)))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, extent: int) -> None:
        parked = self.barred and extent % self._stripes in self.barred
        (self._parked if parked else self._free).append(extent)

    def bar(self, path: int) -> None:
        self.barred.add(path)
        self._sort()

    def unbar(self, path: int) -> None:
        self.barred.discard(path)
        self._sort()

    def _sort(self) -> None:
        free = np.array([*self._parked, *self._free], np.int64)
        shut = np.isin(free % self._stripes, sorted(self.barred))
        self._free, self._parked = free[~shut].tolist(), free[shut].tolist()


def of_path(blocks: Mask, path: int, stripes: int) -> Ids:
    """The numbers of those blocks that lie on this path."""
    numbers: Ids = np.flatnonzero(blocks[path::stripes]) * stripes + path
    return numbers
