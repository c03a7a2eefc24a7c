"""Blocks that are gone and of which the medium could not be told so.

Decides how often that is tried. Knows no device and no clock.
"""

from __future__ import annotations

_TRIES = 3


class Stuck:
    """A drive may fail now and then, so there are a few tries each; after them the extent stays out
    of use until its file, given up meanwhile, is back."""

    def __init__(self) -> None:
        self._tries: dict[int, int] = {}

    def again(self, block: int) -> bool:
        """It failed: whether to try again at once."""
        self._tries[block] = self._tries.get(block, 0) + 1
        return self._tries[block] < _TRIES

    def forget(self, block: int) -> None:
        self._tries.pop(block, None)

    def take(self, file: int, stripes: int) -> list[int]:
        """Those of a file that are not tried any more, to be tried anew."""
        given_up = [block for block, tries in self._tries.items() if tries >= _TRIES]
        taken = [block for block in given_up if block % stripes == file]
        for block in taken:
            del self._tries[block]
        return taken
