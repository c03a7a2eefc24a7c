"""`prefetchd.connect(...)`: from an address to a client. Decides what is meant by default."""

from __future__ import annotations

from prefetchd.layout import Layout
from prefetchd.options import GpuFactory
from prefetchd.sidecar.async_client import AsyncClient
from prefetchd.sidecar.client import Client
from prefetchd.sidecar.handshake import hello_for
from prefetchd.sidecar.place import path_of


def connect(
    address: str = "unix:",
    *,
    namespace: str = "default",
    layout: Layout | None = None,
    blocks: int | None = None,
    token: str = "",
    gpu: str | GpuFactory = "host",
    write_bytes: int = 32 << 20,
    in_place: bool = True,
    timeout_s: float = 60.0,
) -> Client:
    """A daemon's namespace, with the API of `prefetchd.open`'s runtime.

    `address`: `unix:PATH`; `unix:` alone is where `prefetchd serve` listens by itself. `layout`:
    the store must be of it; with `blocks`, one is made if the daemon makes namespaces by itself.
    `gpu`: this process's own device. `write_bytes`: of the memory that carries puts. `in_place`:
    pages that are all staged are read without asking the daemon, where the processor allows it.
    `timeout_s`: how long the daemon may take to open the namespace. Raises SidecarError, GpuError.
    """
    hello = hello_for(namespace, token, layout, blocks, write_bytes, in_place=in_place)
    return Client(address, hello, gpu, timeout_s)


async def aconnect(
    address: str = "unix:",
    *,
    namespace: str = "default",
    layout: Layout | None = None,
    blocks: int | None = None,
    token: str = "",
    gpu: str | GpuFactory = "host",
    write_bytes: int = 32 << 20,
    in_place: bool = True,
    timeout_s: float = 60.0,
) -> AsyncClient:
    """As `connect`, for one event loop: `find`, `demand`, `put` and `stats` are awaited."""
    hello = hello_for(namespace, token, layout, blocks, write_bytes, in_place=in_place)
    client = AsyncClient(gpu, path_of(address), hello)
    await client.open(timeout_s)
    return client
