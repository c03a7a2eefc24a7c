"""How soon things go on after an end: of a client that held pages, of a daemon with a large store.

`python -m tests.sidecar_ends clients [times]`: a client that holds all of staging is killed; prints
how long another one waits for a slot from then on.
`python -m tests.sidecar_ends restart [blocks]`: prints how long a daemon takes from its start until
it is ready, after a clean end, after a kill, and after a kill while it was writing; and what of
that Python's imports and the opening of the store take when they are timed alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import prefetchd
from prefetchd import Client, Options, SidecarError, connect, uniform
from prefetchd.bench.served import private_daemon
from prefetchd.store_making import create
from tests.runtime_bench import keys
from tests.sidecar_bench import PATIENCE_S, Process

LAYOUT = uniform(1, 4096)
SLOTS, HELD_BLOCKS = 256, 512
BATCH = 2000
HOLDER = """
import sys
import numpy as np
from prefetchd import connect
kv = connect(sys.argv[1])
held = [kv.demand(np.arange(first, first + 64)).wait() for first in range(0, int(sys.argv[2]), 64)]
print(sum(len(one.views()) for one in held), flush=True)
sys.stdin.read()
"""


def until_free_ms(kv: Client, address: str) -> float:
    """From the kill of a client that holds every slot until one of them is another client's."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, address, str(kv.slots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == kv.slots
        waiting = kv.demand(np.array([HELD_BLOCKS - 1]), timeout_s=60)
        assert not waiting.done
        started_ns = time.monotonic_ns()
        holder.kill()
        waiting.wait()
        took_ns = time.monotonic_ns() - started_ns
    assert not waiting.missing.any()
    waiting.release()
    assert kv.stats().slots_pinned == 0
    return took_ns / 1e6


def clients(times: int = 20) -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store"
        create(store, LAYOUT, HELD_BLOCKS, fill=False)
        options = Options(staging_bytes=SLOTS * LAYOUT.page_bytes, predictor="none", evict="lru")
        with private_daemon(store, options, []) as address, connect(address) as kv:
            pages = np.zeros((HELD_BLOCKS, 1, LAYOUT.page_bytes), np.uint8)
            assert not kv.put(keys(HELD_BLOCKS), pages).wait().failures
            return [until_free_ms(kv, address) for _ in range(times)]


def made(folder: Path, blocks: int) -> Path:
    """A store with so many blocks, closed well."""
    store = folder / "store"
    page = np.random.default_rng(1).integers(0, 256, (BATCH, 1, 4096), np.uint8)
    options = Options(
        predictor="none", evict="lru", staging_bytes=16 << 20, flush_after_blocks=1024
    )
    with prefetchd.open(store, LAYOUT, blocks=blocks + BATCH, fill=False, options=options) as kv:
        for first in range(0, blocks, BATCH):
            put = kv.put(keys(min(BATCH, blocks - first), first), page[: blocks - first])
            assert not put.wait().failures
    return store


def ready(folder: Path, store: Path) -> tuple[Process, float]:
    started_ns = time.monotonic_ns()
    process = Process(folder, "--store", str(store))
    assert process.first, process.running.communicate()[1]
    return process, (time.monotonic_ns() - started_ns) / 1e9


def imports_s() -> float:
    started_ns = time.monotonic_ns()
    words = "import prefetchd.cli, prefetchd.sidecar.serve_command"
    subprocess.run([sys.executable, "-c", words], check=True)
    return (time.monotonic_ns() - started_ns) / 1e9


def opening_s(store: Path) -> float:
    """Without writing, so that the daemon finds the store as it was left."""
    started_ns = time.monotonic_ns()
    prefetchd.open(store, LAYOUT, read_only=True, options=Options(staging_bytes=1 << 20)).close()
    return (time.monotonic_ns() - started_ns) / 1e9


def writing(address: str, first: int, begun: threading.Event) -> None:
    """Put until the daemon is gone; `begun` is set in the middle of it."""
    with suppress(SidecarError), connect(address) as kv:
        page = np.zeros((1, 1, 4096), np.uint8)
        for number in range(first, first + BATCH):
            if kv.away:
                return
            kv.put(keys(1, number), page, durability="fast")
            if number == first + BATCH // 4:
                begun.set()


def restart(blocks: int = 100_000) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = made(folder, blocks)
        print(f"{blocks} blocks; imports alone {imports_s():.2f} s", flush=True)
        for how in ("a clean end", "a kill", "a kill while writing"):
            opened_s = opening_s(store)
            process, took_s = ready(folder, store)
            with connect(process.address) as kv:
                found = len(kv.lookup(keys(blocks)))
            assert found == blocks, f"{found} of {blocks} blocks are there after {how}"
            print(
                f"after {how}: ready in {took_s:.2f} s; opening alone {opened_s:.2f} s", flush=True
            )
            if how == "a clean end":
                process.kill()
            elif how == "a kill":
                begun = threading.Event()
                writer = threading.Thread(target=writing, args=(process.address, blocks, begun))
                writer.start()
                assert begun.wait(PATIENCE_S)
                process.kill()
                writer.join()
            else:
                process.terminate()


def main(what: str, count: Annotated[int | None, typer.Argument()] = None) -> None:
    if what == "clients":
        times = clients(count or 20)
        p50, most = float(np.median(times)), max(times)
        print(
            f"a slot of a killed client is another's after {p50:.1f} ms (P50), at most {most:.1f}"
        )
    else:
        restart(count or 100_000)


if __name__ == "__main__":
    typer.run(main)
