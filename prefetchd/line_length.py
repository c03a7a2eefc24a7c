"""How many victims are lined up ahead of their need, and when others are chosen instead.

Decides it from how many slots there are and how many a turn takes: to choose is to weigh all pages,
and what was chosen long ago may not be the worst any more. Knows neither slots nor pages.
"""

from __future__ import annotations

VICTIMS, VICTIMS_SHARE = 32, 1 / 256
FEW_MIN, FEW_SHARE = 16, 1 / 64  # of few slots, many ahead would be stale
TURNS = 20  # as many as so many turns take, where that is more
MANY_SLOTS, MANY_SHARE = 16384, 1 / 64  # yet no more than this share of what is beyond
PACE_TURNS = 8


class LineLength:
    def __init__(self, slots: int) -> None:
        self._few = int(slots * VICTIMS_SHARE)  # used so far, they say that others may be worse
        self._least = max(min(VICTIMS, int(slots * FEW_SHARE)), FEW_MIN, self._few)
        self._most = int(max(0, slots - MANY_SLOTS) * MANY_SHARE)
        self._taken, self._pace = 0, 0.0  # slots since the last turn, and in a turn
        self._lined_up = 0
        self.wanted = self._least
        """How many are to be lined up."""

    def took(self, count: int) -> None:
        """So many slots were given to pages."""
        self._taken += count

    def turn(self) -> None:
        """A turn in which some were taken is over, perhaps."""
        if self._taken:
            self._pace += (self._taken - self._pace) / PACE_TURNS
            self._taken = 0

    def chosen(self, count: int) -> None:
        self._lined_up = count
        self.wanted = max(self._least, min(int(TURNS * self._pace), self._most))

    def stale(self, left: int) -> bool:
        """Whether of so many that are left others may be worse."""
        enough = self._few if self.wanted == self._least else self.wanted // 2
        return self._lined_up - left >= enough
