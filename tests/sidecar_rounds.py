"""What a demand of resident pages costs through a daemon, beside the embedded runtime and an echo.

`python -m tests.sidecar_rounds [rounds]`: the four take turns in one run; daemon and echo are
processes of their own. `in place`: without asking; `asked`: a round over the socket. `alone`: in
place, with nothing between. Prints microseconds; a demand is waited for and released. Then one
client and eight (`tests.sidecar_many`): their rate, and what of the processor each end used.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import prefetchd
from prefetchd import Client, Runtime
from tests.runtime_bench import PLAIN, layout
from tests.sidecar_bench import Process
from tests.sidecar_many import many

PAGES, BLOCKS, LAYERS, PAGE_BYTES = 64, 64, 3, 4096
_TURN = 250
_ECHO = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while data := sock.recv(65536):
    sock.sendall(data)
"""


def demand(kv: Runtime | Client) -> Callable[[], None]:
    keys = [number.to_bytes(16, "big") for number in range(BLOCKS)]
    pages = np.random.default_rng(1).integers(0, 256, (BLOCKS, LAYERS, PAGE_BYTES), np.uint8)
    blocks = kv.lookup(keys)
    if len(blocks) < BLOCKS:
        blocks = kv.put(keys, pages).blocks
    ids = kv.pages(blocks[:PAGES], 1)
    assert not kv.demand(ids).missing.any()

    def once() -> None:
        with kv.demand(ids):
            pass

    return once


def echo() -> tuple[Callable[[], None], subprocess.Popen[bytes]]:
    """A round of as many bytes as a demand and its answer, in a process that does nothing else."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", _ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    body = bytes(600)

    def once() -> None:
        ours.sendall(body)
        ours.recv(65536)

    return once, process


CONFIG = """
[namespaces.default]
store = "{folder}/store"
layers = {layers}
page_bytes = "{page_bytes}"
blocks = {blocks}
fill = false
staging = "8MiB"
predictor = "none"
evict = "lru"
"""


@contextmanager
def served() -> Iterator[Process]:
    shape = {"layers": LAYERS, "page_bytes": PAGE_BYTES, "blocks": BLOCKS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "prefetchd.toml"
        config.write_text(CONFIG.format(folder=folder, **shape))
        with Process(folder, "--config", str(config)) as process:
            yield process


def rounds(process: Process, count: int) -> dict[str, NDArray[np.float64]]:
    options = replace(PLAIN, staging_bytes=8 << 20)
    with ExitStack() as stack:
        client = stack.enter_context(prefetchd.connect(process.address))
        asking = stack.enter_context(prefetchd.connect(process.address, in_place=False))
        embedded = stack.enter_context(
            prefetchd.open(None, layout(PAGE_BYTES, LAYERS), blocks=BLOCKS, options=options)
        )
        bare, echoing = echo()
        ways = {
            "embedded": demand(embedded),
            "in place": demand(client),
            "asked": demand(asking),
            "echo": bare,
        }
        spent: dict[str, list[int]] = {name: [] for name in ways}
        for _ in range(count // _TURN):
            for name, once in ways.items():
                for _ in range(_TURN):
                    start_ns = time.perf_counter_ns()
                    once()
                    spent[name].append(time.perf_counter_ns() - start_ns)
        echoing.kill()
        echoing.wait()
    return {name: np.array(times) / 1e3 for name, times in spent.items()}


def alone(process: Process, count: int) -> dict[str, NDArray[np.float64]]:
    """The same of one client in place, with nothing between."""
    with prefetchd.connect(process.address) as client:
        once, times = demand(client), np.zeros(count)
        for number in range(count):
            start_ns = time.perf_counter_ns()
            once()
            times[number] = (time.perf_counter_ns() - start_ns) / 1e3
    return {"alone": times}


def main(count: int) -> None:
    with served() as process:
        for name, times in (rounds(process, count) | alone(process, count)).items():
            p50, p90, p99 = np.percentile(times, [50, 90, 99])
            print(
                f"{name:<9} P50 {p50:7.1f}  P90 {p90:7.1f}  P99 {p99:8.1f} us  "
                f"P99 / P50 {p99 / p50:5.1f}  n {len(times)}"
            )
        one = many(process, 1, count)
        eight = many(process, 8, count // 8)
    for load in (one, eight):
        print(load)
    print(f"8 clients: {eight.rate / one.rate:.2f} times the rate of one; {eight.verdict}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
