"""A client's GPU buffers: who fills them, the daemon or this process itself.

Decides that the daemon pushes where both have the same GPU, that this process copies pages itself
where not, and that whoever asks is told which and why. Refuses to know CUDA, and how bytes travel.

An answer comes when the pages have arrived: the daemon has waited for its event on the host. So no
stream of this process needs to wait for a push, and no event has to be shared: one that its stream
waited for before the daemon had recorded it would let the stream go on at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prefetchd import gpu as contract
from prefetchd.devices.host import DONE, check_push
from prefetchd.gpu import GpuDevice, GpuError, Lent
from prefetchd.model import Slots
from prefetchd.sidecar.conversation import Answers, words_of
from prefetchd.sidecar.line import Line
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.protocol import Push, Share, Unshare
from prefetchd.sidecar.replies import Error, Reply, Shared
from prefetchd.sidecar.wire import frame

PUSH_NS = 30_000_000_000
"""Within this the daemon has opened a buffer, or pushed, or given one back."""


class RemotePush(contract.Push):
    """A push by the daemon. It ends when the daemon says so, or is gone; then rows may hold old
    bytes and new ones, and `wait` and `done` raise GpuError."""

    def __init__(self, line: Line, link: Link) -> None:
        self._line = line
        self._link: Link | None = link
        self._answer: Reply | None = None
        self.failed: Callable[[str], None] = lambda _: None

    def answered(self, reply: Reply) -> None:
        self._answer, self._link = reply, None  # and with it an arena that may be gone
        if isinstance(reply, Error):
            self.failed(reply.words)

    def sources_free(self) -> bool:
        if (link := self._link) is not None:
            self._line.collect(link)
        return self._answer is not None

    def done(self) -> bool:
        ended = self.sources_free()
        self._check()
        return ended

    def settle(self) -> None:
        """Wait until it has ended, well or not."""
        self._line.wait(lambda: self._answer is not None)

    def wait(self) -> None:
        self.settle()
        self._check()

    def order(self, stream: Any) -> None:
        """Waits on the host; whatever `stream` does afterwards finds the pages."""
        self.wait()

    def _check(self) -> None:
        if isinstance(self._answer, Error):
            raise GpuError(f"the daemon's push failed: {self._answer.words}; recompute these pages")


class _Buffer:
    """One that is lent, or could be. `known_to`: the connection, by its answers, over which the
    daemon knows it as `number`; `refused_by`: the one over which it does not take it."""

    def __init__(self, lent: Lent) -> None:
        self.lent = lent
        self.known_to: Answers | None = None
        self.refused_by: Answers | None = None
        self.number = 0
        self.pushes: list[RemotePush] = []

    def settle(self) -> None:
        pushes, self.pushes = self.pushes, []
        for push in pushes:
            push.settle()


class RemoteBuffers:
    """`note` is told once why the daemon does not push, or no longer."""

    def __init__(self, line: Line, note: Callable[[str], None]) -> None:
        self._line = line
        self._note = note
        self._lock = threading.RLock()  # taken before the line's
        self._buffers: list[_Buffer] = []
        self._leaving: dict[int, _Buffer] = {}  # by request
        self._left: list[_Buffer] = []
        self._refused_by: Answers | None = None
        self.engine = ""
        """What pushes at the daemon, in words; empty while nothing does."""

    @property
    def lent(self) -> bool:
        """Whether the daemon may be asked to push."""
        return bool(self._buffers)

    def buffer(self, gpu: GpuDevice, pages: int) -> Any:
        """Raises GpuError."""
        with self._lock:
            self._tidy()
            if not pages or not gpu.identity:
                return gpu.buffer(pages)
            try:
                array, lent = gpu.lend(pages)
            except GpuError as error:  # not everywhere can memory be exported
                array = gpu.buffer(pages)
                self._note(f"the daemon cannot push into a buffer ({error}): this process does")
                return array
            buffer = _Buffer(lent)
            self._buffers.append(buffer)
            if self._line.link is not None:
                self._share(gpu, buffer, self._line.link)
            return array

    def _share(self, gpu: GpuDevice, buffer: _Buffer, link: Link) -> bool:
        """Whether the daemon can write it. Asks at most once a connection."""
        if link.answers in (buffer.refused_by, self._refused_by):
            return False
        if buffer.known_to is link.answers:
            return True
        lent, numbers = buffer.lent, list[int]()

        def make(number: int) -> bytes:
            numbers.append(number)
            return frame(Share(number, lent.handle, lent.pages, gpu.identity))

        reply = self._line.answer(link, make, PUSH_NS)
        if isinstance(reply, Shared):
            buffer.known_to, buffer.number, self.engine = link.answers, numbers[0], reply.engine
            return True
        buffer.refused_by = link.answers
        words = words_of(reply)
        if not link.attachment.lost:
            if isinstance(reply, Error) and reply.code == "unable":
                self._refused_by, self.engine = link.answers, ""
            self._note(f"the daemon does not push into GPU buffers ({words}): this process does")
        return False

    def push(
        self,
        gpu: GpuDevice,
        link: Link,
        ticket: int,
        slots: Slots,
        buffer: Any,
        start: int,
        *,
        skip_missing: bool,
    ) -> contract.Push | None:
        """None if this process is to do it. Raises ValueError."""
        with self._lock:
            self._tidy()
            for known in self._buffers:
                row = gpu.place_in(known.lent, buffer)
                if row is not None:
                    break
            else:
                return None
            if not self._share(gpu, known, link):
                known.settle()  # what the daemon writes there still, it writes before
                return None
            count = check_push(
                slots,
                start,
                len(buffer),
                staging_slots=len(gpu.staging),
                batch_slots=gpu.batch_slots,
            )
            if not count:
                return DONE
            self._make_room(known, link)
            return self._ask(known, link, ticket, row + start, skip_missing=skip_missing)

    def _make_room(self, buffer: _Buffer, link: Link) -> None:
        """Wait for the oldest pushes while as many are under way as the daemon takes."""
        buffer.pushes = [push for push in buffer.pushes if not push.sources_free()]
        waiting = [push for one in self._buffers for push in one.pushes]
        most = link.attachment.welcome.limits.pushes
        for push in waiting[: max(0, len(waiting) - most + 1)]:
            push.settle()

    def _ask(
        self, buffer: _Buffer, link: Link, ticket: int, start: int, *, skip_missing: bool
    ) -> RemotePush:
        push, number = RemotePush(self._line, link), self._line.number()

        def failed(words: str) -> None:
            self._refused_by, self.engine = link.answers, ""
            if not link.attachment.lost:
                self._note(f"the daemon's push failed ({words}): this process pushes from now on")

        push.failed = failed
        buffer.pushes.append(push)
        body = frame(Push(number, ticket, buffer.number, start, skip_missing))
        self._line.ask(link, number, body, push.answered, PUSH_NS)
        return push

    def settle(self) -> None:
        """Wait until the daemon writes nowhere."""
        with self._lock:
            for buffer in self._buffers:
                buffer.settle()

    # --- the end of buffers ---

    def _tidy(self) -> None:
        """Take back what nobody uses any more; its memory is freed when the daemon has let go."""
        self._left.clear()
        unused = [buffer for buffer in self._buffers if not buffer.lent.is_used]
        if unused:
            self._buffers = [buffer for buffer in self._buffers if buffer not in unused]
            self._take_back(unused)

    def _take_back(self, buffers: list[_Buffer]) -> None:
        link = self._line.link
        for buffer in buffers:
            if link is None or buffer.known_to is not link.answers:
                continue  # the daemon lets go of it by itself
            number = self._line.number()
            self._leaving[number] = buffer

            def taken(_: Reply, number: int = number) -> None:
                if number in self._leaving:  # freeing GPU memory waits for the GPU: not here
                    self._left.append(self._leaving.pop(number))

            self._line.ask(link, number, frame(Unshare(number, buffer.number)), taken, PUSH_NS)

    def close(self) -> None:
        """Return when the daemon has let go of all buffers, or is gone."""
        with self._lock:
            buffers, self._buffers = self._buffers, []
            if self._line.link is not None:
                self._take_back(buffers)
                self._line.wait(lambda: not self._leaving)


def pushed_by(own: str, daemons: str) -> str:
    """What brings pages to this process's buffers, in words."""
    return f"the daemon's {daemons}, into buffers of this process" if daemons else own
