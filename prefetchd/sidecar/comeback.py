"""Attaching to a daemon, and again when it has gone: in a thread, ever less often.

Decides how long a daemon may take and how often it is tried. Refuses to know what a link is used
for, and what becomes of the one that broke.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from prefetchd.gpu import GpuError
from prefetchd.sidecar.conversation import Attachment
from prefetchd.sidecar.handshake import SidecarError, attach
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.protocol import Hello

log = logging.getLogger("prefetchd")

ATTACH_TIMEOUT_S = 5.0
PAUSE_S, PAUSE_MAX_S = 0.01, 1.0


class Comeback:
    """`attached` is called with every new attachment, before its link is used, and may raise
    SidecarError or GpuError to refuse it; `back` with the link, and says whether it was still
    wanted."""

    def __init__(
        self,
        path: Path,
        hello: Hello,
        attached: Callable[[Attachment], None],
        back: Callable[[Link], bool],
    ) -> None:
        self.why = ""
        """Why there is no daemon, while there is none."""
        self._path = path
        self._hello = hello
        self._attached = attached
        self._back = back
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, timeout_s: float) -> Link:
        """Raises SidecarError when there is no daemon, or it is not as it has to be; GpuError."""
        sock, attachment = attach(self._path, self._hello, timeout_s)
        try:
            self._attached(attachment)
            return Link(sock, attachment)
        except BaseException:
            sock.close()
            raise

    def begin(self, why: str, first: Callable[[], None]) -> None:
        """Call `first` and then try until the daemon is back, unless this has ended."""
        self.why = why
        if self.ended:
            return
        log.warning("%s: %s; every page is missing until it is back", self._path, why)
        self._thread = threading.Thread(
            target=self._come_back, args=(first,), name="prefetchd-attach", daemon=True
        )
        self._thread.start()

    def _come_back(self, first: Callable[[], None]) -> None:
        first()
        pause_s = PAUSE_S
        while not self.ended:
            try:
                link = self.attach(ATTACH_TIMEOUT_S)
            except (SidecarError, GpuError) as error:
                self.why = str(error)
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            if self._back(link):
                log.warning("%s: the daemon is back", self._path)
                return
            link.sock.close()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        """Try no more."""
        self._ended.set()

    def join(self) -> None:
        """Wait for its thread, which has ended or is about to, and let go of everybody."""
        if self._thread is not None:
            self._thread.join()
        self._attached = lambda _: None  # which leads to our owner, and from there back to us
        self._back = lambda _: False
