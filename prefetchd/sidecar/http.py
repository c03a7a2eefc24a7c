"""Serving HTTP beside the daemon: a thread of its own, which the daemon's loop never waits for.

Decides where it listens and who may call it there. Refuses to know what is told. The packages it
needs are imported when it is wanted, and only then.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from prefetchd.hostinfo import errno_name
from prefetchd.sidecar.place import SCHEME, Place, PlaceError

if TYPE_CHECKING:
    from prefetchd.sidecar.watching import Watch

log = logging.getLogger("prefetchd")

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:]+)\]|(?P<host>[^:\[\]/]*)):(?P<port>\d{1,5})")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_BACKLOG, _CONNECTIONS_MAX, _CLOSE_S = 64, 64, 5.0


def check_address(address: str) -> tuple[str, int] | Path:
    """Host and port, or a socket's path. Raises ValueError."""
    if address.startswith(SCHEME) and len(address) > len(SCHEME):
        return Path(address.removeprefix(SCHEME))
    found = _ADDRESS.fullmatch(address)
    if not found or int(found["port"]) > 65535:
        raise ValueError(f"{address!r} is no address; write HOST:PORT or unix:PATH")
    return found["v6"] or found["host"] or "127.0.0.1", int(found["port"])


class Http:
    """Serves from when it is made until `close`."""

    def __init__(self, address: str, watch: Watch) -> None:
        """Raises ValueError, PlaceError: also where the packages are not installed."""
        where = check_address(address)
        try:
            import uvicorn

            from prefetchd.sidecar.patient import PatientProtocol
            from prefetchd.sidecar.quiet import QuietServer
            from prefetchd.sidecar.web import application
        except ImportError as error:
            raise PlaceError(
                f"--http needs {error.name}, which is not installed: pip install prefetchd[web]"
            ) from error
        self._place: Place | None = None
        hosts = ["*"]
        if isinstance(where, Path):
            self._place = Place(where)
            listener, self.url = self._place.listener, f"unix:{where}"
        else:
            listener = _listener(*where)
            host, port = listener.getsockname()[:2]
            named = f"[{host}]" if ":" in host else host
            self.url = f"http://{named}:{port}"
            if _is_loopback(host):
                hosts = list(_LOOPBACK)
            else:
                log.warning(
                    "%s can be reached from other machines: whoever does sees names, paths and "
                    "counts of all namespaces",
                    self.url,
                )
        config = uvicorn.Config(
            application(watch, hosts),
            loop="asyncio",
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_graceful_shutdown=1,
        )
        self._listener = listener
        self._server = QuietServer(config)
        self._thread = threading.Thread(target=self._run, name="prefetchd-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except Exception:
            log.exception("HTTP is not served any more; all else goes on")

    def close(self) -> None:
        self._server.end()
        self._thread.join(_CLOSE_S)
        self._listener.close()
        if self._place is not None:
            self._place.close()


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def _listener(host: str, port: int) -> socket.socket:
    """Raises PlaceError."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = errno_name(error.errno) if error.errno and error.errno > 0 else str(error)
        raise PlaceError(f"HTTP cannot be served at {host}:{port}: {reason}") from error
