"""A daemon in a thread of the test, and clients of it; or in a process of its own, to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefetchd import Client, Options, Runtime, connect
from prefetchd.sidecar.greeting import ServerLimits
from prefetchd.sidecar.namespace import NamespaceSettings, open_namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.place import Place
from prefetchd.sidecar.server import Server
from tests.runtime_bench import BLOCKS, PAGE_BYTES, PLAIN, layout

PATIENCE_S = 30.0


def space(options: Options = PLAIN, page_bytes: int = PAGE_BYTES, **more: Any) -> NamespaceSettings:
    """A namespace in memory."""
    return NamespaceSettings(None, layout(page_bytes), BLOCKS, options=options, **more)


@dataclass
class Daemon:
    """A server in a thread of its own. `in_loop` runs something in that thread."""

    server: Server
    thread: threading.Thread
    clients: list[Client] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"unix:{self.server.place.path}"

    def runtime(self, name: str = "default") -> Runtime:
        return self.server.namespaces.open[name].runtime

    def connect(self, namespace: str = "default", **options: Any) -> Client:
        self.clients.append(connect(self.address, namespace=namespace, **options))
        return self.clients[-1]

    def settle(self) -> None:
        """Return once the loop has done all that it had to do."""
        for _ in range(3):
            done = threading.Event()
            self.server.later(done.set)
            assert done.wait(PATIENCE_S)

    def until(self, true: Any) -> None:
        """Wait until something holds in the loop's thread, which looks at it again and again."""
        done = threading.Event()

        def look() -> None:
            if true():
                done.set()
            else:
                self.server.later(look)

        self.server.later(look)
        assert done.wait(PATIENCE_S), "it never holds"

    def stop(self) -> list[str]:
        for client in self.clients:
            client.close()
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.server.close()


@contextmanager
def daemon(
    folder: Path,
    spaces: dict[str, NamespaceSettings] | None = None,
    limits: ServerLimits | None = None,
    **more: Any,
) -> Iterator[Daemon]:
    """Serve `spaces` (default: one in memory, "default") at a socket in `folder`."""
    namespaces = Namespaces(spaces or {"default": space()}, os.geteuid(), **more)
    for name, settings in namespaces.settings.items():
        namespaces.open[name] = open_namespace(name, settings, memory=namespaces.memory)
    server = Server(Place(folder / "s.sock"), namespaces, limits)
    thread = threading.Thread(target=server.run, name="daemon")
    thread.start()
    running = Daemon(server, thread)
    try:
        yield running
    finally:
        failures = running.stop()
    assert failures == []


class Process:
    """`prefetchd serve` in a process of its own; ready when this returns."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.path = folder / "s.sock"
        self.running = subprocess.Popen(
            [sys.executable, "-m", "prefetchd.cli", "serve", "--socket", self.path, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.running.stdout is not None
        self.first = self.running.stdout.readline()

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def kill(self) -> None:
        self.running.kill()
        self.running.communicate(timeout=PATIENCE_S)

    def terminate(self) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        self.running.terminate()
        _, said = self.running.communicate(timeout=PATIENCE_S)
        return self.running.returncode, said

    def __enter__(self) -> Process:
        assert self.first, self.running.communicate()[1]
        return self

    def __exit__(self, *_: object) -> None:
        if self.running.poll() is None:
            self.kill()


def in_space(**options: Any) -> NamespaceSettings:
    return space(replace(PLAIN, **options))
