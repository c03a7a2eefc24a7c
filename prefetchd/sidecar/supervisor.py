"""What is told to whoever started the daemon, if that is systemd (sd_notify): ready, reloading,
stopping, alive.

Decides what is said and how often. Datagrams to the socket that `$NOTIFY_SOCKET` names, as
sd_notify(3) describes them; without it nothing is said. A supervisor that does not listen changes
nothing for the daemon.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("prefetchd")

_STOP_US = 300_000_000
"""So long may finishing the writes take, without a sign of life."""


class Supervisor:
    """`rest_s`: how long the loop may sleep at most so that `beat` comes often enough; None: as
    long as it likes."""

    def __init__(
        self, environment: Mapping[str, str], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._clock = clock
        self.rest_s = _half_of_the_watchdog_s(environment) if address else None
        self._beaten_ns = clock()

    def ready(self, status: str) -> None:
        self._say("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """`ready` must follow. The time is for units of Type=notify-reload."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={self._clock() // 1000}")

    def stopping(self) -> None:
        status = "STATUS=finishing the writes"
        bounds = f"EXTEND_TIMEOUT_USEC={_STOP_US}", f"WATCHDOG_USEC={_STOP_US}"
        self._say("STOPPING=1", status, *(bounds if self.rest_s else bounds[:1]))

    def beat(self) -> None:
        """The loop goes round. Called at every turn; says so as often as is needed."""
        if self.rest_s is None:
            return
        now_ns = self._clock()
        if now_ns - self._beaten_ns >= self.rest_s * 0.9e9:
            self._beaten_ns = now_ns
            self._say("WATCHDOG=1")

    def _say(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("$NOTIFY_SOCKET %r does not listen: %s", self._address, error.strerror)


def _half_of_the_watchdog_s(environment: Mapping[str, str]) -> float | None:
    """None: nobody watches, or another process is meant."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    watchdog_us = environment.get("WATCHDOG_USEC", "")
    return int(watchdog_us) / 2e6 if watchdog_us.isdecimal() and int(watchdog_us) else None


NOBODY = Supervisor({})
