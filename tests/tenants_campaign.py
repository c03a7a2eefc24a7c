"""Two tenants on one drive, one flooding: how much later are the other's demands answered?

`python -m tests.tenants_campaign [--rounds N] [--profile NAME] [--unshared] [--folder DIR]`

A quiet tenant demands four pages that must be read, again and again with a short rest between; in
every second round another tenant floods: demands, chain hints and puts without end, from a process
of its own. Both have their stores on one file system. Without a profile the daemon is a process of
its own and the drive is the one below the folder. With one it runs in this process, on that drive
profile EMULATED, and what stood ahead of the quiet tenant's reads is counted; `--unshared` takes
the gates to the drive away, to see what they are for.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import prefetchd
from prefetchd import Client
from prefetchd.bench.emulation import Emulation
from prefetchd.device import Arena, File, StorageDevice
from prefetchd.devices.emulated import Emulated
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import load_profile
from prefetchd.gate import Gate
from prefetchd.model import ChainHint, Ids
from prefetchd.sidecar.drives import DriveGate
from prefetchd.sidecar.namespace import NamespaceSettings
from tests.runtime_bench import PLAIN, keys, layout
from tests.sidecar_bench import Daemon, Process, daemon

LAYERS, PAGE_BYTES, BLOCKS, STAGING = 8, 1 << 16, 256, 16 << 20
PAGES, REST_S, FLOOD_PAGES, FLOOD_OPEN = 4, 2e-3, 32, 6

CONFIG = """
[namespaces.{name}]
store = "{folder}/{name}"
layers = {layers}
page_bytes = "{page_bytes}"
blocks = {blocks}
fill = true
staging = "16MiB"
predictor = "none"
evict = "lru"
"""


def filled(kv: Client) -> Ids:
    """All page ids of a store that is full."""
    random = np.random.default_rng(5)
    for first in range(0, BLOCKS, 16):
        pages = random.integers(0, 256, (16, LAYERS, PAGE_BYTES), np.uint8)
        kv.put(keys(16, first), pages).wait()
    blocks = kv.lookup(keys(BLOCKS))
    assert len(blocks) == BLOCKS
    return np.concatenate([kv.pages(blocks, layer) for layer in range(LAYERS)])


def flood(address: str) -> None:
    """Ask for far more than there is, while stdin says so."""
    kv = prefetchd.connect(address, namespace="flood")
    ids = filled(kv)
    going = threading.Event()
    print("ready", flush=True)

    def listen() -> None:
        for line in sys.stdin:
            (going.set if line.strip() == "go" else going.clear)()
        going.clear()

    threading.Thread(target=listen, daemon=True).start()
    random, open_, number = np.random.default_rng(6), deque[prefetchd.Ticket](), BLOCKS
    block = random.integers(0, 256, (1, LAYERS, PAGE_BYTES), np.uint8)
    turn = 0
    while True:
        if not going.is_set():
            while open_:
                open_.popleft().release()
            going.wait()
        turn += 1
        open_.append(kv.demand(random.choice(ids, FLOOD_PAGES, replace=False)))
        if len(open_) >= FLOOD_OPEN:
            open_.popleft().wait().release()
        if turn % 4 == 0:
            kv.hint(ChainHint(turn, random.permutation(BLOCKS)[:32].astype(np.int64)))
        if turn % 16 == 0:
            number += 1
            kv.put(keys(1, number), block, durability="fast")


@dataclass
class Tally:
    waits_us: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "flooded": []})
    ahead: dict[str, list[tuple[int, int]]] = field(
        default_factory=lambda: {"alone": [], "flooded": []}
    )
    flood_read: int = 0
    flood_s: float = 0.0

    def print(self) -> None:
        p99 = {}
        for name, waits in self.waits_us.items():
            p50, p90, p99[name] = np.percentile(waits, [50, 90, 99])
            print(
                f"{name:<8} P50 {p50:7.0f}  P90 {p90:7.0f}  P99 {p99[name]:7.0f} us  n {len(waits)}"
            )
            if self.ahead[name]:
                times, total = np.array(self.ahead[name]).sum(0)
                mean = total / max(1, times) / PAGE_BYTES
                print(f"         others' pages in flight when its reads began: mean {mean:.1f}")
        medians = [np.median(waits) for waits in self.waits_us.values()]
        print(f"P99 flooded / alone {p99['flooded'] / p99['alone']:.2f}, ", end="")
        print(f"P50 {medians[1] / medians[0]:.2f}")
        cores, load = os.cpu_count() or 1, os.getloadavg()[0]
        if load > cores:
            print(
                f"CPU-bound: {load:.1f} threads wanted {cores} cores, so times are the host's more "
                "than the drive's; tests.tenants_virtual has none of that"
            )


def demands(kv: Client, ids: Ids, random: np.random.Generator, count: int) -> list[float]:
    """Microseconds that each took; none of the pages was demanded lately."""
    waits, rest = [], threading.Event()
    for _ in range(count):
        rest.wait(REST_S)
        pages = random.choice(ids, PAGES, replace=False)
        start_ns = time.perf_counter_ns()
        ticket = kv.demand(pages, timeout_s=30).wait()
        waits.append((time.perf_counter_ns() - start_ns) / 1e3)
        assert not ticket.missing.any()
        ticket.release()
    return waits


class Shared(Emulation):
    """One modelled drive under all that is opened; told when to hold."""

    def __init__(self, name: str) -> None:
        super().__init__(load_profile(name), held=False)
        self.model = DriveModel(self.profile, 0)
        self.lock = threading.Lock()
        plain = self.model.submit

        def submit(*args: Any, **more: Any) -> Any:
            with self.lock:
                return plain(*args, **more)

        self.model.submit = submit  # type: ignore[method-assign]

    def hold_all(self) -> None:
        for device in self._opened:
            device.held = True

    def __call__(self, files: Sequence[File], arena: Arena, depth: int) -> StorageDevice:
        device = super().__call__(files, arena, depth)
        assert isinstance(device, Emulated)
        device.model = self.model
        return device


def emulated(stack: ExitStack, folder: Path, profile: str) -> tuple[Daemon, Shared]:
    drive = Shared(profile)
    options = replace(PLAIN, staging_bytes=STAGING, device=drive)
    shape = layout(PAGE_BYTES, LAYERS)
    spaces = {
        name: NamespaceSettings(folder / name, shape, BLOCKS, True, options)
        for name in ("quiet", "flood")
    }
    return stack.enter_context(daemon(folder, spaces)), drive


def started(stack: ExitStack, folder: Path) -> str:
    """A daemon in a process of its own; where it is."""
    shape = {"layers": LAYERS, "page_bytes": PAGE_BYTES, "blocks": BLOCKS}
    tables = [CONFIG.format(name=name, folder=folder, **shape) for name in ("quiet", "flood")]
    config = folder / "prefetchd.toml"
    config.write_text("".join(tables))
    return stack.enter_context(Process(folder, "--config", str(config))).address


class Flooder:
    """The process that floods, once it is told to."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.tenants_campaign", "flood", address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        threading.Event().wait(0.3)  # until it is under way, or has ended


def gate_of(served: Daemon) -> DriveGate:
    gate = served.server.namespaces.open["quiet"].gate
    assert gate is not None
    return gate


def campaign(rounds: int, count: int, profile: str, shared: bool, folder: Path) -> Tally:
    tally, random = Tally(), np.random.default_rng(1)
    with ExitStack() as stack:
        served: Daemon | None = None
        if profile:
            served, drive = emulated(stack, folder, profile)
        address = served.address if served else started(stack, folder)
        kv = stack.enter_context(prefetchd.connect(address, namespace="quiet"))
        ids = filled(kv)
        flooder = Flooder(stack, address)
        if served is not None:
            drive.hold_all()
            for name in () if shared else ("quiet", "flood"):
                served.runtime(name).engine.driver.gate = Gate()
        other = stack.enter_context(prefetchd.connect(address, namespace="flood"))
        demands(kv, ids, random, 20)
        for name in ("alone", "flooded") * rounds:
            flooder.tell("go" if name == "flooded" else "rest")
            before = gate_of(served).counts() if served else (0, 0)
            read, start_s = other.stats().bytes_read, time.monotonic()
            tally.waits_us[name] += demands(kv, ids, random, count)
            if served is not None:
                after = gate_of(served).counts()
                tally.ahead[name].append((after[0] - before[0], after[1] - before[1]))
            if name == "flooded":
                tally.flood_read += other.stats().bytes_read - read
                tally.flood_s += time.monotonic() - start_s
        if served is not None:
            print("\n".join(drive.notes()) or "the model was kept to")
    return tally


def main() -> None:
    if sys.argv[1:2] == ["flood"]:
        return flood(sys.argv[2])
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--profile", default="")
    parser.add_argument("--unshared", action="store_true")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        tally = campaign(asked.rounds, asked.count, asked.profile, not asked.unshared, Path(folder))
    tally.print()
    print(f"the flood read {tally.flood_read / tally.flood_s / 1e6:.0f} MB/s")
    return None


if __name__ == "__main__":
    main()
