"""A tenant of the daemon: a runtime with a store and an arena of its own, and who may use it.

Decides what belongs to one: nothing is shared between two of them but the daemon's one thread, its
memory and the drives. Refuses to know the others, sockets and messages.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.layout import Layout
from prefetchd.opening import open_runtime
from prefetchd.options import Options
from prefetchd.runtime import Runtime
from prefetchd.sidecar import path_changes
from prefetchd.sidecar.arena import StagingArena
from prefetchd.sidecar.arrivals import Arrivals
from prefetchd.sidecar.drives import DriveGate
from prefetchd.sidecar.marks import IN_ORDER, Readers
from prefetchd.sidecar.memory import Memory
from prefetchd.sidecar.peers import Peer
from prefetchd.sidecar.pushes import Pusher

_PUT_THREADS = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> None:
    """Raises ValueError: it is a folder's name, and must stay one."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a namespace: letters, digits, '.', '_', '-'")


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """One namespace: where its store is, and who may use it.

    `layout` and `blocks`: of a store that is to be made. `path` None: kept in memory, for tests.
    `uids`, `gids`: who may connect (empty both: the daemon's own user). `token`: what a client has
    to know besides (empty: nothing). `weight`: its share of thread and drives beside others'.
    `detach`, `replace` (old, new): paths of its store, see `path_changes`.
    """

    path: Path | None
    layout: Layout | None = None
    blocks: int | None = None
    fill: bool = True
    options: Options = field(default_factory=Options)
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    token: str = ""
    weight: int = 1
    salt: bytes = b""
    erasers: frozenset[int] = frozenset()
    detach: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()

    def admits(self, peer: Peer, token: str, own_uid: int) -> bool:
        uids = self.uids if self.uids or self.gids else {own_uid}
        known = peer.uid in uids or bool(self.gids & peer.gids)
        return self.knows(token) and known

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


class Namespace:
    """An open one. Made by `open_namespace`; closed once nobody uses it."""

    def __init__(
        self, name: str, runtime: Runtime, arena: StagingArena, settings: NamespaceSettings
    ) -> None:
        self.name = name
        self.settings = settings
        """As it was opened with."""
        self.weight = settings.weight
        self.gate: DriveGate | None = None
        """What its reads and writes go through, if it has a drive."""
        self.clients = self.write_bytes = 0
        """How many there are, and their write arenas' size together."""
        self.runtime = runtime
        self.arena = arena
        self.readers: Readers | None = None
        """Clients that read without asking, if they may: not where pages leave once they were
        read."""
        if IN_ORDER and settings.options.core.retain:
            self.readers = runtime.read_in_place(Readers(runtime.slots))
        self.opening = secrets.token_bytes(16)
        self.fingerprint = runtime.fingerprint
        self.arrivals = Arrivals(runtime.engine, runtime.page_bytes)
        self.waiting = 0
        """Demands that have no answer yet; while there are any, the loop attends to the device."""
        self.attended = False  # whether the loop does
        self.pool = ThreadPoolExecutor(_PUT_THREADS, f"prefetchd-put-{name}")
        self.growing_pool = ThreadPoolExecutor(_PUT_THREADS, f"prefetchd-grow-{name}")
        """Of its own, since sealing may make the room that opening waits for."""
        self.pusher = Pusher(runtime.gpu, name)
        self.closing: list[Callable[[], None]] = []
        """To be called when it has been closed."""

    def enter(self, clients: int, write_bytes: int) -> None:
        """So many more (or fewer) clients use it, with write arenas of so many bytes."""
        self.clients += clients
        self.write_bytes += write_bytes
        if self.gate is not None:
            self.gate.attend(self.clients > 0)

    def weigh(self, weight: int) -> None:
        """Have another share from now on."""
        self.weight = weight
        if self.gate is not None:
            self.gate.set_weight(weight)

    def salted(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What the store calls blocks with these keys, (keys, 16): who does not know the salt
        cannot tell from the medium which tokens there are."""
        if not self.settings.salt:
            return keys
        names = [blake2b(key, digest_size=16, key=self.settings.salt).digest() for key in keys]
        return np.frombuffer(b"".join(names), np.uint8).reshape(keys.shape)

    def let_go_of_drives(self) -> None:
        """Others need not wait for it."""
        if self.gate is not None:
            self.gate.close()

    @property
    def device_fd(self) -> int:
        """Readable while the device has something to tell."""
        return self.runtime.engine.driver.device.fileno()

    @property
    def extent_bytes(self) -> int:
        return self.runtime.geometry.layers * self.runtime.page_bytes

    def close(self) -> None:
        """Finish the writes and mark the store clean. Raises StoreError if that cannot be."""
        try:
            self.growing_pool.shutdown(cancel_futures=True)
            self.pool.shutdown(cancel_futures=True)
            self.pusher.close()
        finally:
            try:
                self.runtime.close()
            finally:
                self.let_go_of_drives()
                self.arena.close()
                for end in self.closing:
                    end()


def open_namespace(
    name: str,
    settings: NamespaceSettings,
    progress: Callable[[int, int], None] | None = None,
    memory: Memory | None = None,
) -> Namespace:
    """Raises StoreError, DeviceError, GpuError, RegistryError."""
    arena = StagingArena(name, memory)
    drain = path_changes.still_to_drain(settings)
    try:
        runtime = open_runtime(
            settings.path,
            settings.layout,
            blocks=settings.blocks,
            fill=settings.fill,
            options=replace(
                settings.options, namespace=name, arena=arena, books=arena.books, drain=drain
            ),
            progress=progress,
        )
    except BaseException:
        arena.close()
        raise
    path_changes.apply(name, runtime, settings)
    return Namespace(name, runtime, arena, settings)
