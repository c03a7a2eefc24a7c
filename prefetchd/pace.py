"""How long decisions take: too long to be made in a thread that others wait for?

Decides from the time that the last ones took. Reads no clock.
"""

from __future__ import annotations

_LONG_NS = 1_000_000
_SCORE_MAX, _STEP_MAX = 16, 8


class Pace:
    def __init__(self) -> None:
        self._score = 0

    def note(self, spent_ns: int) -> None:
        # By time and not by number: after each long decision may come a short one.
        step = min(spent_ns // _LONG_NS, _STEP_MAX) or -1
        self._score = min(_SCORE_MAX, max(0, self._score + step))

    @property
    def slow(self) -> bool:
        """Whether the last decisions took well over a millisecond each, or some of them many."""
        return 2 * self._score > _SCORE_MAX
