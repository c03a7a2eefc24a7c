"""One client's socket in the daemon's loop: frames in, frames out, and the end.

Decides how much of a client is read at a time, when no more is read of it, and when what it holds
is let go of. What messages mean is the session's. Refuses to know runtimes.

A client that breaks the protocol is told so and heard no more, but what it holds stays until its
end closes: it may still be reading pages in place, and nobody is to write over them.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Hashable, Sequence

from prefetchd.sidecar.loop_turns import (
    BYTES_A_COST,
    MESSAGE_COST,
    READ_COST,
    READS_COST,
    STEP_COST,
    USE_COST,
)
from prefetchd.sidecar.peers import Peer, peer_of
from prefetchd.sidecar.protocol import (
    HELLO_BYTES_MAX,
    AskStats,
    Erase,
    Hello,
    HintChain,
    HintDone,
    HintPages,
    Message,
    Request,
    Used,
)
from prefetchd.sidecar.replies import Error
from prefetchd.sidecar.session import Session
from prefetchd.sidecar.wire import Frames, ProtocolError, frame, request_of

log = logging.getLogger("prefetchd")

_READ_BYTES = 1 << 16
_OUT_BYTES_MAX = 1 << 22
"""Of answers that a client does not take; then no more is read of it."""


_GO_ON_COST, _STATS_COST = 300, 300
_TURN_COST = 4 * MESSAGE_COST
"""A release and a demand of what is staged are answered in one turn, with one write."""


class Connection:
    """`greet` is given the Hello (or Erase), and later sets `session` or refuses; `watch` is told
    for which events (epoll's) the socket is to be looked at, `ended` that it is closed."""

    def __init__(
        self,
        sock: socket.socket,
        greet: Callable[[Connection, Hello | Erase], None],
        watch: Callable[[Connection, int], None],
        ended: Callable[[Connection], None],
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer: Peer = peer_of(sock)
        self.session: Session | None = None
        self._greet = greet
        self._watch = watch
        self._ended = ended
        self._frames = Frames(HELLO_BYTES_MAX)
        self.unheard = self._frames.whole
        """Messages that have come and wait for their turn."""
        self._out = bytearray()
        self._working = False
        self._greeted = False
        self._refused = False
        self.closed = False
        self._events = select.EPOLLIN

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def lingers(self) -> bool:
        """Whether there is something to do that no event will tell of."""
        waits_for_answer = self._greeted and self.session is None
        unfinished = self.session is not None and self.session.unfinished
        return (unfinished or bool(self.unheard)) and not (
            self._refused or self.closed or waits_for_answer or self._choked
        )

    @property
    def silent(self) -> bool:
        """Whether it has said nothing yet."""
        return not (self._greeted or self._refused)

    @property
    def _choked(self) -> bool:
        return len(self._out) > _OUT_BYTES_MAX

    def accept(self, session: Session, welcome: Message, descriptors: Sequence[int]) -> None:
        """The answer to a Hello."""
        self.session = session
        self._frames.limit_bytes = session.frame_bytes
        raw = frame(welcome)
        try:
            sent = socket.send_fds(self.sock, [raw], descriptors)
        except OSError as error:
            self.end(str(error))
            return
        if sent < len(raw):  # a fresh socket takes a few hundred bytes
            self.end("its socket takes nothing")

    def refuse(self, code: str, words: str) -> None:
        """End the conversation; the connection ends when the other end closes."""
        log.info("process %s of uid %s: %s", self.peer.pid, self.peer.uid, words)
        self.send(Error(0, code, words))
        self._refused = True
        self.unheard.clear()
        self._flush()
        if self.session is None or not self.session.may_read:
            self.end(words)

    def on_event(self, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._flush()
        if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not self.closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(str(error))
            return
        if not data:
            self.end("it has closed")
        elif not self._refused:
            behind = bool(self._frames.whole)
            try:
                self._frames.feed(data)
            except ProtocolError as error:
                self.refuse("protocol", str(error))
                return
            if behind:  # else its turn is most likely now, and the socket is looked at as before
                self._settle()

    def work(self) -> int:
        """Answer some of what has come, all with one write; what that has cost."""
        cost = 0
        self._working = True
        try:
            while cost < _TURN_COST and self.lingers:
                cost += self._one()
        except ProtocolError as error:
            self.refuse("protocol", str(error))
        finally:
            self._working = False
        self._flush()
        return cost

    def _one(self) -> int:
        """Deal with one message, or with some more of one."""
        session = self.session
        if session is not None and session.unfinished:
            session.go_on()
            return _GO_ON_COST
        body = self.unheard.popleft()
        request = request_of(body)
        cost = MESSAGE_COST + len(body) // BYTES_A_COST
        if session is None:
            self._begin(request)
            return cost
        before = session.reading
        session.handle(request)
        begun = session.reading - before
        if isinstance(request, AskStats):
            cost += _STATS_COST
        elif isinstance(request, HintChain | HintPages | HintDone):
            cost += STEP_COST
        elif isinstance(request, Used):
            cost += USE_COST * (len(request.counts) // 8)
        return cost + (READS_COST + begun * READ_COST if begun > 0 else 0)

    def _begin(self, request: Request) -> None:
        if not isinstance(request, Hello | Erase) or self._greeted:
            raise ProtocolError("the first message is Hello")
        self._greeted = True
        self._greet(self, request)

    @property
    def member(self) -> Hashable:
        """Who pays for its turns: its namespace, or, while it has none, its user."""
        return self.peer.uid if self.session is None else self.session.namespace.name

    @property
    def weight(self) -> int:
        return 1 if self.session is None else self.session.namespace.weight

    def send(self, message: Message) -> None:
        """Now, or with the other answers to what is being worked on."""
        if self.closed or self._refused:
            return
        self._out += frame(message)
        if not self._working:
            self._flush()

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(str(error))
            return
        if self._out or self.unheard or self._refused or self._events != select.EPOLLIN:
            self._settle()

    def _settle(self) -> None:
        """Have the loop look for what this end can use."""
        if self._refused and not self._out:
            self._shut()
        hears = not (self.unheard or self.lingers or self._choked)
        events = (select.EPOLLIN if hears or self._refused else 0) | (
            select.EPOLLOUT if self._out else 0
        )
        if events != self._events:
            self._events = events
            self._watch(self, events)

    def _shut(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other end has gone already, which is told by the next read

    def end(self, why: str) -> None:
        """Let go of everything. Harmless when repeated."""
        if self.closed:
            return
        self.closed = True
        self.unheard.clear()
        log.info("process %s of uid %s has gone: %s", self.peer.pid, self.peer.uid, why)
        self._ended(self)
        self.sock.close()
        session, self.session = self.session, None
        if session is not None:
            session.end()
