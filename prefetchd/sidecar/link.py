"""One connection of a client. Decides how its socket is waited for; refuses to know by whom."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from contextlib import AbstractContextManager
from typing import Any

from prefetchd.sidecar.conversation import Attachment

READ_BYTES = 1 << 16
"""At a time. For more the allocator asks the kernel each time: 10 us instead of 1 a read."""
TICK_NS = 100_000_000
"""How often somebody who waits looks whether an answer is overdue."""


class Link:
    """One connection, until it ends."""

    def __init__(self, sock: socket.socket, attachment: Attachment) -> None:
        sock.settimeout(None)
        seconds, nanoseconds = divmod(TICK_NS, 10**9)
        tick = struct.pack("@ll", seconds, nanoseconds // 1000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        self.sock = sock
        self.attachment = attachment
        self.answers = attachment.answers
        self.look_ns = 0
        """When to look whether an answer is overdue."""

    def overdue(self, now_ns: int, lock: AbstractContextManager[Any]) -> bool:
        """Whether an answer is. `lock`: under which answers are expected."""
        self.look_ns = now_ns + TICK_NS
        with lock:
            return self.answers.overdue(now_ns)

    def readable(self, timeout_ns: int) -> bool:
        """Whether there is something to read now, or within that time."""
        return bool(self._poll(select.POLLIN, timeout_ns))

    def may_move(self, timeout_ns: int) -> bool:
        """Wait until something can be sent or read; whether it is to be read."""
        return bool(self._poll(select.POLLIN | select.POLLOUT, timeout_ns) & select.POLLIN)

    def ready(self) -> tuple[bool, bool]:
        """Whether something is to be read now, and whether the socket takes a large message now."""
        events = self._poll(select.POLLIN | select.POLLOUT, 0)
        return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)

    def _poll(self, mask: int, timeout_ns: int) -> int:
        poller = select.poll()
        poller.register(self.sock, mask)
        return sum(events for _, events in poller.poll(timeout_ns / 1e6))

    def hang_up(self) -> None:
        """Whoever reads here, or at the other end, hears that it is over."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
