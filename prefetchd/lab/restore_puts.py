"""Blocks put in a simulated restore: found at once where staging has room, else once written.

Decides which of them staging keeps until they are written, and how the drive is given them: behind,
`WRITE_BLOCKS` an operation, out of `WRITE_BUFFERS` buffers; who finds none free waits for one.
Writes may end in another order than they were given in: small ones overtake, slow ones lag.
Knows no request but by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from prefetchd.lab.virtual import VirtualEngine
from prefetchd.model import Cleaned, Filled, Ids, Mask, Offered

WRITE_BUFFERS = 64
WRITE_BLOCKS = 16


class SimulatedPuts:
    """`visible`: which blocks can be found. `found` is told of a request's blocks as they are."""

    def __init__(
        self,
        engine: VirtualEngine,
        visible: Mask,
        block_bytes: int,
        found: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._visible = visible
        self._block_bytes = block_bytes
        self._tell = found
        self._putting = np.zeros(len(visible), np.bool_)
        self._queue: deque[tuple[int, Ids]] = deque()  # request, blocks without buffers
        self._buffers = WRITE_BUFFERS

    def put(self, request: int, blocks: Ids) -> int:
        """How many are new, neither found nor under way: `found` will be told of those."""
        new = blocks[~(self._visible[blocks] | self._putting[blocks])]
        self._putting[new] = True
        for at in range(0, len(new), WRITE_BLOCKS):
            self._queue.append((request, new[at : at + WRITE_BLOCKS]))
        return len(new)

    def move(self) -> None:
        """Give blocks that were put buffers, in order, as long as there are any."""
        while self._queue and self._buffers >= len(self._queue[0][1]):
            request, blocks = self._queue.popleft()
            self._buffers -= len(blocks)
            while len(blocks):
                kept = self._offered(blocks)
                part = kept or len(blocks)
                self._write(request, blocks[:part], kept=kept > 0)
                blocks = blocks[part:]

    def _offered(self, blocks: Ids) -> int:
        """How many of the first blocks staging took: there is room for some, or for none."""
        count = len(blocks)
        while count:
            self._engine.handle(Offered(blocks[:count]))
            if self._engine.core.staging.slot_of[blocks[0]] >= 0:
                self._engine.handle(Filled(blocks[:count]))
                return count
            count //= 2
        return 0

    def _write(self, request: int, blocks: Ids, *, kept: bool) -> None:
        if kept:
            self._found(request, blocks)
        told = partial(self._written, request, blocks, kept)
        self._engine.write(np.array([len(blocks) * self._block_bytes]), told)

    def _written(self, request: int, blocks: Ids, kept: bool) -> None:
        self._buffers += len(blocks)
        if kept:
            self._engine.handle(Cleaned(blocks))
        else:
            self._found(request, blocks)
        self.move()

    def _found(self, request: int, blocks: Ids) -> None:
        self._visible[blocks] = True
        self._tell(request, len(blocks))
