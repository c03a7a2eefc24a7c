"""The line to a daemon inside an event loop: a reader callback, futures, and a task to come back.

Decides what happens when the line breaks, as `line` does for threads. Refuses to know what is
asked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from prefetchd.gpu import GpuError
from prefetchd.sidecar.comeback import ATTACH_TIMEOUT_S, PAUSE_MAX_S, PAUSE_S
from prefetchd.sidecar.conversation import Answered, Attachment, Use, release_frame, used_frames
from prefetchd.sidecar.handshake import SidecarError, attach
from prefetchd.sidecar.link import READ_BYTES, TICK_NS, Link
from prefetchd.sidecar.notices import WAIT_S
from prefetchd.sidecar.protocol import Hello
from prefetchd.sidecar.replies import Reply
from prefetchd.sidecar.wire import ProtocolError

log = logging.getLogger("prefetchd")

_NOTES_S = 0.00025


class LoopLine:
    """What tickets wait on; they are answered before anybody sees them."""

    def __init__(self, path: Path, hello: Hello, attached: Callable[[Attachment], None]) -> None:
        self.lock = threading.RLock()
        self.clock = time.monotonic_ns
        self.awaiting: list[Callable[[], object]] = []
        self.breaks = self.uses_dropped = 0
        self.away = "not connected yet"
        self._path = path
        self._hello = hello
        self._attached = attached
        self._numbers = count(1)
        self._link: Link | None = None
        self._out = bytearray()
        self._writing = False  # the loop is to say when the daemon takes more
        self._changed: asyncio.Future[None] | None = None
        self._closed = False
        self._comeback: asyncio.Task[None] | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._given_back: list[int] = []
        self._uses: list[Use] = []
        self._soon: asyncio.TimerHandle | None = None

    async def connect(self, timeout_s: float) -> None:
        """Raises SidecarError, GpuError."""
        sock, attachment = await asyncio.to_thread(attach, self._path, self._hello, timeout_s)
        try:
            self._attached(attachment)
            link = Link(sock, attachment)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        if self._closed:
            sock.close()
            return
        self._link, self.away = link, ""
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._read, link)
        self._tick = loop.call_later(TICK_NS / 1e9, self._look)
        self._tell()

    # --- asking ---

    def attachment(self) -> Attachment | None:
        """None while the daemon is away. Raises SidecarError once this end was closed."""
        self.check()
        return self._link.attachment if self._link else None

    def number(self) -> int:
        return next(self._numbers)

    def ask(
        self, number: int, body: bytes, patience_ns: int, answered: Answered | None = None
    ) -> asyncio.Future[Reply]:
        """Send a request; the reply, or an Error if the line breaks. `answered` hears it first."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def settle(reply: Reply) -> None:
            if answered is not None:
                answered(reply)
            if not future.done():
                future.set_result(reply)
            self._tell()

        assert self._link is not None
        self._link.answers.expect(number, settle, self.clock() + patience_ns)
        self.send(body)
        return future

    async def answer(self, make: Callable[[int], bytes], patience_ns: int) -> Reply:
        number = self.number()
        return await self.ask(number, make(number), patience_ns)

    def send(self, data: bytes) -> None:
        """Sent at once, or as soon as the daemon takes it; in order. Takes notices along."""
        if self._link is not None:
            if self._uses:
                self._out += used_frames(self._uses, self._link.attachment.welcome.limits.ids)
                self._uses = []
            if self._given_back:
                self._out += release_frame(self._given_back)
                self._given_back = []
            self._out += data
            if not self._writing:
                self._flush(self._link)

    def _flush(self, link: Link) -> None:
        try:
            while self._out:
                del self._out[: link.sock.send(self._out)]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                asyncio.get_running_loop().add_writer(link.sock, self._flush, link)
        except OSError as error:
            self._break(f"the daemon has gone: {error.strerror}")
        else:
            self._stop_writing(link)

    def _stop_writing(self, link: Link) -> None:
        if self._writing:
            self._writing = False
            asyncio.get_running_loop().remove_writer(link.sock)

    async def news(self) -> None:
        """Return when something was answered, or the line broke or came back."""
        self.check()
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    # --- what tickets know ---

    def wait(self, done: Callable[[], bool], deadline_ns: int | None = None) -> bool:
        """Nothing to wait for: what this client gives out has been answered."""
        return done()

    def wake(self) -> None:
        """The loop does what there is to do."""

    def resolved(self) -> None:
        """Whoever waits is told by a future."""

    def release(self, number: int) -> None:
        self.check()
        if self._link is not None:
            self._link.answers.forget(number)
            self._given_back.append(number)
            self._send_soon(WAIT_S)

    def note(self, use: Use) -> None:
        """Pages were read in place. The daemon only learns from that: while it takes nothing, it is
        not told."""
        if self._writing:
            self.uses_dropped += 1
            return
        self._uses.append(use)
        self._send_soon(_NOTES_S)

    def _send_soon(self, seconds: float) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(seconds, self._send_notices)

    def _send_notices(self) -> None:
        self._soon = None
        if self._given_back or self._uses:
            self.send(b"")

    def check(self) -> None:
        """Raises SidecarError if this end was closed."""
        if self._closed:
            raise SidecarError("the engine is closed: this client was closed")

    # --- reading, breaking, coming back ---

    def _read(self, link: Link) -> None:
        try:
            data = link.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(f"the daemon has gone: {error.strerror}")
            return
        if not data:
            self._break("the daemon has gone: it closed the connection")
            return
        try:
            link.answers.feed(data)
        except ProtocolError as error:
            self._break(str(error))

    def _look(self) -> None:
        if self._link is None:
            return
        if self._link.answers.overdue(self.clock()):
            self._break("the daemon does not answer in time")
            return
        self._tick = asyncio.get_running_loop().call_later(TICK_NS / 1e9, self._look)

    def _break(self, why: str) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        self.away = link.attachment.lost = why
        loop = asyncio.get_running_loop()
        loop.remove_reader(link.sock)
        self._stop_writing(link)
        link.sock.close()
        if self._tick is not None:
            self._tick.cancel()
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self.uses_dropped += len(self._uses)
        self._given_back, self._uses = [], []
        self._out.clear()
        self.breaks += 1
        link.answers.lost(why)
        self._tell()
        if not self._closed:
            log.warning("%s: %s; every page is missing until it is back", self._path, why)
            self._comeback = loop.create_task(self._come_back())

    async def _come_back(self) -> None:
        pause_s = PAUSE_S
        while not self._closed:
            try:
                await self.connect(ATTACH_TIMEOUT_S)
            except (SidecarError, GpuError) as error:
                self.away = str(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            else:
                log.warning("%s: the daemon is back", self._path)
                return

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._break("this client was closed")
        comeback = self._comeback
        if comeback is not None:
            comeback.cancel()
            await asyncio.gather(comeback, return_exceptions=True)
        self._attached = lambda _: None  # which leads to our owner, and from there back to us
