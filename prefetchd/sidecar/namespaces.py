"""All tenants of the daemon that there are or may be.

Decides who is let in, and what a namespace is that was not known when the daemon started. Refuses
to know sockets, and when namespaces are opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prefetchd.options import Options
from prefetchd.sidecar.memory import Memory
from prefetchd.sidecar.namespace import Namespace, NamespaceSettings, check_name
from prefetchd.sidecar.peers import Peer
from prefetchd.sidecar.protocol import Hello
from prefetchd.sidecar.told import layout_told, payload_bytes
from prefetchd.store import StoreError


class DeniedError(Exception):
    """Not there, or not this client's: it is not told which."""


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
        self._withdrawn: set[str] = set()
        """Taken out of the configuration since the start: nobody's, and not to be made."""
        self.open: dict[str, Namespace] = {}
        self.on_open: list[Callable[[Namespace], None]] = []
        """Told of each before anybody uses it."""
        self._own_uid = own_uid
        self._made_in = made_in
        self._template = template or Options()
        self._most = most
        self._bytes_max = bytes_max
        self._staging_max = staging_max

    def admit(self, namespace: Namespace, settings: NamespaceSettings | None = None) -> None:
        """From here on it is open. `settings`: its own, if it is one that a client had made."""
        if settings is not None and namespace.name not in self._withdrawn:
            self.settings.setdefault(namespace.name, settings)
        for told in self.on_open:
            told(namespace)
        self.open[namespace.name] = namespace

    @property
    def shared(self) -> bool:
        """Whether there are clients of several."""
        return sum(namespace.clients > 0 for namespace in self.open.values()) > 1

    @property
    def configured(self) -> frozenset[str]:
        """Names of those that the configuration has."""
        return frozenset(self._configured)

    def configure(self, settings: dict[str, NamespaceSettings]) -> None:
        """Go by these from now on: for who is let in, shares, and what is not open
        yet. Those that clients have had made stay."""
        made = {name: one for name, one in self.settings.items() if name not in self._configured}
        self.settings = {**made, **settings}
        self._withdrawn = (self._withdrawn | self._configured) - set(settings)
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
        own = self._made_in is not None and peer.uid == self._own_uid and not hello.token
        return own and hello.namespace not in self._withdrawn

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
