"""One client's GPU buffers, as lent to the daemon, and the pushes into them.

Decides whose a buffer is: only the client that lent it can have it written, and it is given back
when that client asks, or is gone. And that pins stay until a push has ended, whatever its client
says meanwhile. Threads of the namespace do the work; all else is the loop's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prefetchd.devices.host import check_push
from prefetchd.engine import EngineError
from prefetchd.gpu import Borrowed
from prefetchd.model import Idle
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import Message, Push, Share, Unshare
from prefetchd.sidecar.replies import Error, Limits, Pong, Pushed, Shared
from prefetchd.sidecar.session_puts import Later
from prefetchd.tickets import Ticket

log = logging.getLogger("prefetchd")

NO_GPU = (
    "the daemon has no GPU for this namespace; its configuration says gpu = {name!r}, and "
    '"cuda" would have it push'
)


@dataclass(slots=True)
class _Buffer:
    pages: int
    borrowed: Borrowed | None = None
    """None until it has been opened."""


class Pushes:
    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        reply: Callable[[Message], None],
        later: Later,
    ) -> None:
        self._namespace = namespace
        self._runtime = namespace.runtime
        self._pusher = namespace.pusher
        self._limits = limits
        self._reply = reply
        self._later = later
        self._buffers: dict[int, _Buffer] = {}
        self._under_way: Counter[Ticket] = Counter()
        """Pushes that have not ended, by ticket."""
        self._released: set[Ticket] = set()
        """Of those, the tickets that their client has given back."""
        self._ended = False

    # --- buffers ---

    def share(self, message: Share) -> None:
        number, pages, gpu = message.id, message.pages, self._pusher.gpu
        if number in self._buffers or number == 0:
            raise ValueError(f"buffer {number} is shared already, or no number for one")
        if pages == 0:
            raise ValueError("a buffer of no pages cannot be shared")
        if not gpu.identity:
            return self._reply(Error(number, "unable", NO_GPU.format(name=gpu.name)))
        if message.gpu != gpu.identity:
            words = f"the buffer is on GPU {message.gpu!r}, the daemon's is {gpu.identity!r}"
            return self._reply(Error(number, "unable", words))
        if words := self._too_much(pages):
            return self._reply(Error(number, "limit", words))
        self._buffers[number] = _Buffer(pages)
        self._pusher.borrow(
            message.handle, pages, self, lambda it: self._later(partial(self._opened, number, it))
        )
        return None

    def _too_much(self, pages: int) -> str:
        """Why no further buffer of so many pages can be shared; empty if it can."""
        if len(self._buffers) >= self._limits.buffers:
            return f"{len(self._buffers)} buffers are shared, the most allowed: let go of some"
        whole = pages + sum(buffer.pages for buffer in self._buffers.values())
        if whole * self._runtime.slot_bytes > self._limits.buffer_bytes:
            words = f"{whole * self._runtime.slot_bytes} bytes of buffers would be shared"
            return f"{words}; at most {self._limits.buffer_bytes} can be"
        return ""

    def _opened(self, number: int, result: Borrowed | str) -> None:
        buffer = self._buffers.get(number)
        if isinstance(result, str):
            self._buffers.pop(number, None)
            if buffer is not None:
                self._reply(Error(number, "unable", result))
        elif buffer is None:  # its client is gone
            self._pusher.give_back(result, lambda _: None)
        else:
            buffer.borrowed = result
            self._reply(Shared(number, self._pusher.gpu.engine))

    def _own(self, number: int) -> Borrowed:
        buffer = self._buffers.get(number)
        if buffer is None or buffer.borrowed is None:
            raise ValueError(f"buffer {number} is not shared, or not by this client")
        return buffer.borrowed

    def unshare(self, message: Unshare) -> None:
        borrowed = self._own(message.buffer)
        del self._buffers[message.buffer]
        given_back = partial(self._given_back, message.id)
        self._pusher.give_back(borrowed, lambda _: self._later(given_back))

    def _given_back(self, number: int) -> None:
        if not self._ended:
            self._reply(Pong(number))

    # --- pushes ---

    def push(self, message: Push, ticket: Ticket | None) -> None:
        borrowed = self._own(message.buffer)
        if message.id == 0:
            raise ValueError("0 is no number for a push")
        if ticket is None or not ticket.done:
            raise ValueError(f"ticket {message.ticket} is not open, or not answered yet")
        if self._under_way.total() >= self._limits.pushes:
            words = f"{self._under_way.total()} pushes have not ended, the most allowed"
            return self._reply(Error(message.id, "limit", words))
        slots, missing = ticket.slots, ticket.missing
        if missing.any():
            if not message.skip_missing:
                raise ValueError("pages are missing; nothing was pushed")
            slots = slots[~missing]
        count = check_push(
            slots,
            message.start,
            self._buffers[message.buffer].pages,
            staging_slots=self._runtime.slots,
            batch_slots=self._pusher.gpu.batch_slots,
        )
        self._under_way[ticket] += 1
        ended = partial(self._push_ended, message.id, ticket, count)
        self._pusher.push(
            borrowed, slots, message.start, lambda why: self._later(partial(ended, why))
        )
        return None

    def _push_ended(self, number: int, ticket: Ticket, count: int, why: str) -> None:
        self._under_way[ticket] -= 1
        if not self._under_way[ticket]:
            del self._under_way[ticket]
            if ticket in self._released:
                self._released.remove(ticket)
                self._let_go(ticket)
        if not self._ended:
            self._reply(Error(number, "unable", why) if why else Pushed(number, count))

    def release(self, ticket: Ticket) -> None:
        """Give a ticket's pins back, once its pushes have ended."""
        if ticket in self._under_way:
            self._released.add(ticket)
        else:
            ticket.release()

    def _let_go(self, ticket: Ticket) -> None:
        engine = self._runtime.engine
        try:
            ticket.release()
            if self._ended:  # nobody drives for it
                engine.handle(Idle())
        except EngineError as error:
            log.info("namespace %s: %s", self._namespace.name, error)

    # --- the end ---

    def end(self) -> None:
        """The client is gone: its buffers are given back when the pushes into them have ended."""
        self._ended = True
        buffers, self._buffers = self._buffers, {}
        for buffer in buffers.values():
            if buffer.borrowed is not None:
                self._pusher.give_back(buffer.borrowed, lambda _: None)
