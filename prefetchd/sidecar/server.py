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
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import get_ident
from time import monotonic_ns

from prefetchd.bell import Bell
from prefetchd.engine import EngineError
from prefetchd.hostinfo import errno_name
from prefetchd.sidecar.connection import Connection
from prefetchd.sidecar.crowd import make_room
from prefetchd.sidecar.drives import Drives
from prefetchd.sidecar.entrance import Entrance
from prefetchd.sidecar.greeting import ServerLimits
from prefetchd.sidecar.loop_turns import MESSAGE_COST, LoopTurns
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.place import Place
from prefetchd.sidecar.supervisor import NOBODY
from prefetchd.sidecar.tenancy import guarded, offer_step, use_drives, why_stopped

log = logging.getLogger("prefetchd")

_SLEPT_NS = 20_000  # a look at what is there already takes less


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
        self.supervisor = NOBODY
        self._stopping = False
        self._bell = Bell()
        self._later: deque[Callable[[], None]] = deque()
        self._turns = LoopTurns()
        self._alone = False  # whether what is looked at is all that happens
        self._woken_ns = 0  # 0: it did not sleep, so what it sees may have happened before
        self._drives = Drives()
        self._opener = ThreadPoolExecutor(1, "prefetchd-open")
        self.entrance = Entrance(self)
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {
            self._bell.fileno(): lambda _: self._bell.silence(),
            place.listener.fileno(): lambda _: self._accept(),
        }
        for descriptor in self._handlers:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._thread = 0
        for namespace in namespaces.open.values():
            self.look_after(namespace)

    # --- the loop ---

    def run(self) -> None:
        self._thread = get_ident()
        while not self._stopping:
            self.turn()

    def turn(self) -> None:
        """Look at everything once; block while there is nothing."""
        busy = self._turns or self._later
        looked_ns = monotonic_ns()
        events = self._epoll.poll(0 if busy else self.supervisor.rest_s)
        woken_ns = monotonic_ns()
        slept = not busy and woken_ns - looked_ns > _SLEPT_NS
        self._woken_ns = woken_ns if slept else 0
        self._alone = len(events) == 1 and not self._turns
        for descriptor, mask in events:
            handler = self._handlers.get(descriptor)
            if handler is not None:  # its connection may have ended in this turn
                handler(mask)
        self._turns.work(shared=self.namespaces.shared)
        self._do_later()
        self._attend()
        self.supervisor.beat()

    def _do_later(self) -> None:
        for _ in range(len(self._later)):
            try:
                self._later.popleft()()
            except Exception:
                log.exception("a fault of the daemon's; it goes on")

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

    def aside(self, task: Callable[[], None]) -> None:
        """Have the opener's thread do this, which may take a while; not any more while stopping."""
        if not self._stopping:
            self._opener.submit(task)

    def _attend(self) -> None:
        """Look at the devices for which somebody waits, and at no others."""
        for namespace in self.namespaces.open.values():
            if namespace.attended != (namespace.waiting > 0):
                (self._disregard if namespace.attended else self._regard)(namespace)
            if namespace.attended and namespace.runtime.engine.driver.ended:
                self._collect(namespace)  # no descriptor tells of it
            else:
                offer_step(namespace, self._turns)

    def _regard(self, namespace: Namespace) -> None:
        try:
            namespace.runtime.engine.attend()
        except EngineError:
            namespace.waiting = 0  # its clients have been told
            return
        namespace.attended = True
        self._handlers[namespace.device_fd] = partial(self._on_device, namespace)
        self._epoll.register(namespace.device_fd, select.EPOLLIN)

    def _disregard(self, namespace: Namespace) -> None:
        namespace.attended = False
        self._epoll.unregister(namespace.device_fd)
        del self._handlers[namespace.device_fd]
        namespace.runtime.engine.leave()

    def _leave(self, namespace: Namespace) -> None:
        """Who waits for its device drives it himself from here on; what was reaped is not lost."""
        guarded(namespace, namespace.arrivals.finish)
        if namespace.attended:
            self._disregard(namespace)

    def part(self, namespace: Namespace, why: str) -> None:
        """Have nothing to do with it any more; its clients are told, and may come back."""
        self.namespaces.open.pop(namespace.name, None)
        namespace.runtime.books.serves[0] = 0
        self._turns.withdraw(namespace)
        for what in ("go on", "step", "arrived"):
            self._turns.withdraw((what, namespace))
        self._leave(namespace)
        for connection in self._clients(namespace):
            connection.refuse("stopped", why)

    def _on_device(self, namespace: Namespace, _mask: int) -> None:
        if self._woken_ns and namespace.gate is not None:
            namespace.gate.noticed(self._woken_ns)
        self._collect(namespace)

    def _collect(self, namespace: Namespace) -> None:
        task = partial(self._reap, namespace)
        self._turns.offer(namespace.name, namespace.weight, namespace, task)

    def _reap(self, namespace: Namespace) -> int:
        shared = self.namespaces.shared
        return self._arrived(namespace, lambda: namespace.arrivals.reap(in_parts=shared))

    def _arrived(self, namespace: Namespace, task: Callable[[], int]) -> int:
        cost, waiting = guarded(namespace, task), namespace.waiting
        self._do_later()  # whose pages have come is not to wait for another's turn
        cost += MESSAGE_COST * max(0, waiting - namespace.waiting)
        if namespace.arrivals:
            rest = partial(self._arrived, namespace, namespace.arrivals.go_on)
            self._turns.offer(namespace.name, namespace.weight, ("arrived", namespace), rest)
        return cost

    def look_after(self, namespace: Namespace) -> None:
        """It was opened: from here on it is one of those that this serves."""
        use_drives(namespace, self._drives, self._turns, self.later)
        ended = partial(self._stopped, namespace)
        with namespace.runtime.engine.lock:
            namespace.runtime.engine.awaiting.append(partial(self.later, ended))

    def _stopped(self, namespace: Namespace) -> None:
        self._broken(namespace, why_stopped(namespace))

    def _broken(self, namespace: Namespace, why: str) -> None:
        namespace.waiting = 0
        namespace.arrivals.forget()
        namespace.let_go_of_drives()
        log.error("namespace %s: %s", namespace.name, why)
        for connection in self._clients(namespace):
            if connection.session is not None:
                connection.session.fail(why)

    def _clients(self, namespace: Namespace) -> list[Connection]:
        return [one for one in self.connections if one.member == namespace.name]

    # --- connections ---

    def _accept(self) -> None:
        try:
            sock, _ = self.place.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                log.error("no client can be taken: %s; until one goes", errno_name(error.errno))
                self._epoll.modify(self.place.listener.fileno(), 0)
            return
        connection = Connection(sock, self.entrance.greet, self._watch, self._ended)
        self.connections.add(connection)
        self._handlers[connection.fileno()] = partial(self._on_event, connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        make_room(connection, self.connections, self.limits)

    def _on_event(self, connection: Connection, mask: int) -> None:
        self._guarded(connection, connection.on_event, mask)
        if self._alone and connection.lingers:  # whose turn it is needs no telling
            self._guarded(connection, connection.work)
        self.remember(connection)

    def _work(self, connection: Connection) -> int:
        cost = self._guarded(connection, connection.work)
        self.remember(connection)
        return cost

    def _guarded(self, connection: Connection, work: Callable[..., int | None], *given: int) -> int:
        """A fault that one client meets is not to end the others. What it has cost."""
        try:
            return work(*given) or 0
        except Exception:
            log.exception("a fault of the daemon's, met by process %s", connection.peer.pid)
            connection.refuse("protocol", "the daemon has a fault; its log says more")
            return 0

    def remember(self, connection: Connection) -> None:
        """Have its work go on in its turn, if it has any."""
        if connection.lingers:
            work = partial(self._work, connection)
            self._turns.offer(connection.member, connection.weight, connection, work)

    def _watch(self, connection: Connection, events: int) -> None:
        self._epoll.modify(connection.fileno(), events)

    def _ended(self, connection: Connection) -> None:
        self._epoll.unregister(connection.fileno())
        del self._handlers[connection.fileno()]
        self.connections.discard(connection)
        self._turns.withdraw(connection)
        if not self._stopping:
            self._epoll.modify(self.place.listener.fileno(), select.EPOLLIN)

    @property
    def status(self) -> str:
        """In words, for whoever supervises."""
        return f"serving {len(self.namespaces.open)} namespaces at {self.place.path}"

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
        for namespace in self.namespaces.open.values():
            self._leave(namespace)  # or the opener would wait for what nobody collects
        self._opener.shutdown(cancel_futures=True)
        self.entrance.close()
        self._do_later()
        for namespace in self.namespaces.open.values():
            namespace.let_go_of_drives()
        failures = self.namespaces.close()
        for connection in list(self.connections):
            connection.sock.close()
        self._epoll.close()
        return failures
