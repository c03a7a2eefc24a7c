"""How long decisions take: too long to be made in a thread that others wait for?

Decides from what most of the last ones took. Reads no clock.
"""

from __future__ import annotations

_LONG_NS = 1_000_000
_SCORE_MAX = 16


class Pace:
    def __init__(self) -> None:
        self._score = 0

    def note(self, spent_ns: int) -> None:
        step = 1 if spent_ns > _LONG_NS else -1
        self._score = min(_SCORE_MAX, max(0, self._score + step))

    @property
    def slow(self) -> bool:
        """Whether most of the last decisions took longer than a millisecond."""
        return 2 * self._score > _SCORE_MAX
