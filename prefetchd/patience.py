"""What a put waits for, and for how long: its turn, a write buffer, an extent.

Decides when it stops waiting and what it is told then. Which put goes first is decided by the
turns, and which block goes for it by the room; what a put is made of is not known here.
"""

from __future__ import annotations

from collections.abc import Callable

from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.room import Room
from prefetchd.turns import Turns
from prefetchd.writer import Writer

BUSY = "all write buffers are busy; the device ends no write"
LOST = (
    "all write buffers are held by writes that the device never ended; see the kernel log, and "
    "open the store anew"
)

_LAST_FLUSHES = 3


def past_help(writer: Writer) -> bool:
    """Whether a close that waits for the writes would wait in vain: the device ends none of those
    that are left, or no flush goes well."""
    unended = writer.given_up > 0 and writer.in_flight == 0
    return unended or writer.commit.failed_flushes >= _LAST_FLUSHES


class Patience:
    """`timeout_ns`: the longest wait for each of the three."""

    def __init__(
        self, engine: Engine, driver: Driver, room: Room, turns: Turns, timeout_ns: int
    ) -> None:
        self._engine = engine
        self._catalog = driver.catalog
        self._room = room
        self._turns = turns
        self.timeout_ns = timeout_ns

    def for_turn(self, put: int, names: list[bytes]) -> None:
        """Wait while it has no room beside the puts before it, and holds nothing yet; not if all of
        it is there. If that takes too long its blocks are tried all the same."""

        def begins() -> bool:
            with self._engine.lock:
                if self._turns.may_begin(put):
                    return True
                return all(self._catalog.find(name) >= 0 for name in names)

        self._engine.wait(begins, self._engine.clock() + self.timeout_ns)

    def decide(self, step: Callable[[bool], bool], put: int) -> None:
        """Call `step` under the lock until it has decided, and with True when time is up.

        What it finds free it takes before anybody else can.
        """
        engine = self._engine
        decided = False

        def attempt() -> bool:
            nonlocal decided
            with engine.lock:
                if not decided:
                    engine.check()
                    decided = step(False)
                return decided

        try:
            if not engine.wait(attempt, engine.clock() + self.timeout_ns):
                with engine.lock:
                    engine.check()
                    step(True)
        finally:
            with engine.lock:
                self._turns.goes_on(put)

    def extent_decided(self, put: int) -> bool:
        """Whether there is an extent for it, or never will be."""
        if not self._room.has_extent():
            return False
        return self._catalog.has_room or not self._turns.waits(put)

    def shares(self, put: int) -> str:
        """Who holds the blocks that are in use, in words."""
        own, others = self._turns.stored(put), self._turns.stored_by_others(put)
        if others:
            words = f", {own} by what this put began with, {others} by other puts"
            return f"{words} that have not ended; put the rest again"
        return f", {own} by what this put began with, which stays; put less at once" if own else ""
