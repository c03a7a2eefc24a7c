"""Who is at the other end of a socket. Decides nothing: it is asked of the kernel."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import numpy as np

_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python does not name it
_GROUPS_BYTES = 1 << 16


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
