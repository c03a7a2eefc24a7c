"""Pages that were read whole and are not what was written: which blocks are past help.

Decides that a page has to fail its checksum twice, in two reads of its own, before its block is
given up: what was damaged on the way is not damaged on the medium. A read that fails never counts.
Removing the block is up to whoever makes room.
"""

from __future__ import annotations

from collections import deque

from prefetchd.catalog import Catalog
from prefetchd.model import Ids

_SUSPECTED_MAX = 4096


class Rot:
    """`suspected`: pages that failed once, and the record they were held against (its sequence
    number: another record of that extent makes it another block). Safe in any thread."""

    def __init__(self, catalog: Catalog) -> None:
        self.suspected: dict[int, int] = {}
        self.rotten: deque[tuple[int, int]] = deque()
        """Blocks to be removed, and the sequence numbers of their records."""
        self._catalog = catalog

    def met(self, pages: Ids) -> None:
        """These pages failed their checksums."""
        blocks = pages // self._catalog.superblock.layers
        sequences = self._catalog.table["sequence"][blocks].tolist()
        for page, block, sequence in zip(pages.tolist(), blocks.tolist(), sequences, strict=True):
            if self.suspected.pop(page, None) == sequence:
                self.rotten.append((block, sequence))
            elif len(self.suspected) < _SUSPECTED_MAX:
                self.suspected[page] = sequence

    def passed(self, pages: Ids) -> None:
        """These did not."""
        for page in pages.tolist():
            self.suspected.pop(page, None)

    def take(self) -> list[int]:
        """The blocks that are to be removed, each once, if they are still what they were."""
        taken: dict[int, int] = {}
        while self.rotten:
            block, sequence = self.rotten.popleft()
            taken[block] = sequence
        table = self._catalog.table["sequence"]
        return [block for block, sequence in taken.items() if table[block] == sequence]
