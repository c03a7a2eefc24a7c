"""A tenant of the daemon: a runtime with a store and an arena of its own, and who may use it.

Decides who is let in, and what a namespace is that was not known when the daemon started. Nothing
is shared between two of them but the daemon's one thread. Refuses to know sockets and messages.
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

from prefetchd.assembly import Options
from prefetchd.layout import Layout
from prefetchd.opening import open_runtime
from prefetchd.runtime import Runtime
from prefetchd.sidecar.arena import StagingArena
from prefetchd.sidecar.drives import DriveGate
from prefetchd.sidecar.memory import Memory
from prefetchd.sidecar.peers import Peer
from prefetchd.sidecar.protocol import Hello
from prefetchd.sidecar.pushes import Pusher
from prefetchd.sidecar.told import layout_told, payload_bytes
from prefetchd.store import StoreError

_PUT_THREADS = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> None:
    """Raises ValueError: it is a folder's name, and must stay one."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a namespace: letters, digits, '.', '_', '-'")


class DeniedError(Exception):
    """Not there, or not this client's: it is not told which."""


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """One namespace: where its store is, and who may use it.

    `layout` and `blocks`: of a store that is to be made. `path` None: kept in memory, for tests.
    `uids`, `gids`: who may connect (empty both: the daemon's own user). `token`: what a client has
    to know besides (empty: nothing). `weight`: its share of thread and drives beside others'.
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
        self.opening = secrets.token_bytes(16)
        self.fingerprint = runtime.fingerprint
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
    try:
        runtime = open_runtime(
            settings.path,
            settings.layout,
            blocks=settings.blocks,
            fill=settings.fill,
            options=replace(settings.options, namespace=name, arena=arena),
            progress=progress,
        )
    except BaseException:
        arena.close()
        raise
    return Namespace(name, runtime, arena, settings)


class Namespaces:
    """All that there are or may be. `made_in`: the folder in which a client of the daemon's own
    user may have namespaces made, at most `most` in all, each for at most `bytes_max` bytes and
    with at most `staging_max` of staging; None: nobody may. `template`: how those are opened.
    `memory`: what all may take together."""

    def __init__(
        self,
        settings: dict[str, NamespaceSettings],
        own_uid: int,
        made_in: Path | None = None,
        template: Options | None = None,
        most: int = 64,
        bytes_max: int = 64 << 30,
        staging_max: int = 1 << 30,
        memory: Memory | None = None,
    ) -> None:
        self.memory = memory or Memory()
        self.settings = dict(settings)
        self._configured = set(settings)
        self.open: dict[str, Namespace] = {}
        self.on_open: list[Callable[[Namespace], None]] = []
        """Told of each before anybody uses it."""
        self._own_uid = own_uid
        self._made_in = made_in
        self._template = template or Options()
        self._most = most
        self._bytes_max = bytes_max
        self._staging_max = staging_max

    def admit(self, namespace: Namespace) -> None:
        """From here on it is open."""
        for told in self.on_open:
            told(namespace)
        self.open[namespace.name] = namespace

    @property
    def configured(self) -> frozenset[str]:
        """Names of those that the configuration has."""
        return frozenset(self._configured)

    def configure(self, settings: dict[str, NamespaceSettings]) -> None:
        """Go by these from now on: for who is let in, shares, and what is not open
        yet. Those that clients have had made stay."""
        made = {name: one for name, one in self.settings.items() if name not in self._configured}
        self.settings = {**made, **settings}
        self._configured = set(settings)
        for name in self._configured & set(self.open):
            self.open[name].weigh(settings[name].weight)

    def settings_for(self, hello: Hello, peer: Peer) -> NamespaceSettings:
        """Of the namespace that a client asks for. Raises DeniedError, StoreError,
        LayoutError, ValueError."""
        known = self.settings.get(hello.namespace)
        if known is None and self._may_make(hello, peer):
            return self._new(hello)
        if known is None or not known.admits(peer, hello.token, self._own_uid):
            raise self._denied(hello, peer)
        return known

    def settings_to_erase(self, hello: Hello, peer: Peer) -> NamespaceSettings:
        """As `settings_for`, for who may erase it: the daemon's own user, root, and those whom its
        settings name, with its token."""
        known = self.settings.get(hello.namespace)
        if known is not None:
            trusted = peer.uid in (0, self._own_uid)
            named = peer.uid in known.erasers and known.knows(hello.token)
            if trusted or named:
                return known
        elif self._may_make(hello, peer):
            return self._new(hello)
        raise self._denied(hello, peer)

    def _denied(self, hello: Hello, peer: Peer) -> DeniedError:
        return DeniedError(
            f"namespace {hello.namespace!r} is not there, or not for uid {peer.uid} with this "
            "token; see the daemon's configuration"
        )

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
            payload = payload_bytes(path)
            return NamespaceSettings(path, options=self._options(payload))
        if shape.layers * shape.page_bytes * hello.blocks > self._bytes_max:
            raise StoreError(
                f"{hello.blocks} blocks of {shape.layers} pages of {shape.page_bytes} bytes are "
                f"more than the {self._bytes_max} bytes that a client may have made; make the "
                "store with `prefetchd store create`, or configure the namespace"
            )
        payload = hello.blocks * shape.layers * shape.page_bytes or payload_bytes(path)
        blocks, options = hello.blocks or None, self._options(payload)
        return NamespaceSettings(path, layout_told(shape), blocks, False, options)

    def _options(self, payload_bytes: int) -> Options:
        """Within the bounds of what a client may have made, however large the store is."""
        template = self._template
        quota, staging = template.quota_bytes, template.staging_bytes
        if payload_bytes > self._bytes_max:
            quota = min(quota or self._bytes_max, self._bytes_max)
        if (staging or payload_bytes // 4) > self._staging_max:
            staging = self._staging_max
        return replace(template, quota_bytes=quota, staging_bytes=staging)

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
