"""Ways in which staged pages come to a buffer: embedded or through a daemon, with GPUs or without.

Each process has a `FakeGpu` of its own; those with the same uuid are one GPU. Client and daemon are
threads of one process here, which real CUDA IPC refuses, unless a test makes a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefetchd import Client, Options, Runtime
from prefetchd.devices.cuda import Cuda
from prefetchd.gpu import GpuDevice
from prefetchd.sidecar.greeting import ServerLimits
from tests.fake_cupy import FakeGpu, faked
from tests.runtime_bench import PLAIN, open_plain
from tests.sidecar_bench import Daemon, daemon, space

WAYS = (
    "embedded, host",
    "embedded, cuda",
    "sidecar, host",
    "sidecar, cuda",
    "sidecar, cuda at the client",
    "sidecar, cuda at the daemon",
)


def cuda_on(gpu: FakeGpu) -> Callable[[Any, int], GpuDevice]:
    """The device `cuda` in a process with this GPU."""

    def make(staging: Any, batch_slots: int) -> GpuDevice:
        with faked(gpu):
            return Cuda(staging, batch_slots)

    return make


def with_gpu(gpu: FakeGpu | None) -> Options:
    return PLAIN if gpu is None else replace(PLAIN, gpu=cuda_on(gpu))


@dataclass
class Served:
    """A daemon and a client of it, each with its GPU."""

    daemon: Daemon
    at_daemon: FakeGpu
    at_client: FakeGpu

    def connect(self, gpu: FakeGpu | None = None) -> Client:
        return self.daemon.connect(gpu=cuda_on(gpu or self.at_client))


@contextmanager
def served(
    folder: Path, limits: ServerLimits | None = None, uuid: bytes = b"one"
) -> Iterator[Served]:
    """The client's GPU has this uuid, the daemon's is "one"."""
    at_daemon, at_client = FakeGpu(), FakeGpu(uuid)
    with daemon(folder, {"default": space(with_gpu(at_daemon))}, limits) as running:
        yield Served(running, at_daemon, at_client)
    assert at_daemon.borrowed == []
    assert at_daemon.use_after_free == at_client.use_after_free == 0


@contextmanager
def opened(way: str, folder: Path) -> Iterator[Runtime | Client]:
    kind, _, gpus = way.partition(", ")
    with ExitStack() as stack:
        if kind == "embedded":
            gpu = FakeGpu() if gpus == "cuda" else None
            yield stack.enter_context(open_plain(None, with_gpu(gpu)))
            return
        at_daemon = FakeGpu() if gpus in ("cuda", "cuda at the daemon") else None
        running = stack.enter_context(daemon(folder, {"default": space(with_gpu(at_daemon))}))
        at_client = gpus in ("cuda", "cuda at the client")
        yield running.connect(gpu=cuda_on(FakeGpu()) if at_client else "host")
