"""Which blocks are worth writing: all of them, or those whose key comes a second time.

Decides by keys alone. Most blocks of a conversation trace are never read again; writing only what
has been put before spares the drive those, at the price of one more miss for the others.
"""

from __future__ import annotations

ADMISSIONS = ("all", "second-touch")


class Admission:
    """`window`: how many refused keys are remembered, oldest forgotten first."""

    def __init__(self, policy: str, window: int) -> None:
        self._all = policy == "all"
        self._window = window
        self._ghosts: dict[bytes, None] = {}
        self.refused = 0

    def admits(self, key: bytes) -> bool:
        """Asked once for each block that is put and not there."""
        if self._all:
            return True
        if key in self._ghosts:
            del self._ghosts[key]
            return True
        self._ghosts[key] = None
        if len(self._ghosts) > self._window:
            del self._ghosts[next(iter(self._ghosts))]
        self.refused += 1
        return False
