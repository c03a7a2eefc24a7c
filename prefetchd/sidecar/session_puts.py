"""One client's puts: where their bytes are, and what is answered when they have ended.

Decides how many may be under way. They are carried out by threads of the namespace, since a put may
have to wait for room; all else is the loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from prefetchd.sidecar import replies
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import KEY_BYTES, Message, Put
from prefetchd.sidecar.replies import Error, Limits
from prefetchd.sidecar.wire import ProtocolError, raw_of
from prefetchd.tickets import PutTicket

Later = Callable[[Callable[[], None]], None]
"""Has the loop's thread call this, soon; may be called in any thread."""


class Puts:
    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        reply: Callable[[Message], None],
        later: Later,
        write_arena: NDArray[np.uint8] | None,
    ) -> None:
        self._namespace = namespace
        self._runtime = namespace.runtime
        self._limits = limits
        self._reply = reply
        self._later = later
        self._write_arena = write_arena
        self._putting: set[int] = set()

    def take(self, message: Put) -> None:
        keys = keys_of(message.keys, self._limits.keys)
        rows = self._bytes_of(message, len(keys))
        if len(self._putting) >= self._limits.puts:
            words = f"{len(self._putting)} puts have not ended, the most allowed"
            self._reply(Error(message.id, "limit", words))
            return
        if message.id in self._putting or message.id == 0:
            raise ValueError(f"put {message.id} has not ended yet, or is no number for one")
        self._putting.add(message.id)
        self._namespace.pool.submit(self._carry_out, message, keys, rows)

    def _bytes_of(self, message: Put, count: int) -> NDArray[np.uint8]:
        """(blocks, layers, page_bytes), read in place."""
        shape = (count, self._runtime.geometry.layers, self._runtime.page_bytes)
        length = count * self._namespace.extent_bytes
        if message.data is not None:
            if len(message.data) > self._limits.inline_bytes:
                raise ProtocolError(f"{len(message.data)} bytes in a put; use the write arena")
            if len(message.data) != length:
                raise ValueError(f"{count} keys take {length} bytes, {len(message.data)} came")
            return np.frombuffer(message.data, np.uint8).reshape(shape)
        source, start = self._write_arena, message.offset
        if source is None or start + length > len(source):
            raise ValueError(f"{length} bytes at {start} are not in the write arena")
        return source[start : start + length].reshape(shape)

    def _carry_out(self, message: Put, keys: NDArray[np.uint8], rows: NDArray[np.uint8]) -> None:
        """In a thread of the namespace's, since a put may have to wait for room."""
        try:
            names = self._namespace.salted(keys)
            ticket = self._runtime.put(
                names, rows, durability=message.durability, ttl_s=message.ttl_s
            )
            with self._runtime.engine.lock:
                ticket.then(partial(self._later, partial(self._put_ended, message.id, ticket)))
        except Exception as error:
            code = "bad_request" if isinstance(error, ValueError) else "stopped"
            self._later(partial(self._put_refused, message.id, code, str(error)))

    def _put_refused(self, number: int, code: str, words: str) -> None:
        if number in self._putting:
            self._putting.remove(number)
            self._reply(Error(number, code, words))

    def _put_ended(self, number: int, ticket: PutTicket) -> None:
        if number not in self._putting:
            return
        self._putting.remove(number)
        blocks, stamps = raw_of(ticket.blocks, np.int64), raw_of(ticket.stamps, np.int64)
        self._reply(
            replies.PutEnd(number, blocks, stamps, list(ticket.failures), list(ticket.refused))
        )

    def close(self) -> None:
        """Let go of the write arena; a put that reads it goes on to its end."""
        self._write_arena = None

    def give_up(self) -> list[int]:
        """Those that have not ended; whatever becomes of them is not told any more."""
        putting, self._putting = self._putting, set()
        return sorted(putting)


def keys_of(raw: bytes, most: int) -> NDArray[np.uint8]:
    """(keys, 16). Raises ProtocolError."""
    count, odd = divmod(len(raw), KEY_BYTES)
    if odd or count > most:
        raise ProtocolError(f"{len(raw)} bytes are not at most {most} keys of {KEY_BYTES} bytes")
    return np.frombuffer(raw, np.uint8).reshape(count, KEY_BYTES)
