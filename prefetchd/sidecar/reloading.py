"""SIGHUP: the configuration is read again, and what has changed in it is applied while serving.

Decides what counts at once and what has to wait for a restart, and says both in the log. A file
with a mistake changes nothing; of a namespace whose change is refused only who may use it and its
weight are new. What of a runtime can be changed is the runtime's to say.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import partial
from pathlib import Path

from prefetchd.config import limits_of, read_config, settings_of
from prefetchd.config_tables import Config
from prefetchd.engine import EngineError
from prefetchd.guarded import PredictorError
from prefetchd.layout import LayoutError
from prefetchd.options import Options
from prefetchd.registry import RegistryError
from prefetchd.sidecar import path_changes
from prefetchd.sidecar.namespace import Namespace, NamespaceSettings
from prefetchd.sidecar.server import Server
from prefetchd.store import StoreError

log = logging.getLogger("prefetchd")

_OF_OPENING = frozenset({"namespace", "arena", "books"})
_ACCESS = ("uids", "gids", "token")
_PLACE = ("path", "layout", "blocks", "salt")
_FIXED = ("socket", "socket_mode", "memory", "http")
_REFUSED = (StoreError, RegistryError, PredictorError, EngineError, ValueError, TypeError)


class Reloader:
    """`config`: what the daemon was started with."""

    def __init__(self, path: Path, config: Config, server: Server) -> None:
        self._path = path
        self._started = config
        self._server = server

    def reload(self) -> None:
        """Called in the loop's thread. What may take a while goes on beside the loop."""
        self._server.supervisor.reloading()
        try:
            config = read_config(self._path)
            spaces = {name: settings_of(space) for name, space in config.namespaces.items()}
            self._go_by(config, spaces)
        except (ValueError, LayoutError, OSError) as error:
            log.error("not reloaded: %s", error)
            self._done()
        except BaseException:  # a fault of ours, which the loop tells
            self._done()
            raise

    def _go_by(self, config: Config, spaces: dict[str, NamespaceSettings]) -> None:
        server = self._server
        server.limits = limits_of(config)
        before = dict(server.namespaces.settings)
        server.namespaces.configure(spaces)
        self._tell(config, before, spaces)
        todo = [(server.namespaces.open[n], s) for n, s in spaces.items() if self._is_open(n)]
        server.aside(partial(self._apply, todo))
        for name, settings in spaces.items():
            if not self._is_open(name):
                server.entrance.open(name, settings)
        server.aside(partial(server.later, self._done))  # which is done one after another

    def _is_open(self, name: str) -> bool:
        return name in self._server.namespaces.open

    def _done(self) -> None:
        self._server.supervisor.ready(self._server.status)

    def _tell(
        self,
        config: Config,
        before: dict[str, NamespaceSettings],
        spaces: dict[str, NamespaceSettings],
    ) -> None:
        log.info("reloaded %s: %s", self._path, ", ".join(spaces) or "no namespaces")
        old, new = self._started, config
        for what in _differing(old.daemon, new.daemon, _FIXED):
            log.warning("[daemon] %s: needs a restart", what)
        if old.made != new.made:
            log.warning("[made]: needs a restart")
        for name, now in spaces.items():
            if name not in before and not self._is_open(name):
                log.info("namespace %s: new, it is opened now", name)
            elif name in before and _differing(before[name], now, _ACCESS):
                log.info("namespace %s: who may use it has changed, for new clients", name)
        for name in before:
            if name not in self._server.namespaces.settings:
                log.warning("namespace %s: no new clients; open until a restart", name)

    def _apply(self, todo: list[tuple[Namespace, NamespaceSettings]]) -> None:
        for namespace, settings in todo:
            try:
                self._change(namespace, settings)
            except Exception:  # a predictor's, say; the others are changed all the same
                log.exception("namespace %s: not changed", namespace.name)

    def _change(self, namespace: Namespace, settings: NamespaceSettings) -> None:
        name = namespace.name
        for what in _differing(namespace.settings, settings, _PLACE):
            log.warning("namespace %s: %s: needs a restart", name, what)
        options = {
            field.name: getattr(settings.options, field.name)
            for field in fields(Options)
            if field.name not in _OF_OPENING
        }
        options["drain"] = path_changes.still_to_drain(settings, namespace.runtime.folders)
        try:
            changes = namespace.runtime.reconfigure(**options)
        except _REFUSED as error:
            log.error("namespace %s: not changed: %s", name, error)
            return
        for words in changes.applied:
            log.info("namespace %s: changed %s", name, words)
        for words in changes.later:
            log.warning("namespace %s: %s: needs a restart", name, words)
        path_changes.apply(name, namespace.runtime, settings)


def _differing(old: object, new: object, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(old, name) != getattr(new, name)]
