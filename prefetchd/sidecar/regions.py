"""Who has which part of a write arena. Decides places only; knows neither bytes nor sockets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Region:
    start: int
    end: int
    free: bool = False


class Regions:
    """A ring: what was given out first is the first to be used again."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._given: list[_Region] = []

    def take(self, length: int) -> int | None:
        """Where `length` bytes are free; None if they are not."""
        given = self._given
        if not given:
            start = 0 if length <= self.size_bytes else None
        else:
            first, last = given[0].start, given[-1].end
            if last > first or length == 0:  # free: behind the last, and before the first
                start = last if length <= self.size_bytes - last else None
                if start is None and length <= first:
                    start = 0
            else:
                start = last if length <= first - last else None
        if start is not None:
            given.append(_Region(start, start + length))
        return start

    def give_back(self, start: int) -> None:
        region = next(one for one in self._given if one.start == start and not one.free)
        region.free = True
        while self._given and self._given[0].free:
            self._given.pop(0)
