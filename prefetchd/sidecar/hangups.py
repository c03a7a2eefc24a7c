"""SIGHUP, from before there is anybody to act on it.

Decides that one that comes early is acted on once that is possible. Refuses to know what it means.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial


class Hangups:
    """Called in the main thread, as signal handlers are."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None
        self._came = False

    def listen(self, *, unless_ignored: bool) -> Callable[[], object]:
        """From here on the signal ends nothing by itself. What undoes that. `unless_ignored`: a
        process that ignores it (nohup) goes on doing so."""
        before = signal.getsignal(signal.SIGHUP)
        if not (unless_ignored and before is signal.SIG_IGN):
            signal.signal(signal.SIGHUP, lambda *_: self._take())
        return partial(signal.signal, signal.SIGHUP, before)

    def go_to(self, act: Callable[[], None]) -> None:
        """What is to be done, at once if it has come already."""
        self._act = act
        if self._came:
            act()

    def _take(self) -> None:
        self._came = True
        if self._act is not None:
            self._act()
