"""A daemon's figures for a terminal: where they come from, and the table of them.

Decides the columns. What the figures mean is decided where they are computed. Over HTTP all
namespaces are seen; over a client's socket only those that one may use, without who else does.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.table import Table
from rich.text import Text

from prefetchd.hostinfo import errno_name
from prefetchd.sidecar.connecting import connect
from prefetchd.sidecar.handshake import SidecarError
from prefetchd.sidecar.place import SCHEME
from prefetchd.sidecar.rates import Rates, rates
from prefetchd.sidecar.watching import Picture, Space, Verdict, decode

_TIMEOUT_S = 5.0
_DASH = "\N{EN DASH}"


class Row(msgspec.Struct, frozen=True):
    """A namespace: as it is, and what happened since the picture before."""

    name: str
    fault: str
    predictor: str
    clients: int | None
    tickets_held: int | None
    staging_used: float
    staging_pinned: float
    ops_in_flight: int
    ops_queued: int
    blocks_used: float
    paths: dict[str, str]
    rates: Rates


class View(msgspec.Struct, frozen=True):
    """`verdict` None: not told over a client's socket."""

    verdict: Verdict | None
    namespaces: list[Row]


Source = Callable[[], Picture]


def over_http(url: str) -> Source:
    """`url`: as `serve --http` takes it, or as it prints it. Raises ValueError; the source raises
    SidecarError."""
    if not url.startswith(SCHEME) and "//" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    if not (url.startswith(SCHEME) or (parts.scheme == "http" and parts.hostname)):
        raise ValueError(f"{url!r} is no address; write http://HOST:PORT or unix:PATH")

    def take() -> Picture:
        try:
            return decode(_get(url))
        except (OSError, http.client.HTTPException) as error:
            why = errno_name(error.errno) if isinstance(error, OSError) and error.errno else error
            raise SidecarError(f"no daemon tells its figures at {url}: {why}") from error
        except msgspec.DecodeError as error:
            raise SidecarError(f"what answers at {url} is no daemon of this version") from error

    return take


def _get(url: str) -> bytes:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port, _TIMEOUT_S)
    try:
        if url.startswith(SCHEME):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(_TIMEOUT_S)
            connection.sock.connect(url.removeprefix(SCHEME))
        connection.request("GET", "/figures.json")
        return connection.getresponse().read()
    finally:
        connection.close()


def over_socket(address: str, namespaces: Sequence[str], token: str, undone: ExitStack) -> Source:
    """As a client of these namespaces, until `undone` is. Raises SidecarError, also the source."""
    clients = {
        name: undone.enter_context(
            connect(address, namespace=name, token=token, write_bytes=0, in_place=False)
        )
        for name in namespaces
    }

    def take() -> Picture:
        spaces = [
            Space(name, "", kv.geometry.layers, kv.page_bytes, kv.slot_bytes, None, kv.stats())
            for name, kv in clients.items()
        ]
        verdict = Verdict(healthy=True, ready=True, reasons=[], notes=[])
        process = next(kv.daemon_pid for kv in clients.values())
        return Picture("", process, time.monotonic_ns(), 0.0, verdict, spaces)

    return take


def view(before: Picture, now: Picture, *, judged: bool) -> View:
    """Of namespaces that are in both pictures; of a daemon that began anew, since then."""
    old = {space.name: space for space in before.namespaces} if _same(before, now) else {}
    seconds = max((now.taken_ns - before.taken_ns) / 1e9, 1e-9)
    rows = [_row(old.get(space.name, space), space, seconds) for space in now.namespaces]
    return View(now.verdict if judged else None, rows)


def _same(before: Picture, now: Picture) -> bool:
    return before.process == now.process and before.taken_ns <= now.taken_ns


def _row(before: Space, now: Space, seconds: float) -> Row:
    stats, writes = now.stats, now.stats.store_writes
    return Row(
        now.name,
        now.fault,
        stats.predictor,
        now.use.clients if now.use else None,
        now.use.tickets if now.use else None,
        stats.slots_used / stats.slots,
        stats.slots_pinned / stats.slots,
        stats.ops_in_flight,
        stats.ops_queued,
        writes.blocks_used / writes.blocks_max,
        {path.path: f"{path.reading}/{path.writing}" for path in stats.paths},
        rates(before.stats, stats, seconds),
    )


def table(seen: View) -> Table:
    title = "" if seen.verdict is None else _title(seen.verdict)
    drawn = Table(
        title=Text(title) if title else None, title_justify="left", title_style="", box=None
    )
    for name in _COLUMNS:
        is_text = name in ("namespace", "state")
        drawn.add_column(name, justify="left" if is_text else "right", no_wrap=name != "state")
    for row in seen.namespaces:
        drawn.add_row(*(Text(cell(row)) for cell in _COLUMNS.values()))
    return drawn


def _title(verdict: Verdict) -> str:
    state = "ready" if verdict.ready else "not ready" if verdict.healthy else "UNHEALTHY"
    return "; ".join([state, *verdict.reasons, *verdict.notes])


def _amount(value: float, ending: str = "") -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}{ending}"
        value /= 1024
    return f"{value:.3g} GiB{ending}"


def _share(value: float | None) -> str:
    return _DASH if value is None else f"{value:.0%}"


def _wait(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


def _told(value: Any) -> str:
    return _DASH if value is None else str(value)


def _state(row: Row) -> str:
    uneasy = [f"{path}: {state}" for path, state in row.paths.items() if state != "healthy/healthy"]
    return "; ".join([*filter(None, [row.fault]), *uneasy]) or "healthy"


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "namespace": lambda row: row.name,
    "clients": lambda row: _told(row.clients),
    "tickets": lambda row: _told(row.tickets_held),
    "staging": lambda row: _share(row.staging_used),
    "held": lambda row: _share(row.staging_pinned),
    "in flight": lambda row: str(row.ops_in_flight),
    "queued": lambda row: str(row.ops_queued),
    "read": lambda row: _amount(row.rates.read_bytes_s, "/s"),
    "written": lambda row: _amount(row.rates.written_bytes_s, "/s"),
    "pages/s": lambda row: f"{row.rates.demanded_pages_s:,.0f}",
    "in time": lambda row: _share(row.rates.in_time),
    "coverage": lambda row: _share(row.rates.coverage),
    "accuracy": lambda row: _share(row.rates.accuracy),
    "wait P50": lambda row: _wait(row.rates.wait_p50_s),
    "P99": lambda row: _wait(row.rates.wait_p99_s),
    "blocks": lambda row: _share(row.blocks_used),
    "state": _state,
}
