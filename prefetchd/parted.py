"""Slots that are read by the books, without a demand: see `prefetchd.books`.

Decides that such a slot is used for nothing else before it has been read, and that it is kept apart
if its page had to go meanwhile. Refuses to know pages.
"""

from __future__ import annotations

import numpy as np

from prefetchd.books import Readers
from prefetchd.model import NO_IDS, Mask, Slots, some


class Parted:
    """`readers` None: nobody reads so."""

    def __init__(self) -> None:
        self.readers: Readers | None = None
        self.slots = NO_IDS
        """Those whose pages have gone while somebody reads them."""

    def held(self, pins: Mask, slots: Slots | None) -> Mask:
        """Which of these slots (None: of all) are pinned, or read so. Changes `pins`."""
        if self.readers is not None:
            pins |= self.readers.reading(slots)
        return pins

    def read(self, slots: Slots) -> Mask | None:
        """Which of these slots, whose pages have gone from the books, are still read; None: none
        is. They are kept apart from here on: nobody can begin to read them now."""
        if self.readers is None or not some(read := self.readers.reading(slots)):
            return None
        self.slots = np.concatenate([self.slots, slots[read]])
        return read

    def take(self) -> Slots:
        """Those that nobody reads any more."""
        slots, self.slots = self.slots, NO_IDS
        read = self.read(slots)
        return slots if read is None else slots[~read]
