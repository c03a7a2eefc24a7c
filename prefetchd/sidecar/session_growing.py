"""One client's open blocks: opened, written, sealed and given up as it says.

Decides whose an open block is: only the client that opened it can write it, and it goes with that
client's connection. What has been sealed is the store's. Opening and sealing may wait for room and
have threads of the namespace; all else is the loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from prefetchd.engine import EngineError
from prefetchd.growing import GrowError, GrowingBlock
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import Drop, Grow, Message, Seal, Write
from prefetchd.sidecar.replies import Error, Grown, Limits, Pong, Sealed
from prefetchd.sidecar.session_puts import Later, keys_of
from prefetchd.sidecar.wire import ProtocolError
from prefetchd.tickets import PutTicket


class Growing:
    """`stream` makes a request's number one among those of all clients."""

    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        reply: Callable[[Message], None],
        later: Later,
        stream: Callable[[int], int],
    ) -> None:
        self._namespace = namespace
        self._limits = limits
        self._reply = reply
        self._later = later
        self._stream = stream
        self._blocks: dict[int, GrowingBlock] = {}
        self._under_way: set[int] = set()  # ids of what a thread is to open or to seal

    # --- opening ---

    def grow(self, message: Grow) -> None:
        if self._begin(message.id):
            request = self._stream(message.request)
            self._namespace.growing_pool.submit(self._open, message.id, request)

    def _begin(self, number: int) -> bool:
        if number in self._under_way or number == 0:
            raise ValueError(f"request {number} has not ended yet, or is no number for one")
        if len(self._under_way) >= self._limits.puts:
            words = f"{len(self._under_way)} blocks are being opened or sealed, the most allowed"
            self._reply(Error(number, "limit", words))
            return False
        self._under_way.add(number)
        return True

    def _open(self, number: int, request: int) -> None:
        try:
            block = self._namespace.runtime.grow(request=request)
        except Exception as error:
            code = "limit" if isinstance(error, GrowError) else "stopped"
            self._later(partial(self._refused, number, code, str(error)))
        else:
            self._later(partial(self._opened, number, block))

    def _opened(self, number: int, block: GrowingBlock) -> None:
        if number not in self._under_way:  # nobody wants it any more
            _let_go(block)
            return
        self._under_way.remove(number)
        self._blocks[block.number] = block
        self._reply(Grown(number, block.number, block.stamp))

    def _refused(self, number: int, code: str, words: str) -> None:
        if number in self._under_way:
            self._under_way.remove(number)
            self._reply(Error(number, code, words))

    # --- writing ---

    def write(self, message: Write) -> None:
        if len(message.data) > self._limits.inline_bytes:
            raise ProtocolError(f"{len(message.data)} bytes in a write; send them in pieces")
        data = np.frombuffer(message.data, np.uint8)
        self._own(message.block).write(message.layer, data, message.at)
        self._reply(Pong(message.id))

    def _own(self, number: int) -> GrowingBlock:
        block = self._blocks.get(number)
        if block is None:
            raise ValueError(f"block {number} is not open, or not this client's")
        return block

    def drop(self, message: Drop) -> None:
        block = self._blocks.pop(message.block, None)
        if block is not None:
            block.drop()

    # --- sealing ---

    def seal(self, message: Seal) -> None:
        block = self._own(message.block)
        if self._begin(message.id):
            del self._blocks[message.block]
            self._namespace.pool.submit(self._seal, message, block)

    def _seal(self, message: Seal, block: GrowingBlock) -> None:
        try:
            key = self._namespace.salted(keys_of(message.key, 1))[0].tobytes()
            ticket = block.seal(key, durability=message.durability, ttl_s=message.ttl_s)
            with self._namespace.runtime.engine.lock:
                ticket.then(partial(self._later, partial(self._sealed, message, block, ticket)))
        except Exception as error:
            code = "bad_request" if isinstance(error, ValueError) else "stopped"
            self._later(partial(self._not_sealed, message, block, code, str(error)))

    def _not_sealed(self, message: Seal, block: GrowingBlock, code: str, words: str) -> None:
        self._keep(message, block)
        self._refused(message.id, code, words)

    def _keep(self, message: Seal, block: GrowingBlock) -> None:
        """It is open as before, if it is and if its client is still there."""
        if block.is_open and message.id in self._under_way:
            self._blocks[message.block] = block
        else:
            _let_go(block)

    def _sealed(self, message: Seal, block: GrowingBlock, ticket: PutTicket) -> None:
        self._keep(message, block)
        if message.id not in self._under_way:
            return
        self._under_way.remove(message.id)
        stored, stamp = int(ticket.blocks[0]), int(ticket.stamps[0])
        is_open, refused = block.is_open, bool(ticket.refused)
        self._reply(Sealed(message.id, stored, stamp, list(ticket.failures), refused, is_open))

    # --- the end ---

    def give_up(self) -> list[int]:
        """Those that have not ended; whatever becomes of them is not told any more."""
        under_way, self._under_way = self._under_way, set()
        return sorted(under_way)

    def end(self) -> None:
        """The client is gone. Raises EngineError when there is nothing left to drop them from."""
        self._under_way.clear()
        blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            block.drop()


def _let_go(block: GrowingBlock) -> None:
    with suppress(EngineError):  # which has stopped: there is nothing to give it back to
        block.drop()
