"""prefetchd: a predictive staging engine for KV caches on NVMe.

with prefetchd.open("/nvme/kv", layout, blocks=10_000) as kv:
    kv.put(keys, pages).wait()
    with kv.demand(kv.pages(kv.lookup(keys), layer=0)) as ticket:
        attend(ticket.views())
"""

from prefetchd.advice import Advice
from prefetchd.device import DeviceError
from prefetchd.engine import EngineError
from prefetchd.gpu import GpuError
from prefetchd.growing import GrowError, GrowingBlock
from prefetchd.keys import block_keys
from prefetchd.layout import Layout, LayoutError, uniform
from prefetchd.lookups import Found
from prefetchd.model import ChainHint, DoneHint, Outcome, PageHint
from prefetchd.opening import open_runtime as open  # noqa: A004  (prefetchd.open reads best)
from prefetchd.options import Options
from prefetchd.registry import RegistryError
from prefetchd.runtime import Runtime
from prefetchd.sidecar.async_client import AsyncClient
from prefetchd.sidecar.client import Client
from prefetchd.sidecar.connecting import aconnect, connect
from prefetchd.sidecar.handshake import AwayError, SidecarError
from prefetchd.stats import Stats
from prefetchd.store import StoreError
from prefetchd.tickets import PageMissing, PutTicket, Ticket

__all__ = [
    "Advice",
    "AsyncClient",
    "AwayError",
    "ChainHint",
    "Client",
    "DeviceError",
    "DoneHint",
    "EngineError",
    "Found",
    "GpuError",
    "GrowError",
    "GrowingBlock",
    "Layout",
    "LayoutError",
    "Options",
    "Outcome",
    "PageHint",
    "PageMissing",
    "PutTicket",
    "RegistryError",
    "Runtime",
    "SidecarError",
    "Stats",
    "StoreError",
    "Ticket",
    "aconnect",
    "block_keys",
    "connect",
    "open",
    "uniform",
]
__version__ = "0.1.0"
