"""Open blocks: the newest tokens of a request, in staging until their block is full.

Decides how many there are, what may be written into them, and what becomes of those that are never
sealed. An open block has its extent and its slots from the beginning, so it cannot fail halfway;
nothing of it is on the medium before it is sealed, so a crash leaves nothing of it.
"""

from __future__ import annotations

import threading
from typing import Self

import numpy as np
from numpy.typing import NDArray

from prefetchd.assembly import Parts
from prefetchd.catalog import StoreFullError
from prefetchd.engine import Engine
from prefetchd.lookups import as_keys
from prefetchd.model import Ids
from prefetchd.puts import Puts
from prefetchd.tickets import PutTicket


class GrowError(Exception):
    """No block can be opened now: which bound is met, and what to do."""


class OpenBlocks:
    """At most `blocks_max` at once; opening one waits for room until `timeout_ns` have passed."""

    def __init__(
        self, engine: Engine, parts: Parts, puts: Puts, blocks_max: int, timeout_ns: int
    ) -> None:
        self.engine = engine
        self.puts = puts
        self.catalog = parts.catalog
        self.geometry = parts.geometry
        page_bytes = parts.store.superblock.page_bytes
        self.staged = parts.staging[:, :page_bytes]
        self._fills = parts.core.fills
        self._read_only = parts.store.read_only
        self._blocks_max = blocks_max
        self.timeout_ns = timeout_ns
        self._open: dict[int, GrowingBlock] = {}

    def __len__(self) -> int:
        return len(self._open)

    def grow(self, request: int) -> GrowingBlock:
        """Raises GrowError, EngineError."""
        engine = self.engine
        if self._read_only:
            raise GrowError("no block can be opened: the store is open for reading only")
        self._check_size()
        deadline_ns = engine.clock() + self.timeout_ns
        opened: list[GrowingBlock] = []

        def attempt() -> bool:
            with engine.lock:
                engine.check()
                if not opened:
                    self._check_count()
                    if self.puts.room.has_extent():
                        opened.extend(self._opened(request))
                return bool(opened)

        if not engine.wait(attempt, deadline_ns):
            raise GrowError(
                f"no block can be opened: staging has no room for its {self._layers} pages beside "
                "what is read, open or not written yet; release tickets or raise staging_bytes"
            )
        return opened[0]

    @property
    def _layers(self) -> int:
        return self.catalog.superblock.layers

    def _check_size(self) -> None:
        if self._layers > self._fills.slots_max:
            raise GrowError(
                f"no block can be opened: it takes {self._layers} pages, and staging keeps at most "
                f"{self._fills.slots_max} that the store does not have; raise staging_bytes"
            )

    def _check_count(self) -> None:
        """Raise where waiting cannot help: only who has blocks open can end that."""
        most = self._fills.slots_max // self._layers
        fewest = min(self._blocks_max, self.catalog.superblock.blocks)
        if len(self._open) >= most and most < fewest:
            raise GrowError(
                f"{len(self._open)} blocks are open, all that staging keeps beside what the store "
                f"has ({self._fills.slots_max} pages); seal or drop some, or raise staging_bytes"
            )
        if len(self._open) >= self._blocks_max:
            requests = sorted({block.request for block in self._open.values()})
            raise GrowError(
                f"{len(self._open)} blocks are open, the most allowed, of requests "
                f"{', '.join(map(str, requests[:8]))}: seal or drop some, or raise open_blocks_max"
            )

    def _opened(self, request: int) -> list[GrowingBlock]:
        """A block if staging has room for it."""
        try:
            number = self.catalog.reserve()
        except StoreFullError as error:
            raise GrowError(f"no block can be opened: {error}") from error
        if not self.puts.behind.take(number):
            self.catalog.give_back(number)
            return []
        self.catalog.open(number)
        block = GrowingBlock(self, number, request)
        self._open[number] = block
        return [block]

    def forget(self, number: int) -> None:
        """A block is not open any more. Called under the engine's lock."""
        self._open.pop(number, None)

    def drop_all(self) -> None:
        for block in list(self._open.values()):
            block.drop()


class GrowingBlock:
    """A block that is written bit by bit and can be demanded all the while. Made by `Runtime.grow`.

    Its end is `seal` or `drop`; as a context manager it is dropped if it was not sealed. Bytes that
    were never written are zero. Thread-safe.
    """

    def __init__(self, blocks: OpenBlocks, number: int, request: int) -> None:
        self._blocks = blocks
        self._number = number
        self.request = request
        self._slots = blocks.puts.behind.slots(number)
        self._lock = threading.Lock()  # taken before the engine's
        self._open = True
        self._dropped = False

    @property
    def number(self) -> int:
        """Its block index. Where another block had the key first, that one's, once the put has
        ended. Raises ValueError if it was dropped."""
        if self._dropped:
            raise ValueError("the block was dropped; nothing of it is left")
        return self._number

    @property
    def stamp(self) -> int:
        """Of the block as it is now, for `demand`; `seal` gives it another."""
        return int(self._blocks.catalog.stamps[self.number])

    @property
    def is_open(self) -> bool:
        return self._open

    def pages(self, layer: int) -> Ids:
        """Its page id of one layer (int64, length 1), for `demand` beside other pages."""
        return self._blocks.geometry.checked_page_ids(np.array([self.number]), layer)

    def write(self, layer: int, data: NDArray[np.generic], at: int) -> None:
        """Copy `data` (any shape and dtype) into the page of one layer, from byte `at` on.

        Whoever demanded the page sees it at once. Raises ValueError outside the page, or when the
        block is not open any more.
        """
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        staged = self._blocks.staged
        if not 0 <= layer < len(self._slots) or not 0 <= at <= staged.shape[1] - len(flat):
            raise ValueError(
                f"{len(flat)} bytes at byte {at} of layer {layer}: a block has "
                f"{len(self._slots)} layers of {staged.shape[1]} bytes"
            )
        with self._lock:
            self._check()
            staged[self._slots[layer], at : at + len(flat)] = flat

    def seal(
        self, key: bytes, *, durability: str = "durable", ttl_s: float | None = None
    ) -> PutTicket:
        """Store the block under its key; the same promise as `Runtime.put`.

        It is found under its key when the ticket is done, and can be demanded by its page ids all
        the while. If another block has the key already, this one goes when the ticket is done, and
        `number` is the other's. If it could not be taken (`refused`, or `failures` at once), it is
        open as before. Raises ValueError if it is not open, or for what `put` does not take.
        """
        blocks = self._blocks
        (name,) = blocks.catalog.names(as_keys([key]))
        with self._lock:
            self._check()
            ticket, taken = blocks.puts.seal(self._number, name, durability, ttl_s)
            with blocks.engine.lock:
                if ticket.done and (ticket.refused or ticket.failures) and not taken:
                    return ticket
                self._open = False
                blocks.forget(self._number)
                if not taken:
                    ticket.then(lambda: self._superseded(ticket))
        return ticket

    def _superseded(self, ticket: PutTicket) -> None:
        """Another block has the key, or failed to get it. Called under the engine's lock."""
        own, self._number = self._number, int(ticket.blocks[0])
        self._dropped = self._number < 0
        self._blocks.puts.behind.drop(own)

    def drop(self) -> None:
        """Give the block up; nothing of it is left. Harmless when it was sealed or dropped."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._dropped = True
            with self._blocks.engine.lock:
                self._blocks.forget(self._number)
                self._blocks.puts.behind.drop(self._number)

    def _check(self) -> None:
        if not self._open:
            raise ValueError("the block was sealed or dropped; open another")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
