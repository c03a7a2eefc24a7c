"""A tenant of the daemon: a runtime with a store and an arena of its own, and who may use it.

Decides who is let in, and what a namespace is that was not known when the daemon started. Nothing
is shared between two of them but the daemon's one thread. Refuses to know sockets and messages.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from prefetchd.assembly import Options
from prefetchd.layout import Layout, uniform
from prefetchd.opening import open_runtime
from prefetchd.runtime import Runtime
from prefetchd.sidecar.arena import StagingArena
from prefetchd.sidecar.protocol import Hello, Shape
from prefetchd.store import StoreError

_PUT_THREADS = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python does not name it
_GROUPS_BYTES = 1 << 16


def check_name(name: str) -> None:
    """Raises ValueError: it is a folder's name, and must stay one."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a namespace: letters, digits, '.', '_', '-'")


class DeniedError(Exception):
    """Not there, or not this client's: it is not told which."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a socket, as the kernel says."""

    pid: int
    uid: int
    gids: frozenset[int]


def peer_of(connection: socket.socket) -> Peer:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("=iII", credentials)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # before Linux 4.13, or more groups than anybody has: the first one it is
        raw = b""
    return Peer(pid, uid, frozenset([gid, *np.frombuffer(raw, np.uint32).tolist()]))


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """One namespace: where its store is, and who may use it.

    `layout` and `blocks`: of a store that is to be made. `path` None: kept in memory, for tests.
    `uids`, `gids`: who may connect (empty both: the daemon's own user). `token`: what a client has
    to know besides (empty: nothing).
    """

    path: Path | None
    layout: Layout | None = None
    blocks: int | None = None
    fill: bool = True
    options: Options = field(default_factory=Options)
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    token: str = ""

    def admits(self, peer: Peer, token: str, own_uid: int) -> bool:
        uids = self.uids if self.uids or self.gids else {own_uid}
        known = peer.uid in uids or bool(self.gids & peer.gids)
        return known and hmac.compare_digest(token.encode(), self.token.encode())


class Namespace:
    """An open one. Made by `open_namespace`; closed once nobody uses it."""

    def __init__(self, name: str, runtime: Runtime, arena: StagingArena) -> None:
        self.name = name
        self.runtime = runtime
        self.arena = arena
        self.opening = secrets.token_bytes(16)
        self.fingerprint = runtime.fingerprint
        self.waiting = 0
        """Demands that have no answer yet; while there are any, the loop attends to the device."""
        self.attended = False
        """Whether the loop does."""
        self.pool = ThreadPoolExecutor(_PUT_THREADS, f"prefetchd-put-{name}")
        self.growing_pool = ThreadPoolExecutor(_PUT_THREADS, f"prefetchd-grow-{name}")
        """Of their own, since sealing may make the room that opening waits for."""

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
        finally:
            try:
                self.runtime.close()
            finally:
                self.arena.close()


def open_namespace(
    name: str, settings: NamespaceSettings, progress: Callable[[int, int], None] | None = None
) -> Namespace:
    """Raises StoreError, DeviceError, GpuError, RegistryError."""
    arena = StagingArena(name)
    runtime = open_runtime(
        settings.path,
        settings.layout,
        blocks=settings.blocks,
        fill=settings.fill,
        options=replace(settings.options, namespace=name, arena=arena),
        progress=progress,
    )
    return Namespace(name, runtime, arena)


@dataclass(frozen=True, slots=True)
class _Told(Layout):
    """A layout of which only what a store needs is known: a client told it."""

    told: bytes = b""

    def fingerprint(self) -> bytes:
        return self.told


def layout_told(shape: Shape) -> Layout:
    """Raises LayoutError for sizes that no layout has."""
    plain = uniform(shape.layers, shape.page_bytes)
    return _Told(shape.name, plain.groups, plain.block_tokens, told=shape.fingerprint)


class Namespaces:
    """All that there are or may be. `made_in`: the folder in which a client of the daemon's own
    user may have namespaces made, at most `most` in all, each for at most `bytes_max` bytes; None:
    nobody may. `template`: how those are opened."""

    def __init__(
        self,
        settings: dict[str, NamespaceSettings],
        own_uid: int,
        made_in: Path | None = None,
        template: Options | None = None,
        most: int = 64,
        bytes_max: int = 64 << 30,
    ) -> None:
        self.settings = dict(settings)
        self._configured = set(settings)
        self.open: dict[str, Namespace] = {}
        self._own_uid = own_uid
        self._made_in = made_in
        self._template = template or Options()
        self._most = most
        self._bytes_max = bytes_max

    def configure(self, settings: dict[str, NamespaceSettings]) -> None:
        """Go by these from now on: for who is let in, and for what is not open yet. Those that
        clients have had made stay."""
        made = {name: one for name, one in self.settings.items() if name not in self._configured}
        self.settings = {**made, **settings}
        self._configured = set(settings)

    def settings_for(self, hello: Hello, peer: Peer) -> NamespaceSettings:
        """Of the namespace that a client asks for. Raises DeniedError, StoreError,
        LayoutError, ValueError."""
        known = self.settings.get(hello.namespace)
        if known is None and self._may_make(hello, peer):
            return self._new(hello)
        if known is None or not known.admits(peer, hello.token, self._own_uid):
            raise DeniedError(
                f"namespace {hello.namespace!r} is not there, or not for uid {peer.uid} with this "
                "token; see the daemon's configuration"
            )
        return known

    def _may_make(self, hello: Hello, peer: Peer) -> bool:
        return self._made_in is not None and peer.uid == self._own_uid and not hello.token

    def _new(self, hello: Hello) -> NamespaceSettings:
        assert self._made_in is not None
        check_name(hello.namespace)
        if len(self.settings) >= self._most:
            raise StoreError(f"{len(self.settings)} namespaces are there, the most allowed")
        path = self._made_in / hello.namespace
        shape = hello.shape
        if shape is None:
            return NamespaceSettings(path, options=self._template)
        if shape.layers * shape.page_bytes * hello.blocks > self._bytes_max:
            raise StoreError(
                f"{hello.blocks} blocks of {shape.layers} pages of {shape.page_bytes} bytes are "
                f"more than the {self._bytes_max} bytes that a client may have made; make the "
                "store with `prefetchd store create`, or configure the namespace"
            )
        blocks = hello.blocks or None
        return NamespaceSettings(path, layout_told(shape), blocks, False, self._template)

    def close(self) -> list[str]:
        """Close all; what could not be closed well, in words."""
        failures = []
        for namespace in self.open.values():
            try:
                namespace.close()
            except Exception as error:  # the others are to be closed all the same
                failures.append(f"namespace {namespace.name}: {error}")
        self.open.clear()
        return failures
