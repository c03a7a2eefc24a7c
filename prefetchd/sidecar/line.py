"""The line to a daemon: who reads the socket, and what happens when it breaks.

Decides that whoever waits reads for all: a thread that waits alone costs no hand-over to another.
When the line breaks, everything that was asked is answered with nothing, so that no caller waits
for a daemon that is not there. Refuses to know what is asked, and how the daemon is found again:
that is `comeback`'s.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from prefetchd.sidecar.comeback import Comeback
from prefetchd.sidecar.conversation import Answered, Attachment, Use
from prefetchd.sidecar.handshake import SidecarError
from prefetchd.sidecar.link import READ_BYTES, TICK_NS, Link
from prefetchd.sidecar.notices import Notices
from prefetchd.sidecar.protocol import Hello
from prefetchd.sidecar.replies import Reply
from prefetchd.sidecar.wire import ProtocolError

_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_SEND_TIMEOUT_NS = 5_000_000_000


class Line:
    """What tickets wait on. `attached` is called with every new attachment, before it is used; it
    may raise SidecarError to refuse it."""

    def __init__(
        self, path: Path, hello: Hello, attached: Callable[[Attachment], None], timeout_s: float
    ) -> None:
        """Raises SidecarError when there is no daemon."""
        self.lock = threading.RLock()
        self.clock = time.monotonic_ns
        self.awaiting: list[Callable[[], object]] = []
        self.breaks = 0
        """How often the line has broken."""
        self._news = threading.Condition(self.lock)
        self._send_lock = threading.RLock()
        self._numbers = count(1)
        self._reading: Link | None = None
        self._followers = 0
        self._ended = False
        self._comeback = Comeback(path, hello, attached, self._back)
        self.notices = Notices(self._flush)
        self.link: Link | None = None
        self.link = self._comeback.attach(timeout_s)

    # --- asking ---

    def number(self) -> int:
        """Of a request that is to be made."""
        return next(self._numbers)

    def ask(
        self, link: Link, number: int, body: bytes, answered: Answered, patience_ns: int
    ) -> None:
        """Send a request; `answered` is called once, under the lock, with a reply or, if the line
        breaks, an Error."""
        deadline_ns = self.clock() + patience_ns
        with self.lock:
            link.answers.expect(number, answered, deadline_ns)
        self.send(link, body)
        if link.attachment.lost:  # maybe before it was expected
            with self.lock:
                link.answers.lost(link.attachment.lost)

    def send(self, link: Link, data: bytes) -> None:
        """If it cannot be sent, the line breaks. Takes notices along."""
        with self._send_lock:
            if self.notices.waiting:
                with self.lock:
                    if self.link is link:
                        data = self.notices.take(link.attachment.welcome.limits.ids) + data
            try:
                sent = link.sock.send(data, _SEND_FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._break(link, f"the daemon has gone: {error.strerror}")
                return
            if sent < len(data):
                self._send_rest(link, memoryview(data)[sent:])

    def _send_rest(self, link: Link, rest: memoryview) -> None:
        """The daemon takes nothing while it has answers for us: read some."""
        deadline_ns = self.clock() + _SEND_TIMEOUT_NS
        while rest and not link.attachment.lost:
            if self.clock() > deadline_ns:
                self._break(link, "the daemon takes no requests")
                return
            if link.may_move(TICK_NS):
                self.collect(link)
            try:
                rest = rest[link.sock.send(rest, _SEND_FLAGS) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._break(link, f"the daemon has gone: {error.strerror}")
                return

    def answer(self, link: Link, make: Callable[[int], bytes], patience_ns: int) -> Reply:
        """Send a request and wait for its reply."""
        replies: list[Reply] = []
        number = self.number()
        self.ask(link, number, make(number), replies.append, patience_ns)
        self.wait(lambda: bool(replies))
        return replies[0]

    def release(self, number: int) -> None:
        """Give a ticket back, with the next request or in a moment."""
        self.check()
        with self.lock:
            if self.link is not None:
                self.link.answers.forget(number)
                self.notices.release(number)

    def note(self, link: Link, use: Use) -> None:
        """Pages were read in place: tell the daemon with the next request or in a moment. Whoever
        reads does not pay for that: to wake the daemon takes longer than to read."""
        with self.lock:
            if self.link is link:
                self.notices.use(use)

    def _send_notices(self, link: Link) -> None:
        """If the daemon takes them now, and hear what it has to say: nobody may be reading."""
        readable, writable = link.ready()
        if writable:
            self.send(link, b"")
        if readable:
            self.collect(link)

    def _flush(self) -> None:
        """Send notices that have waited for long enough."""
        with self.lock:
            due, link = self.notices.look(), self.link
        if due and link is not None:
            self._send_notices(link)

    # --- waiting ---

    def wait(self, done: Callable[[], bool], deadline_ns: int | None = None) -> bool:
        """Read until `done()`, or the deadline (on `clock`). Returns `done()`."""
        while not done():
            left_ns = TICK_NS if deadline_ns is None else deadline_ns - self.clock()
            if left_ns <= 0:
                break
            link = self._turn(done, min(left_ns, TICK_NS))
            if link is None:
                continue
            try:
                if left_ns >= TICK_NS or link.readable(left_ns):
                    self._read(link)
            finally:
                self._has_read()
        else:
            return True
        return done()

    def _turn(self, done: Callable[[], bool], patience_ns: int) -> Link | None:
        """The link if this thread is to read it; None if another does, or there is none."""
        with self.lock:
            if self._reading is None and self.link is not None:
                self._reading = self.link
                return self.link
            if not done():
                self.check()
                self._followers += 1
                self._news.wait(patience_ns / 1e9)
                self._followers -= 1
        return None

    def collect(self, link: Link) -> None:
        """Take in what has come, without waiting, unless another thread reads."""
        with self.lock:
            if self._reading is not None or self.link is not link:
                return
            self._reading = link
        try:
            if link.readable(0):
                self._read(link)
        finally:
            self._has_read()

    def _has_read(self) -> None:
        with self.lock:
            self._reading = None
            if self._followers:
                self._news.notify_all()

    def _read(self, link: Link) -> None:
        try:
            data = link.sock.recv(READ_BYTES)
        except BlockingIOError:
            self._look(link)
            return
        except OSError as error:
            self._break(link, f"the daemon has gone: {error.strerror}")
            return
        if not data:
            self._break(link, "the daemon has gone: it closed the connection")
            return
        try:
            with self.lock:
                link.answers.feed(data)
        except ProtocolError as error:
            self._break(link, str(error))
        else:
            self._look(link)

    def _look(self, link: Link) -> None:
        if (now_ns := self.clock()) >= link.look_ns and link.overdue(now_ns, self.lock):
            self._break(link, "the daemon does not answer in time")

    def resolved(self) -> None:
        """Called under the lock; whoever reads tells the others when it has."""

    def wake(self) -> None:
        """Nothing is left to do here when nobody waits."""

    def check(self) -> None:
        """Raise SidecarError if this end was closed."""
        if self._ended:
            raise SidecarError("the engine is closed: this client was closed")

    # --- breaking and coming back ---

    def _break(self, link: Link, why: str) -> None:
        with self._news:
            if self.link is not link:
                return
            self.link = None
            self.breaks += 1
            link.attachment.lost = why
            link.answers.lost(why)
            self.notices.clear()
            self._news.notify_all()
            self._comeback.begin(why, partial(self._discard, link))

    def _back(self, link: Link) -> bool:
        """Whether it was still wanted."""
        with self._news:
            if self._comeback.ended:
                return False
            self.link = link
            self._news.notify_all()
            return True

    def _discard(self, link: Link) -> None:
        """Close its socket once no other thread is about to use its descriptor."""
        link.hang_up()
        with self._send_lock, self._news:
            while self._reading is link:
                self._news.wait(TICK_NS / 1e9)
            link.sock.close()

    @property
    def away(self) -> str:
        """Why there is no daemon at the moment; empty if there is one."""
        return "" if self.link is not None else self._comeback.why

    def wait_until_back(self, timeout_s: float) -> bool:
        """Whether there is a daemon now, or within that time."""
        deadline_ns = self.clock() + int(timeout_s * 1e9)
        with self._news:
            while self.link is None and (left_ns := deadline_ns - self.clock()) > 0:
                self.check()
                self._news.wait(left_ns / 1e9)
        return self.link is not None

    def close(self) -> None:
        with self._news:
            if self._ended:
                return
            self._ended = True
            self._comeback.end()
            link = self.link
            if link is not None:
                self._break(link, "this client was closed")
        if link is not None:
            self._discard(link)
        self._comeback.join()
