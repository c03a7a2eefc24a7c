"""Erasing a namespace while its daemon serves: out of use, out of its files, and made anew.

Decides who may, and in which order it goes: nobody finds anything from the moment it is asked for,
its writes end, its files go, an empty store takes their place, and only then is it answered.
Whoever asks for the namespace meanwhile waits. Others are not waited for and do not wait: this has
a thread of its own. An open namespace is erased where it is open, whatever the configuration has
come to say. Refuses to know frames.

Memory needs no overwriting: the new staging is fresh from the kernel, which clears it, and the old
goes with the last client that has it mapped, which was this namespace's.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prefetchd import erasing, store_making
from prefetchd import key_file as key_files
from prefetchd.format import Superblock
from prefetchd.sidecar.namespace import Namespace, NamespaceSettings, open_namespace
from prefetchd.sidecar.namespaces import DeniedError
from prefetchd.sidecar.protocol import Erase, Hello, Shape
from prefetchd.sidecar.replies import Erased
from prefetchd.sidecar.told import layout_told
from prefetchd.store import StoreError
from prefetchd.store_opening import Opening, exists, superblock_of
from prefetchd.store_place import data_path

if TYPE_CHECKING:
    from prefetchd.sidecar.connection import Connection
    from prefetchd.sidecar.entrance import Entrance
    from prefetchd.sidecar.server import Server

log = logging.getLogger("prefetchd")

_ZEROS_BYTES = 1 << 20


class Eraser:
    """`take` is called by the loop's thread."""

    def __init__(self, server: Server, entrance: Entrance) -> None:
        self._server = server
        self._entrance = entrance
        self._thread = ThreadPoolExecutor(1, "prefetchd-erase")

    def take(self, connection: Connection, erase: Erase) -> None:
        namespaces, name = self._server.namespaces, erase.namespace
        hello = Hello(erase.version, name, erase.token)
        try:
            settings = namespaces.settings_to_erase(hello, connection.peer)
        except DeniedError as error:
            return connection.refuse("denied", str(error))
        except (StoreError, ValueError) as error:
            return connection.refuse("bad_request", str(error))
        if name in self._entrance.opening:
            words = f"namespace {name!r} is being opened or erased; ask again"
            return connection.refuse("stopped", words)
        namespace = namespaces.open.get(name)
        self._entrance.opening[name] = []
        if namespace is not None:
            settings = settings_in_use(namespace, settings)
            self._server.part(namespace, f"namespace {name!r} is erased")
        uid = connection.peer.uid
        log.warning("namespace %s: uid %s has it erased", name, uid)
        self._thread.submit(self._erase, connection, erase, settings, namespace)
        return None

    def _erase(
        self,
        connection: Connection,
        erase: Erase,
        settings: NamespaceSettings,
        namespace: Namespace | None,
    ) -> None:
        name, later = erase.namespace, self._server.later
        result: Namespace | str
        said = Erased(0, 0)
        try:
            result, said = erased(name, settings, namespace, self._server, erase.overwrite)
        except Exception as error:
            unforeseen = None if isinstance(error, StoreError) else error
            log.error("namespace %s cannot be erased: %s", name, error, exc_info=unforeseen)
            result = f"namespace {name!r} could not be erased: {error}"
        later(partial(self._ended, connection, name, settings, result, said))

    def _ended(
        self,
        connection: Connection,
        name: str,
        settings: NamespaceSettings,
        result: Namespace | str,
        said: Erased,
    ) -> None:
        self._entrance.opened(name, settings, result)
        if isinstance(result, str):
            connection.refuse("stopped", result)
        else:
            connection.send(said)

    def shutdown(self) -> None:
        self._thread.shutdown()


def settings_in_use(namespace: Namespace, settings: NamespaceSettings) -> NamespaceSettings:
    """`settings`, as they may have been read again, of the store and the options that it has open:
    what needs a restart has not changed yet."""
    opened = namespace.settings
    options = replace(namespace.runtime.options, arena=None, books=None)
    return replace(
        settings,
        path=opened.path,
        layout=opened.layout,
        blocks=opened.blocks,
        salt=opened.salt,
        options=options,
    )


def erased(
    name: str,
    settings: NamespaceSettings,
    namespace: Namespace | None,
    server: Server,
    overwrite: bool,
) -> tuple[Namespace, Erased]:
    """The namespace anew, without what it had. Raises StoreError, OSError."""
    blocks = 0
    if namespace is not None:
        blocks = namespace.runtime.stats().blocks_visible
        try:
            namespace.close()
        except StoreError as error:  # what could not be written well goes all the same
            log.warning("namespace %s: %s", name, error)
    size = 0 if settings.path is None else _anew(settings, overwrite=overwrite)
    again = open_namespace(name, settings, memory=server.namespaces.memory)
    return again, Erased(blocks, size)


def _anew(settings: NamespaceSettings, *, overwrite: bool) -> int:
    """An empty store of the same shape in the place of what was there; the bytes that went."""
    path = settings.path
    assert path is not None
    if not exists(path):
        raise StoreError(f"there is no store in {path}; nothing was erased")
    shape = superblock_of(path, Opening(read_only=True))
    parts = erasing.parts_of(path, raw=False)
    files = [data_path(place, raw=False) for place in parts.places]
    size = sum(file.stat().st_size for file in files)
    key_file = _key_file_of(path, shape, settings)
    if key_file is not None and not _is_gone(key_file):
        key_files.destroy(key_file)  # first: from here on nothing of it can be read
    if overwrite:
        for file in files:
            _write_zeros(file)
    erasing.erase(parts.places, raw=False)
    told = Shape("", shape.layers, shape.page_bytes, shape.fingerprint)
    further = [Path(place) for place in shape.paths[1:]]
    store_making.create(
        path, layout_told(told), shape.blocks, fill=settings.fill, paths=further, key_file=key_file
    )
    return size


def _key_file_of(path: Path, shape: Superblock, settings: NamespaceSettings) -> Path | None:
    """Of an encrypted store, whether or not it is still there. Raises StoreError for a key that is
    another's, or not named."""
    named = settings.options.key_file
    key_file = None if named is None else Path(named)
    if shape.key_check and key_file is None:
        raise StoreError(
            f"store {path} is encrypted and no `key_file` is configured, so its key cannot be "
            "destroyed; nothing was erased"
        )
    if key_file is not None and not (shape.key_check and _is_gone(key_file)):
        key_files.belongs(key_file, shape, str(path))
    return key_file


def _is_gone(key_file: Path) -> bool:
    return not os.path.lexists(key_file)


def _write_zeros(file: Path) -> None:
    """One write at a time, so that a drive that others read from hardly notices."""
    zeros, left = bytes(_ZEROS_BYTES), file.stat().st_size
    descriptor = os.open(file, os.O_WRONLY | os.O_DSYNC)
    try:
        while left > 0:
            left -= os.write(descriptor, zeros[:left])
    finally:
        os.close(descriptor)
