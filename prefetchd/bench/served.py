"""A daemon for a replay: one that is there, or a private one for the length of one run.

Decides how a private daemon is started and ended, and how its trouble is told. Refuses to know what
is replayed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from prefetchd.bench.crowd import log_level
from prefetchd.bench.emulation import Emulation
from prefetchd.bench.runs import ReplayError
from prefetchd.options import Options
from prefetchd.runtime import Runtime
from prefetchd.sidecar.client import Client
from prefetchd.sidecar.namespace import NamespaceSettings, open_namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.place import Place
from prefetchd.sidecar.server import Server
from prefetchd.store import StoreError

Serving = Runtime | Client
"""What a replay asks: a runtime in this process, or a daemon's namespace."""

PRIVATE = "default"  # whose blocks a runtime in this process finds, too
_END_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """`clients` processes at one daemon: that at `connect`, or (empty) private ones.

    `shared`: the share of what is replayed that all clients have in common.
    """

    clients: int = 1
    connect: str = ""
    namespace: str = PRIVATE
    token: str = ""
    shared: float = 0.0


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken so far; 0 where that is not told."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


@contextmanager
def private_daemon(store: Path, options: Options, notes: list[str]) -> Iterator[str]:
    """The address of a daemon in a process of its own, for as long as the context lasts. It serves
    `store`, which is there, as the namespace "default"; what an emulated device could not keep to
    is added to `notes`. Raises StoreError and others of `open`, and ReplayError when it ends badly.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="prefetchd-") as folder:
        path = Path(folder) / "s.sock"
        ours, theirs = context.Pipe(duplex=False)
        daemon = context.Process(target=_serve, args=(path, store, options, theirs, log_level()))
        daemon.start()
        theirs.close()
        try:
            _hear(ours, "the private daemon does not start")
            yield f"unix:{path}"
            daemon.terminate()
            told = _hear(ours, "the private daemon ended before its time")
            notes += [note for note in told if note not in notes]
        finally:
            daemon.terminate()
            daemon.join(_END_TIMEOUT_S)
            daemon.kill()
            daemon.join()
            daemon.close()
            ours.close()


def _hear(ours: Connection, otherwise: str) -> list[str]:
    """Raises what the daemon tells of, if it is an error."""
    try:
        told = ours.recv()
    except EOFError:
        raise ReplayError(f"{otherwise}, without a word; was it out of memory?") from None
    if isinstance(told, Exception):
        raise told
    return list(told)


def _serve(path: Path, store: Path, options: Options, out: Connection, level: int) -> None:
    """In the daemon's process: notes are sent when it is ready, and when it has ended well."""
    logging.basicConfig(level=level)
    emulation = options.device if isinstance(options.device, Emulation) else None
    try:
        namespaces = Namespaces({PRIVATE: NamespaceSettings(store)}, os.geteuid())
        settings = NamespaceSettings(store, options=options)
        namespaces.open[PRIVATE] = open_namespace(PRIVATE, settings)
        server = Server(Place(path), namespaces)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        if emulation is not None:
            emulation.hold()  # from here on: opening is not what is measured
        out.send([])
        server.run()
        failures = server.close()
        for number in (signal.SIGTERM, signal.SIGINT):  # there is nothing left to stop
            signal.signal(number, signal.SIG_IGN)
        if failures:
            raise StoreError("; ".join(failures))
        out.send([] if emulation is None else emulation.notes())
    except Exception as error:
        out.send(error)
