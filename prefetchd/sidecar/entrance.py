"""A client's first message: let in, told why not, or kept waiting until its namespace is open.

Decides in which order that goes. Who is let in is `namespaces`' to decide, what a welcome says
`greeting`'s; opening has a thread of its own, and one that is being erased is waited for like one
that is being opened. Refuses to know sockets.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from prefetchd.engine import EngineError
from prefetchd.sidecar.erasure import Eraser
from prefetchd.sidecar.greeting import greet
from prefetchd.sidecar.namespace import Namespace, NamespaceSettings
from prefetchd.sidecar.namespaces import DeniedError
from prefetchd.sidecar.protocol import VERSION, Erase, Hello
from prefetchd.sidecar.tenancy import CANNOT_OPEN, opened_or_why

if TYPE_CHECKING:
    from prefetchd.sidecar.connection import Connection
    from prefetchd.sidecar.server import Server


log = logging.getLogger("prefetchd")


class Entrance:
    """Called by the loop's thread."""

    def __init__(self, server: Server) -> None:
        self.opening: dict[str, list[tuple[Connection, Hello]]] = {}
        """Namespaces that are being opened or erased, and who waits for them."""
        self._server = server
        self._eraser = Eraser(server, self)
        self._numbers = 0

    def greet(self, connection: Connection, hello: Hello | Erase) -> None:
        if hello.version != VERSION:
            words = f"the client speaks version {hello.version}, this daemon version {VERSION}"
            return connection.refuse("denied", words)
        if isinstance(hello, Erase):
            return self._eraser.take(connection, hello)
        namespaces = self._server.namespaces
        try:
            settings = namespaces.settings_for(hello, connection.peer)
        except DeniedError as error:
            return connection.refuse("denied", str(error))
        except CANNOT_OPEN as error:
            return connection.refuse("bad_request", str(error))
        namespace = namespaces.open.get(hello.namespace)
        if namespace is not None:
            return self._welcome(connection, hello, namespace)
        self.open(hello.namespace, settings)
        self.opening[hello.namespace].append((connection, hello))
        return None

    def open(self, name: str, settings: NamespaceSettings) -> None:
        """Have it opened, if it is not being opened or erased already."""
        if name not in self.opening:
            self.opening[name] = []
            self._server.aside(partial(self._open, name, settings))

    def _open(self, name: str, settings: NamespaceSettings) -> None:
        """In the opener's thread: a store may have to be made, or its headers read."""
        result = opened_or_why(name, settings, self._server.namespaces.memory)
        if isinstance(result, str) and name in self._server.namespaces.configured:
            log.error("namespace %s cannot be opened: %s", name, result)
        self._server.later(partial(self.opened, name, settings, result))

    def opened(self, name: str, settings: NamespaceSettings, result: Namespace | str) -> None:
        """The namespace, or in words why there is none: whoever waits for it hears."""
        if isinstance(result, Namespace):
            self._server.namespaces.admit(result, settings)
            self._server.look_after(result)
        for connection, hello in self.opening.pop(name, []):
            if isinstance(result, str):
                connection.refuse("bad_request", result)
            elif not connection.closed:
                self._welcome(connection, hello, result)
                self._server.remember(connection)

    def _welcome(self, connection: Connection, hello: Hello, namespace: Namespace) -> None:
        self._numbers += 1
        server, number = self._server, self._numbers - 1
        try:
            namespace.runtime.engine.check()
            greet(connection, hello, namespace, number, server.limits, server.later)
        except EngineError as error:
            connection.refuse("stopped", str(error))
        except (OSError, ValueError) as error:
            connection.refuse("bad_request", str(error))

    def close(self) -> None:
        self._eraser.shutdown()
