"""Where a daemon is found: the path of its socket, and whose it is.

Decides whether a socket that is there is a living daemon's. Refuses to know what is said over it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from prefetchd.hostinfo import errno_name

_BACKLOG = 128
_PATH_BYTES_MAX = 107
SCHEME = "unix:"


class PlaceError(Exception):
    """A socket cannot be had where it was asked for, in words."""


def state_folder() -> Path:
    """Where stores are kept that nobody gave a place: $XDG_STATE_HOME/prefetchd, or
    ~/.local/state/prefetchd."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "prefetchd"


def default_socket() -> Path:
    """$XDG_RUNTIME_DIR/prefetchd.sock, or in the state folder where there is no such thing."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "prefetchd.sock" if base else state_folder() / "prefetchd.sock"


def path_of(address: str) -> Path:
    """Of `unix:PATH`; `unix:` alone is the default. Raises PlaceError."""
    if not address.startswith(SCHEME):
        raise PlaceError(f"{address!r} is no address of a daemon; write unix:PATH")
    rest = address.removeprefix(SCHEME)
    return Path(rest) if rest else default_socket()


def check_length(path: Path) -> None:
    """Raises PlaceError."""
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise PlaceError(f"socket {path}: a path of over {_PATH_BYTES_MAX} bytes; use another")


class Place:
    """A listening socket of ours. A lock beside it says that its owner lives, so that a dead
    daemon's socket can be replaced and a living one's never is."""

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        """Raises PlaceError."""
        self.path = path
        check_length(path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock_beside(path)
        except OSError as error:
            raise PlaceError(f"socket {path}: {errno_name(error.errno or 0)}") from error
        try:
            _clear(path)
            self.listener = _listen(path, mode)
        except OSError as error:
            os.close(self._lock)
            raise PlaceError(f"socket {path}: {errno_name(error.errno or 0)}") from error
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Nobody finds us any more. The lock's file stays: removing it could free another's."""
        self.listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self._lock)


def _lock_beside(path: Path) -> int:
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise PlaceError(
            f"socket {path} is served by process {owner}; stop it, or use another --socket"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _clear(path: Path) -> None:
    """Remove what a dead daemon left, and nothing else. Raises PlaceError, OSError."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise PlaceError(f"{path} is there and is no socket; use another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        # Without our lock beside it: whoever answers is another program.
        if probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise PlaceError(f"socket {path} is another program's; use another --socket")
    path.unlink(missing_ok=True)


def _listen(path: Path, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        umask = os.umask(0o177)  # nobody gets in before the mode is as it should be
        try:
            listener.bind(str(path))
        finally:
            os.umask(umask)
        path.chmod(mode)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
