"""Write-back: blocks whose bytes staging has and the store does not, or not yet.

Decides how such a block gets into staging, how long it is kept there, and who is told when it
cannot be written after all: whoever put it, though his put had been acknowledged. Writing is the
writer's, the choice of slots the core's.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.hostinfo import why_not
from prefetchd.model import Cleaned, Filled, Geometry, Ids, Offered, Slots
from prefetchd.room import Room
from prefetchd.tickets import PutTicket
from prefetchd.writer import News, Written

log = logging.getLogger("prefetchd")

Owner = tuple[PutTicket, int]
"""A put and the position of the block in it."""


class Behind:
    """All methods are called under the engine's lock."""

    def __init__(self, engine: Engine, driver: Driver, room: Room) -> None:
        self._engine = engine
        self._driver = driver
        self._room = room
        shape = driver.catalog.superblock
        self._geometry = Geometry(shape.layers, shape.blocks)
        self._kept: set[int] = set()  # blocks whose pages stay in staging
        self._owners: dict[int, list[Owner]] = {}  # of blocks found and not written
        self.staged = 0
        """Blocks found at once, out of staging."""
        self.waited = 0
        """Blocks put fast for which staging had no room: found once they were written."""
        self.lost = 0
        """Blocks that were found, or open, and could not be written."""

    def pages(self, block: int) -> Ids:
        return self._geometry.all_pages(np.array([block]))

    def slots(self, block: int) -> Slots:
        """Where the pages of a kept block are, in layer order."""
        return self._engine.core.staging.slot_of[self.pages(block)].astype(np.int64)

    def bytes_of(self, block: int) -> NDArray[np.uint8]:
        """A copy of a kept block: (layers, page_bytes)."""
        exact = self._driver.staging[:, : self._driver.catalog.superblock.page_bytes]
        copy: NDArray[np.uint8] = exact[self.slots(block)]
        return copy

    def take(self, block: int) -> bool:
        """Bring a block's pages into staging, to be kept there: those that the writer has of it,
        or else zeros. False if there is no room."""
        pages = self.pages(block)
        self._engine.handle(Offered(pages))
        if self._engine.core.staging.slot_of[pages[0]] < 0:
            return False
        self._engine.handle(Filled(pages))
        self._kept.add(block)
        return True

    def begin(self, block: int, owners: list[Owner]) -> None:
        """A kept block is found now, and these puts of it acknowledged."""
        self.staged += 1
        self._owners[block] = owners

    def join(self, block: int, ticket: PutTicket, position: int) -> None:
        """Somebody else has put a block that is found: he, too, is told if it cannot be written."""
        if block in self._owners:
            self._owners[block].append((ticket, position))

    def release(self, block: int) -> None:
        """Staging need not keep this block any longer."""
        if block in self._kept:
            self._kept.remove(block)
            self._engine.handle(Cleaned(self.pages(block)))

    def drop(self, block: int) -> None:
        """An open block is given up: nobody can ask for it, and it goes when nobody reads it."""
        self._driver.catalog.hide(np.array([block]))
        self.release(block)
        self._room.leave(block)

    def heard(self, written: Written) -> None:
        """Take note of what the writer says of a block."""
        block = written.block
        if written.news == News.CLEAN:
            self.release(block)
            self._owners.pop(block, None)
        elif written.news == News.LOST:
            self.release(block)
            reason = why_not(written.result)
            self._count_lost(reason)
            for ticket, position in self._owners.pop(block, []):
                ticket.withdraw(position, f"block {position} was lost after it was found: {reason}")
        elif written.news == News.LEAVING:
            self._room.leave(block)

    def _count_lost(self, reason: str) -> None:
        if self.lost == 0:
            log.warning(
                "a block that was readable could not be written (%s): it is not any more; "
                "Stats.store_writes.blocks_lost counts the others",
                reason,
            )
        self.lost += 1
