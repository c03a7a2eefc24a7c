"""Finding a daemon and being let in. Decides how long that may take and how refusal is told."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from prefetchd.engine import EngineError
from prefetchd.hostinfo import errno_name
from prefetchd.layout import Layout
from prefetchd.sidecar.conversation import Attachment
from prefetchd.sidecar.marks import IN_ORDER
from prefetchd.sidecar.protocol import FRAME_BYTES_MAX, VERSION, Hello, Shape
from prefetchd.sidecar.replies import Error, Welcome
from prefetchd.sidecar.wire import HEAD_BYTES, ProtocolError, frame, reply_of

_DESCRIPTORS_MAX = 4


class SidecarError(EngineError):
    """The daemon cannot be had, or not as asked: which, why and what to do."""


class AwayError(SidecarError):
    """Nobody answers there at the moment."""


def hello_for(
    namespace: str,
    token: str,
    layout: Layout | None,
    blocks: int | None,
    write_bytes: int,
    *,
    in_place: bool = True,
) -> Hello:
    shape = None
    if layout is not None:
        shape = Shape(layout.name, layout.layers, layout.page_bytes, layout.fingerprint())
    in_place = in_place and IN_ORDER
    return Hello(VERSION, namespace, token, shape, blocks or 0, write_bytes, in_place)


def attach(path: Path, hello: Hello, timeout_s: float) -> tuple[socket.socket, Attachment]:
    """A connection that may be used, and what it gives. Raises AwayError, SidecarError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        with contextlib.suppress(BrokenPipeError):  # refused already; why is there to be read
            sock.sendall(frame(hello))
        welcome = _welcome(sock, descriptors)
        if len(descriptors) != 1 + 2 * welcome.in_place + (welcome.write_bytes > 0):
            raise ProtocolError(f"{len(descriptors)} descriptors came with Welcome")
        return sock, Attachment(welcome, descriptors)
    except (OSError, EOFError) as error:
        sock.close()
        why = errno_name(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise AwayError(
            f"no daemon answers at {path}: {why or 'it takes too long'}; start one with "
            f"`prefetchd serve --socket {path}`"
        ) from error
    except (ProtocolError, ValueError) as error:
        sock.close()
        raise SidecarError(f"the daemon at {path} does not speak as expected: {error}") from error
    except BaseException:
        sock.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _welcome(sock: socket.socket, descriptors: list[int]) -> Welcome:
    """The frame is read to its end and no further, so that descriptors belong to it."""
    data = _receive(sock, HEAD_BYTES, descriptors)
    length = int.from_bytes(data, "little")
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(f"a first frame of {length} bytes")
    reply = reply_of(_receive(sock, length, descriptors))
    if isinstance(reply, Error):
        raise SidecarError(f"the daemon refuses: {reply.words}")
    if not isinstance(reply, Welcome) or reply.version != VERSION:
        raise ProtocolError("its first message is no Welcome of this version")
    return reply


def _receive(sock: socket.socket, length: int, descriptors: list[int]) -> bytes:
    data = b""
    while len(data) < length:
        part, fds, _, _ = socket.recv_fds(
            sock, length - len(data), _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        descriptors.extend(fds)
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return data
