"""One client's conversation: what it may ask, what it holds, and what is answered.

Decides the answer to every message, and that all a client holds is let go of when it is gone.
Refuses to know sockets: messages come in decoded and replies go out through `reply`, here and now
or later, through `later`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.engine import EngineError
from prefetchd.model import Idle, Outcome
from prefetchd.sidecar import replies
from prefetchd.sidecar.marks import Marks
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import (
    TIMEOUT_NS_MAX,
    Advise,
    AskStats,
    Demand,
    Drop,
    Find,
    Grow,
    HintChain,
    HintDone,
    HintPages,
    Message,
    Ping,
    Push,
    Put,
    Release,
    Request,
    Seal,
    Share,
    Unshare,
    Used,
    Write,
)
from prefetchd.sidecar.replies import Error, Limits
from prefetchd.sidecar.session_finds import Finds
from prefetchd.sidecar.session_growing import Growing
from prefetchd.sidecar.session_notes import REQUEST_BITS, REQUEST_MASK, Notes
from prefetchd.sidecar.session_pushes import Pushes
from prefetchd.sidecar.session_puts import Later, Puts
from prefetchd.sidecar.wire import ProtocolError, array_of, raw_of
from prefetchd.tickets import Ticket

log = logging.getLogger("prefetchd")

_RETAINED = bytes([Outcome.RETAINED])


class Session:
    """`number` tells it from the other clients of its namespace. All methods are called by the
    loop's thread."""

    def __init__(
        self,
        number: int,
        namespace: Namespace,
        limits: Limits,
        reply: Callable[[Message], None],
        later: Later,
        write_arena: NDArray[np.uint8] | None = None,
        marks: Marks | None = None,
    ) -> None:
        self.namespace = namespace
        self._runtime = namespace.runtime
        self._limits = limits
        self._reply = reply
        self._later = later
        self._base = number << REQUEST_BITS
        self._tickets: dict[int, Ticket] = {}
        self._finds = Finds(namespace, limits, reply)
        self._puts = Puts(namespace, limits, reply, later, write_arena)
        self._growing = Growing(namespace, limits, reply, later, self._stream)
        self._notes = Notes(namespace, limits, self._stream, marks=marks is not None)
        self._pushes = Pushes(namespace, limits, reply, later)
        self._ended = False
        self._write_bytes = 0 if write_arena is None else len(write_arena)
        namespace.enter(1, self._write_bytes)
        self._marks = marks
        if marks is not None and namespace.readers is not None:
            namespace.readers.add(marks)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Demand: self._demand,
            Release: self._release,
            Find: self._finds.take,
            Put: self._puts.take,
            HintPages: self._notes.pages,
            HintChain: self._notes.chain,
            HintDone: self._notes.done,
            AskStats: self._stats,
            Ping: self._ping,
            Advise: self._advise,
            Grow: self._growing.grow,
            Write: self._growing.write,
            Seal: self._growing.seal,
            Drop: self._growing.drop,
            Share: self._pushes.share,
            Push: self._push,
            Used: self._notes.used,
            Unshare: self._pushes.unshare,
        }

    @property
    def frame_bytes(self) -> int:
        """The longest frame that it takes."""
        return self._limits.frame_bytes

    @property
    def held(self) -> int:
        """Tickets that are open, as far as it is true what the client has marked."""
        marked = 0 if self._marks is None else int(self._marks.count[0])
        return len(self._tickets) + max(0, min(marked, self._limits.tickets))

    @property
    def may_read(self) -> bool:
        """Whether the client may be reading pages in place."""
        return bool(self._tickets) or self._marks is not None

    def handle(self, request: Request) -> None:
        """Raises ProtocolError for what no client may send."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise ProtocolError(f"{type(request).__name__} is not expected here")
        self._carry_out(handler, request)

    @property
    def reading(self) -> int:
        """Reads of its namespace that have begun, or wait to, and have not ended."""
        return self._runtime.engine.core.reading

    @property
    def unfinished(self) -> bool:
        """Whether the last request needs further turns; see `go_on`."""
        return self._finds.under_way is not None

    def go_on(self) -> None:
        if self._finds.under_way is not None:
            self._carry_out(self._finds.go_on, self._finds.under_way)

    def _carry_out(self, work: Callable[[Any], None], request: Request) -> None:
        try:
            work(request)
        except ValueError as error:
            self._refuse(request, "bad_request", str(error))
        except EngineError as error:
            self._refuse(request, "stopped", str(error))

    def _refuse(self, request: Request, code: str, words: str) -> None:
        if number := getattr(request, "id", 0):
            self._reply(Error(number, code, words))
        else:
            kind = type(request).__name__
            log.info("namespace %s: %s was refused: %s", self.namespace.name, kind, words)

    # --- reading ---

    def _ids(self, raw: bytes, what: str) -> NDArray[np.int64]:
        return array_of(raw, np.int64, self._limits.ids, what)

    def _demand(self, message: Demand) -> None:
        most, number = self._limits.ids, message.id
        pages = self._ids(message.pages, "pages")
        stamps = scores = None
        if message.stamps is not None:
            stamps = array_of(message.stamps, np.int64, most, "stamps", len(pages))
        if message.scores is not None:
            scores = array_of(message.scores, np.float32, most, "scores", len(pages))
        if number in self._tickets or number == 0:
            raise ValueError(f"ticket {number} is open already, or no number for one")
        if len(self._tickets) >= self._limits.tickets:
            words = f"{len(self._tickets)} demands are open, the most allowed: release some"
            return self._refuse(message, "limit", words)
        timeout_ns = message.timeout_ns
        ticket = self._runtime.demand(
            pages,
            stamps=stamps,
            request=self._stream(message.request),
            scores=scores,
            timeout_s=None if timeout_ns < 0 else min(timeout_ns, TIMEOUT_NS_MAX) / 1e9,
        )
        self._tickets[number] = ticket
        if ticket.done:
            return self._answer(number, ticket)
        self.namespace.waiting += 1
        answered = partial(self._answered, number, ticket)
        with self._runtime.engine.lock:
            ticket.then(lambda: self._later(answered))
        return None

    def _stream(self, request: int) -> int:
        """A request's number among those of all clients."""
        return self._base + (request & REQUEST_MASK)

    def _answered(self, number: int, ticket: Ticket) -> None:
        self.namespace.waiting -= 1
        if self._tickets.get(number) is ticket:
            self._answer(number, ticket)

    def _answer(self, number: int, ticket: Ticket) -> None:
        ready = ticket.answer
        slots, outcomes = raw_of(ready.slots, np.int64), ready.outcomes.tobytes()
        # What was there when it was demanded was not waited for.
        waits = raw_of(ready.waits_ns, np.int64) if outcomes.strip(_RETAINED) else None
        self._reply(replies.Pages(number, slots, outcomes, waits))

    def _release(self, message: Release) -> None:
        tickets = array_of(message.tickets, np.int64, self._limits.ids, "tickets")
        for number in tickets.tolist():
            ticket = self._tickets.pop(number, None)
            if ticket is not None:
                self._pushes.release(ticket)

    def _push(self, message: Push) -> None:
        self._pushes.push(message, self._tickets.get(message.ticket))

    # --- the rest ---

    def _stats(self, message: AskStats) -> None:
        self._runtime.engine.handle(Idle())  # so that what was given back does not count as held
        # Samples are for who measures in this process; a client gets none.
        told = msgspec.to_builtins(self._runtime.stats(), enc_hook=lambda _: [])
        self._reply(replies.Told(message.id, told))

    def _advise(self, message: Advise) -> None:
        advice = self._runtime.advise(
            self._ids(message.blocks, "blocks"),
            prefill_tokens_s=message.prefill_tokens_s,
            block_tokens=message.block_tokens,
            pairs_s=message.pairs_s,
        )
        self._reply(replies.Advice(message.id, *astuple(advice)))

    def _ping(self, message: Ping) -> None:
        self._reply(replies.Pong(message.id))

    def fail(self, why: str) -> None:
        """Nothing that is waited for will come: say so."""
        waiting = [number for number, ticket in self._tickets.items() if not ticket.done]
        for number in waiting:
            del self._tickets[number]
        for number in [*waiting, *self._puts.give_up(), *self._growing.give_up()]:
            self._reply(Error(number, "stopped", why))

    def end(self) -> None:
        """The client is gone: let go of all it holds, now and not when somebody drives next."""
        if self._ended:
            return
        self._ended = True
        self.namespace.enter(-1, -self._write_bytes)
        if self._marks is not None and self.namespace.readers is not None:
            self.namespace.readers.remove(self._marks)
            self._marks = None
        self._puts.close()
        self._pushes.end()
        tickets, self._tickets = list(self._tickets.values()), {}
        try:
            self._growing.end()
            for ticket in tickets:
                self._pushes.release(ticket)
            self._runtime.engine.handle(Idle())  # also for what it released itself, just before
        except EngineError as error:
            log.info("namespace %s: %s", self.namespace.name, error)
