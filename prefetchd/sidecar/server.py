"""The daemon's loop: one thread that looks at all sockets and all devices with somebody waiting.

Decides whose turn it is and how the daemon ends. A demand is driven by this thread itself, as an
embedded caller drives its own, so that pages which are staged cost no hand-over between threads;
puts and the opening of namespaces, which may wait, have threads of their own. Refuses to know
messages.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import get_ident

from prefetchd.bell import Bell
from prefetchd.device import DeviceError
from prefetchd.engine import EngineError
from prefetchd.gpu import GpuError
from prefetchd.hostinfo import errno_name
from prefetchd.layout import LayoutError
from prefetchd.registry import RegistryError
from prefetchd.sidecar.connection import Connection
from prefetchd.sidecar.greeting import ServerLimits, greet
from prefetchd.sidecar.namespace import (
    DeniedError,
    Namespace,
    Namespaces,
    NamespaceSettings,
    open_namespace,
)
from prefetchd.sidecar.place import Place
from prefetchd.sidecar.protocol import VERSION, Hello
from prefetchd.store import StoreError

log = logging.getLogger("prefetchd")

_CANNOT_OPEN = (StoreError, DeviceError, GpuError, RegistryError, LayoutError, ValueError)


class Server:
    """`run` serves until `stop`, which any thread and a signal handler may call; then `close`.
    Namespaces with settings are opened before."""

    def __init__(
        self, place: Place, namespaces: Namespaces, limits: ServerLimits | None = None
    ) -> None:
        self.place = place
        self.namespaces = namespaces
        self.limits = limits or ServerLimits()
        self.connections: set[Connection] = set()
        self._numbers = 0
        self._stopping = False
        self._bell = Bell()
        self._later: deque[Callable[[], None]] = deque()
        self._lingering: set[Connection] = set()
        self._opening: dict[str, list[tuple[Connection, Hello]]] = {}
        self._opener = ThreadPoolExecutor(1, "prefetchd-open")
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {
            self._bell.fileno(): lambda _: self._bell.silence(),
            place.listener.fileno(): lambda _: self._accept(),
        }
        for descriptor in self._handlers:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._thread = 0
        for namespace in namespaces.open.values():
            self._listen_for_the_end(namespace)

    # --- the loop ---

    def run(self) -> None:
        self._thread = get_ident()
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """Look at everything once; block while there is nothing."""
        busy = self._lingering or self._later
        for descriptor, mask in self._epoll.poll(0 if busy else None):
            handler = self._handlers.get(descriptor)
            if handler is not None:  # its connection may have ended in this turn
                handler(mask)
        for connection in list(self._lingering):
            self._guarded(connection, connection.work)
        for _ in range(len(self._later)):
            try:
                self._later.popleft()()
            except Exception:
                log.exception("a fault of the daemon's; it goes on")
        self._attend()

    def later(self, task: Callable[[], None]) -> None:
        """Have the loop's thread do this, soon. Any thread may call it."""
        self._later.append(task)
        if get_ident() != self._thread:
            self._bell.ring()

    def stop(self) -> None:
        self._stopping = True
        self._bell.ring()

    def interrupt(self, task: Callable[[], None]) -> None:
        """As `later`, from a signal handler: it runs in the loop's thread, and the loop sleeps."""
        self._later.append(task)
        self._bell.ring()

    def _attend(self) -> None:
        """Look at the devices for which somebody waits, and at no others."""
        for namespace in self.namespaces.open.values():
            if namespace.attended == (namespace.waiting > 0):
                continue
            namespace.attended = not namespace.attended
            descriptor, engine = namespace.device_fd, namespace.runtime.engine
            if not namespace.attended:
                self._epoll.unregister(descriptor)
                del self._handlers[descriptor]
                engine.leave()
                continue
            try:
                engine.attend()
            except EngineError:
                namespace.attended, namespace.waiting = False, 0  # its clients have been told
                continue
            self._handlers[descriptor] = partial(self._collect, namespace)
            self._epoll.register(descriptor, select.EPOLLIN)

    def _collect(self, namespace: Namespace, _: int) -> None:
        try:
            namespace.runtime.engine.collect()
        except EngineError as error:
            self._broken(namespace, str(error))

    def _listen_for_the_end(self, namespace: Namespace) -> None:
        engine = namespace.runtime.engine
        with engine.lock:
            engine.awaiting.append(
                partial(self.later, partial(self._broken, namespace, "the engine has stopped"))
            )

    def _broken(self, namespace: Namespace, why: str) -> None:
        namespace.waiting = 0
        for connection in list(self.connections):
            if connection.session is not None and connection.session.namespace is namespace:
                connection.session.fail(why)

    # --- connections ---

    def _accept(self) -> None:
        try:
            sock, _ = self.place.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                log.error("no client can be taken: %s; until one goes", errno_name(error.errno))
                self._epoll.modify(self.place.listener.fileno(), 0)
            return
        connection = Connection(sock, self._greet, self._watch, self._ended)
        self.connections.add(connection)
        on_event = partial(self._guarded, connection, connection.on_event)
        self._handlers[connection.fileno()] = on_event
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._limit(connection)

    def _limit(self, connection: Connection) -> None:
        """Who has said nothing yet makes room for who comes after him."""
        uid = connection.peer.uid
        users = Counter(other.peer.uid for other in self.connections)
        limits = self.limits
        if len(self.connections) > limits.clients or users[uid] > limits.clients_per_uid:
            for other in [one for one in self.connections if one.silent]:
                if other is not connection and other.peer.uid == uid:
                    other.end("it says nothing, and others want in")
            users = Counter(other.peer.uid for other in self.connections)
        if len(self.connections) > self.limits.clients:
            connection.refuse("limit", f"{self.limits.clients} clients are connected, the most")
        elif users[uid] > self.limits.clients_per_uid:
            most = self.limits.clients_per_uid
            connection.refuse("limit", f"{most} clients of uid {uid} are connected, the most")

    def _guarded(self, connection: Connection, work: Callable[..., None], *given: int) -> None:
        """A fault that one client meets is not to end the others."""
        try:
            work(*given)
        except Exception:
            log.exception("a fault of the daemon's, met by process %s", connection.peer.pid)
            connection.refuse("protocol", "the daemon has a fault; its log says more")
        if connection.unheard or self._lingering:
            self._remember(connection)

    def _remember(self, connection: Connection) -> None:
        if connection.lingers:
            self._lingering.add(connection)
        else:
            self._lingering.discard(connection)

    def _watch(self, connection: Connection, events: int) -> None:
        self._epoll.modify(connection.fileno(), events)

    def _ended(self, connection: Connection) -> None:
        self._epoll.unregister(connection.fileno())
        del self._handlers[connection.fileno()]
        self.connections.discard(connection)
        self._lingering.discard(connection)
        if not self._stopping:
            self._epoll.modify(self.place.listener.fileno(), select.EPOLLIN)

    # --- greeting ---

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if hello.version != VERSION:
            words = f"the client speaks version {hello.version}, this daemon version {VERSION}"
            return connection.refuse("denied", words)
        try:
            settings = self.namespaces.settings_for(hello, connection.peer)
        except DeniedError as error:
            return connection.refuse("denied", str(error))
        except _CANNOT_OPEN as error:
            return connection.refuse("bad_request", str(error))
        namespace = self.namespaces.open.get(hello.namespace)
        if namespace is not None:
            return self._welcome(connection, hello, namespace)
        waiting = self._opening.setdefault(hello.namespace, [])
        waiting.append((connection, hello))
        if len(waiting) == 1:
            self._opener.submit(self._open, hello.namespace, settings)
        return None

    def _open(self, name: str, settings: NamespaceSettings) -> None:
        """In the opener's thread: a store may have to be made, or its headers read."""
        try:
            namespace = open_namespace(name, settings)
        except Exception as error:
            words = str(error)
            if not isinstance(error, _CANNOT_OPEN):
                log.error("namespace %s cannot be opened", name, exc_info=error)
                words = f"namespace {name!r} cannot be opened; the daemon's log says why"
            self.later(partial(self._opened, name, settings, words))
        else:
            self.later(partial(self._opened, name, settings, namespace))

    def _opened(self, name: str, settings: NamespaceSettings, result: Namespace | str) -> None:
        if isinstance(result, Namespace):
            self.namespaces.settings.setdefault(name, settings)
            self.namespaces.open[name] = result
            self._listen_for_the_end(result)
        for connection, hello in self._opening.pop(name, []):
            if isinstance(result, str):
                connection.refuse("bad_request", result)
            elif not connection.closed:
                self._welcome(connection, hello, result)
                self._remember(connection)

    def _welcome(self, connection: Connection, hello: Hello, namespace: Namespace) -> None:
        self._numbers += 1
        try:
            greet(connection, hello, namespace, self._numbers - 1, self.limits, self.later)
        except (OSError, ValueError) as error:
            connection.refuse("bad_request", str(error))

    # --- the end ---

    def close(self) -> list[str]:
        """No new work; finish the writes, mark the stores clean; what failed, in words.

        Clients hear at once that there is nothing to come, but what they hold is not given to
        others: they may be reading it.
        """
        self.place.close()
        for connection in self.connections:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has gone
        self._opener.shutdown(cancel_futures=True)
        for _ in range(len(self._later)):
            self._later.popleft()()
        for namespace in self.namespaces.open.values():
            if namespace.attended:
                namespace.runtime.engine.leave()
        failures = self.namespaces.close()
        for connection in list(self.connections):
            connection.sock.close()
        self._epoll.close()
        return failures
