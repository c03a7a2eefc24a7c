"""The answer to a Hello: what a client is told of its namespace, and the memory it is given.

Decides how large a client's write arena is. Refuses to know who is let in and how bytes travel.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, field

import prefetchd
from prefetchd.sidecar.arena import make_for_client
from prefetchd.sidecar.connection import Connection
from prefetchd.sidecar.marks import Marks, marks_bytes
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import VERSION, Hello
from prefetchd.sidecar.replies import Limits, Welcome
from prefetchd.sidecar.session import Session
from prefetchd.sidecar.session_puts import Later

_ARENAS_MAX = 16
"""Of the largest size, among the clients of one namespace; then they get smaller ones."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`clients`: connected at once, at most `clients_per_uid` of one user; `write_bytes`: the
    largest write arena of one client; `client`: what each must keep to."""

    clients: int = 256
    clients_per_uid: int = 128
    write_bytes: int = 64 << 20
    client: Limits = field(default_factory=Limits)


def greet(
    connection: Connection,
    hello: Hello,
    namespace: Namespace,
    number: int,
    limits: ServerLimits,
    later: Later,
) -> None:
    """Raises ValueError for another shape than the store's, OSError where memory is short."""
    check_shape(hello, namespace)
    left = _ARENAS_MAX * limits.write_bytes - namespace.write_bytes
    write_bytes = _write_bytes(hello, namespace, min(limits.write_bytes, left))
    in_place = bool(hello.in_place and namespace.readers and not namespace.readers.full)
    shared, made, arena, marks = [namespace.arena.fd], list[int](), None, None
    try:
        if in_place:
            slots = namespace.runtime.slots
            fd, memory = make_for_client(marks_bytes(slots))
            made.append(fd)
            shared.append(namespace.arena.books_fd)
            marks = Marks(memory, slots)
        if write_bytes:
            fd, arena = make_for_client(write_bytes)
            made.append(fd)
        session = Session(number, namespace, limits.client, connection.send, later, arena, marks)
        welcome = _welcome(namespace, limits, write_bytes, in_place=in_place)
        connection.accept(session, welcome, [*shared, *made])
    finally:
        for fd in made:
            os.close(fd)


def check_shape(hello: Hello, namespace: Namespace) -> None:
    shape, runtime = hello.shape, namespace.runtime
    if shape is not None and shape.fingerprint != namespace.fingerprint:
        raise ValueError(
            f"namespace {namespace.name!r} was made for another layout: "
            f"{runtime.geometry.layers} pages of {runtime.page_bytes} bytes a block (fingerprint "
            f"{namespace.fingerprint.hex()[:8]}), asked for {shape.name} with {shape.layers} pages "
            f"of {shape.page_bytes} bytes ({shape.fingerprint.hex()[:8]})"
        )


def _write_bytes(hello: Hello, namespace: Namespace, most: int) -> int:
    """As asked for, but room for two blocks at least: one is filled while one is taken."""
    if not hello.write_bytes:
        return 0
    return max(min(hello.write_bytes, most), 2 * namespace.extent_bytes)


def _welcome(
    namespace: Namespace, limits: ServerLimits, write_bytes: int, *, in_place: bool
) -> Welcome:
    runtime = namespace.runtime
    return Welcome(
        version=VERSION,
        daemon=f"prefetchd {prefetchd.__version__}",
        pid=os.getpid(),
        opening=namespace.opening,
        layers=runtime.geometry.layers,
        blocks=runtime.geometry.blocks,
        page_bytes=runtime.page_bytes,
        slot_bytes=runtime.slot_bytes,
        slots=runtime.slots,
        fingerprint=namespace.fingerprint,
        arena_offset=namespace.arena.offset_bytes,
        write_bytes=write_bytes,
        demand_timeout_ns=int(runtime.options.demand_timeout_s * 1e9),
        limits=limits.client,
        notes=list(runtime.notes),
        medium=astuple(runtime.medium),
        in_place=in_place,
    )
