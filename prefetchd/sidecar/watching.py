"""What the daemon shows of itself: a picture of every namespace, and whether all is well.

Decides what counts as healthy and as ready. Refuses to know who looks and how it is shown. Pictures
are taken by the threads of those who look; the daemon's loop is only asked who is connected, which
also tells whether it still turns.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import msgspec
import numpy as np

import prefetchd
from prefetchd.engine import EngineError
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.server import Server
from prefetchd.stats import Stats

_PATIENCE_S = 2.0


class Verdict(msgspec.Struct, frozen=True):
    """`healthy`: what is open can be used. `ready`: and all that is configured is open, its paths
    proved at the start. `reasons`: why not. `notes`: what is no reason, and not as it should be."""

    healthy: bool
    ready: bool
    reasons: list[str]
    notes: list[str]


class Use(msgspec.Struct, frozen=True):
    """Of one namespace, by those who are connected: clients, tickets they hold, demands of theirs
    that wait."""

    clients: int = 0
    tickets: int = 0
    waiting: int = 0


class Space(msgspec.Struct, frozen=True):
    """A namespace that is open. `use`: None where that is not told, as to its own clients."""

    name: str
    fault: str
    layers: int
    page_bytes: int
    slot_bytes: int
    use: Use | None
    stats: Stats


class Picture(msgspec.Struct, frozen=True):
    """`taken_ns`: on a clock that only goes forward, for rates."""

    version: str
    process: int
    taken_ns: int
    uptime_s: float
    verdict: Verdict
    namespaces: list[Space]


def encode(picture: Picture) -> bytes:
    """As JSON. Samples are for who measures in this process; here there are none."""
    return msgspec.json.encode(picture, enc_hook=lambda _: [])


def decode(data: bytes) -> Picture:
    """Raises msgspec.DecodeError for what is no picture, or another version's."""
    return _DECODER.decode(data)


_DECODER = msgspec.json.Decoder(Picture, dec_hook=lambda _, values: np.array(values, np.int64))


class Watch:
    """Of a daemon's namespaces, from before they are opened; `server` once there is one."""

    def __init__(self, namespaces: Namespaces) -> None:
        self.server: Server | None = None
        self._namespaces = namespaces
        self._began_s = time.monotonic()

    def picture(self) -> Picture:
        uses = self._uses()
        spaces = [
            _space(namespace, (uses or {}).get(namespace.name, Use()))
            for namespace in list(self._namespaces.open.values())
        ]
        now_ns = time.monotonic_ns()
        return Picture(
            prefetchd.__version__,
            os.getpid(),
            now_ns,
            now_ns / 1e9 - self._began_s,
            self._judge(spaces, turns=uses is not None),
            spaces,
        )

    def _uses(self) -> dict[str, Use] | None:
        """By namespace; None if the loop does not answer."""
        server = self.server
        if server is None:
            return {}
        answer: dict[str, Use] = {}
        done = threading.Event()

        def look() -> None:
            answer.update(_uses_of(server))
            done.set()

        server.later(look)
        return answer if done.wait(_PATIENCE_S) else None

    def _judge(self, spaces: list[Space], *, turns: bool) -> Verdict:
        faults, notes = [], []
        if not turns:
            faults.append(f"the daemon's loop has not answered for {_PATIENCE_S:g} s")
        for space in spaces:
            if space.fault:
                faults.append(f"namespace {space.name}: {space.fault}")
            notes += _notes(space)
        there = {space.name for space in spaces}
        missing = [
            f"namespace {name}: configured, and not open yet"
            for name in sorted(self._namespaces.configured - there)
        ]
        if self.server is None:
            missing.append("the daemon is starting")
        return Verdict(not faults, not faults and not missing, [*faults, *missing], notes)


def _uses_of(server: Server) -> dict[str, Use]:
    """In the loop's thread."""
    clients, tickets = Counter[str](), Counter[str]()
    for connection in server.connections:
        if connection.session is not None:
            name = connection.session.namespace.name
            clients[name] += 1
            tickets[name] += connection.session.held
    return {
        name: Use(clients[name], tickets[name], namespace.waiting)
        for name, namespace in server.namespaces.open.items()
    }


def _space(namespace: Namespace, use: Use) -> Space:
    runtime = namespace.runtime
    stats = runtime.stats()
    return Space(
        namespace.name,
        _fault(namespace, stats),
        runtime.geometry.layers,
        runtime.page_bytes,
        runtime.slot_bytes,
        use,
        stats,
    )


def _fault(namespace: Namespace, stats: Stats) -> str:
    """Why it cannot be used at all; empty if it can."""
    try:
        namespace.runtime.engine.check()
    except EngineError as error:
        return str(error)
    if all(path.reading == "failed" for path in stats.paths):
        return "all its paths have failed: every page is a miss, until one answers again"
    return ""


def _notes(space: Space) -> list[str]:
    stats = space.stats
    notes = [
        f"namespace {space.name}, path {path.path}: {what} is {state}, {path.errors} errors so far"
        for path in stats.paths
        for what, state in (("reading", path.reading), ("writing", path.writing))
        if state != "healthy"
    ]
    if stats.store_writes.stopped:
        notes.append(f"namespace {space.name}: nothing is written: {stats.store_writes.stopped}")
    return notes
