"""One HTTP connection that does not wait for ever, and makes room for the next.

Decides how long a connection may be there without a whole request, and which one goes when there
are too many. Refuses to know what is asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 5.0


class PatientProtocol(H11Protocol):
    """uvicorn waits for a first request without end, and counts who never sends one as a client."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def idle_since_s(self) -> float:
        """When it last had nothing to answer, on the loop's clock."""
        return self._deadline.when() if self._deadline is not None else self.loop.time() + REQUEST_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        most = self.limit_concurrency
        if most is not None and len(self.connections) >= most:
            self._make_room()

    def _make_room(self) -> None:
        """The one that has been idle for longest goes, so that this one is answered."""
        others = [one for one in self.connections if one is not self]
        idle = [one for one in others if isinstance(one, PatientProtocol) and one.is_idle]
        if idle:
            oldest = min(idle, key=lambda one: one.idle_since_s)
            self.connections.discard(oldest)  # at once: its end is told later
            oldest.transport.abort()

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(REQUEST_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self.transport.close()  # what was answered still goes out, unless room is wanted

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()
        if not self.is_idle:  # the next request was here already
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
