"""Many clients at a daemon whose drive goes wrong in every way, for as long as one likes.

`python -m tests.sidecar_soak --seconds 600` has 8 clients put, look up, demand, hint, hold, come
and go, on a drive that answers with EIO, ENOSPC, short reads, flipped bits and stalls. Every page
that anybody gets is compared with what its key says it must be. At the end nothing is held, every
slot can be used, descriptors are as many as before, and what the store says it has is right;
the daemon's memory is told by quarters.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Annotated

import numpy as np
import psutil
import typer
from numpy.typing import NDArray

from prefetchd import ChainHint, Client, DoneHint, Options, PageHint, connect, uniform
from prefetchd.assembly import open_device
from prefetchd.bench.crowd import together
from prefetchd.bench.served import private_daemon
from prefetchd.checking import Report, check
from prefetchd.core import CoreLimits
from prefetchd.device import Arena, File, Ops, StorageDevice
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.store_making import create
from prefetchd.store_opening import Opening
from prefetchd.tickets import Ticket

LAYERS, PAGE_BYTES = 4, 4096
LAYOUT = uniform(LAYERS, PAGE_BYTES)
BLOCKS, KEYS, SLOTS = 512, 2048, 384
FAULTS = Faults(
    seed=1, eio=0.004, enospc=0.004, short=0.004, flip=0.004, stall=0.002, stall_reaps=40
)
INJECTED, CALM = "injected.json", "calm"


class Counted(Faulty):
    """Tells at the end what it has done; goes right once there is a file `calm` beside it."""

    told: Path

    def submit(self, ops: Ops) -> int:
        if self._bounds[-1] and self.told.with_name(CALM).exists():
            self._bounds[:] = 0
            self.release_stalled()
        return super().submit(ops)

    def close(self) -> None:
        super().close()
        self.told.write_text(json.dumps(self.injected))


@dataclass(frozen=True)
class FaultyDisk:
    """io_uring with faults, told in `told`; the first operations, of opening, are spared."""

    told: Path
    faults: Faults = FAULTS

    def __call__(self, files: Sequence[File], arena: Arena, depth: int) -> StorageDevice:
        inner, _ = open_device(Options(depth=depth), files, arena)
        device = Counted(inner, self.faults)
        device.told = self.told
        return device


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> NDArray[np.uint8]:
    """(LAYERS, PAGE_BYTES): all that can be told from a key."""
    random = np.random.Generator(np.random.SFC64(number))
    return random.integers(0, 256, (LAYERS, PAGE_BYTES), np.uint8)


@dataclass
class Tally:
    """What one client did and met."""

    steps: int = 0
    put: int = 0
    put_failed: int = 0
    pages: int = 0
    missing: int = 0
    wrong: int = 0
    connections: int = 1
    slowest_s: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """What a client's process does, for `steps` steps or `seconds`, whichever is over first."""

    address: str
    steps: int
    seconds: float
    pause_s: float

    def __call__(
        self, number: int, begin: Callable[[], None], progress: Callable[[int], None]
    ) -> Tally:
        client = _Client(self.address, number)
        begin()
        end_s, never = time.monotonic() + self.seconds, Event()
        while client.tally.steps < self.steps and time.monotonic() < end_s:
            client.step()
            progress(1)
            if self.pause_s:
                never.wait(self.pause_s)
        client.kv.close()
        return client.tally


class _Client:
    """Takes one of the ways in which an engine uses the daemon, again and again."""

    def __init__(self, address: str, number: int) -> None:
        self._address = address
        self._number = number
        self._random = np.random.default_rng(number)
        self._held: list[tuple[Ticket, list[int], int]] = []
        self.tally = Tally()
        self.kv: Client = connect(address, layout=LAYOUT)

    def step(self) -> None:
        start_s = time.monotonic()
        ways = [self._put, self._demand, self._demand, self._demand, self._hint, self._let_go]
        if self._random.random() < 0.005:
            self._come_again()
        else:
            ways[int(self._random.integers(len(ways)))]()
        self.tally.steps += 1
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - start_s)

    def _some(self, most: int) -> list[int]:
        """Keys, some asked for much more often than others."""
        count = int(self._random.integers(1, most + 1))
        drawn = self._random.zipf(1.2, 4 * count) * 7 + self._random.integers(0, 300)
        return list(dict.fromkeys((drawn % KEYS).tolist()))[:count]

    def _put(self) -> None:
        numbers, tally = self._some(8), self.tally
        durability = "durable" if self._random.random() < 0.5 else "fast"
        pages = np.stack([content(number) for number in numbers])
        put = self.kv.put([key(number) for number in numbers], pages, durability=durability)
        if self._random.random() < 0.8:
            put.wait()
            tally.put += len(numbers) - len(put.failures)
            tally.put_failed += len(put.failures)
            for words in put.failures:
                why = words.split(": ", 1)[-1]
                tally.failures[why] = tally.failures.get(why, 0) + 1

    def _found(self) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
        """Numbers, blocks and stamps of some that are stored."""
        numbers, blocks, stamps = [], [], []
        for number in self._some(12):
            found = self.kv.find([key(number)])
            if len(found) and found.blocks[0] not in blocks:
                numbers.append(number)
                blocks.append(int(found.blocks[0]))
                stamps.append(int(found.stamps[0]))
        return numbers, np.array(blocks, np.int64), np.array(stamps, np.int64)

    def _demand(self) -> None:
        numbers, blocks, stamps = self._found()
        if not numbers:
            return
        layer = int(self._random.integers(LAYERS))
        ticket = self.kv.demand(self.kv.pages(blocks, layer), stamps=stamps, request=self._number)
        self._held.append((ticket, numbers, layer))
        chance = self._random.random()
        if chance < 0.05:
            self._held.pop()[0].release()  # given back before it is answered
        elif chance < 0.8 or len(self._held) > 3:
            self._let_go()

    def _let_go(self) -> None:
        """Of the demand that was held for longest, once all its pages have been compared."""
        if not self._held:
            return
        ticket, numbers, layer = self._held.pop(0)
        ticket.wait()
        for place in np.flatnonzero(~ticket.missing).tolist():
            page = ticket.view(place)
            right = np.array_equal(page, content(numbers[place])[layer])
            self.tally.wrong += not right and ticket.valid  # type: ignore[attr-defined]
        self.tally.pages += len(numbers)
        self.tally.missing += int(np.count_nonzero(ticket.missing))
        ticket.release()

    def _hint(self) -> None:
        numbers, blocks, _ = self._found()
        if not numbers:
            return
        scores = np.linspace(1, 0, len(blocks), dtype=np.float32)
        self.kv.hint(PageHint(self.kv.pages(blocks, 1), scores))
        self.kv.hint(ChainHint(self._number, blocks))
        self.kv.hint(DoneHint(self._number, "end_turn", None, blocks))

    def _come_again(self) -> None:
        """Go, with whatever is held, and come back."""
        self.kv.close()
        self._held.clear()
        self.kv = connect(self._address, layout=LAYOUT)
        self.tally.connections += 1


@dataclass
class Watch:
    """The daemon's memory and descriptors while it works."""

    pid: int
    rss: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    every_s: float = 1.0
    _looked_s: float = 0.0

    def look(self, _: int) -> None:
        if time.monotonic() - self._looked_s < self.every_s:
            return
        self._looked_s = time.monotonic()
        process = psutil.Process(self.pid)
        self.rss.append(process.memory_info().rss)
        self.descriptors.append(process.num_fds())

    def quarters(self) -> list[float]:
        """Median MiB in each quarter of the time; the first tenth is left out, as a beginning."""
        later = np.array(self.rss[len(self.rss) // 10 :])
        return [float(np.median(part)) / 2**20 for part in np.array_split(later, 4) if len(part)]


@dataclass
class Soak:
    clients: list[Tally]
    watch: Watch
    descriptors_before: int
    descriptors_after: int
    pinned_after: int
    extents_lost: int
    slots: int
    slots_usable: int
    injected: dict[str, int]
    store: Report


def soak(folder: Path, clients: int, steps: int, seconds: float, pause_s: float = 0.0) -> Soak:
    store, told = folder / "store", folder / INJECTED
    create(store, LAYOUT, BLOCKS, fill=False)
    options = Options(
        device=FaultyDisk(told),
        staging_bytes=SLOTS * PAGE_BYTES,
        demand_timeout_s=2.0,
        put_timeout_s=5.0,
        lease_s=0.05,
        core=CoreLimits(read_timeout_ns=500_000_000),
    )
    with (
        private_daemon(store, options, []) as address,
        connect(address, layout=LAYOUT, write_bytes=0) as kv,
    ):
        process, watch = psutil.Process(kv.daemon_pid), Watch(kv.daemon_pid)
        kv.stats()  # so that it has closed what it sent with its welcome
        descriptors = process.num_fds()
        load = Load(address, steps, seconds, pause_s)
        tallies = together(load, clients, watch.look)
        (folder / CALM).touch()
        usable = usable_slots(kv)
        until(lambda: kv.stats().slots_pinned == 0)
        until(lambda: process.num_fds() == descriptors)
        until(lambda: extents_lost(kv) == 0)
        pinned, left = kv.stats().slots_pinned, process.num_fds()
        lost = extents_lost(kv)
    injected = json.loads(told.read_text())
    report = check(store, Opening())
    return Soak(tallies, watch, descriptors, left, pinned, lost, kv.slots, usable, injected, report)


def extents_lost(kv: Client) -> int:
    """Extents that are in use, and by no block that can be found."""
    stats = kv.stats()
    return stats.store_writes.blocks_used - stats.blocks_visible


def usable_slots(kv: Client) -> int:
    """How many pages can be had at once, of as many as there are slots, once the drive goes right.
    What hung until now is let go by the first demands."""
    stored = [found for number in range(KEYS) if len(found := kv.lookup([key(number)]))]
    blocks = np.unique(np.concatenate(stored))
    pages = np.concatenate([kv.pages(blocks, layer) for layer in range(LAYERS)])
    assert len(pages) >= 2 * kv.slots
    for first in range(0, len(pages) - kv.slots, kv.slots // 4):
        kv.demand(pages[first : first + kv.slots // 4]).wait().release()
    most = 0
    for _ in range(5):  # on a busy machine a read may take longer than it may
        with kv.demand(pages[-kv.slots :], timeout_s=60) as ticket:
            most = max(most, int(np.count_nonzero(~ticket.missing)))
        if most == kv.slots:
            break
    return most


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Or until the time is over: what is still wrong then is told."""
    end_s, never = time.monotonic() + seconds, Event()
    while not true() and time.monotonic() < end_s:
        never.wait(0.01)


def tell(found: Soak) -> None:
    total: dict[str, float] = {}
    for tally in found.clients:
        for name, value in asdict(tally).items():
            if name == "slowest_s":
                total[name] = max(total.get(name, 0.0), value)
            elif name != "failures":
                total[name] = total.get(name, 0) + value
    print(f"clients: {len(found.clients)}, together {total}")
    why: dict[str, int] = {}
    for tally in found.clients:
        for words, count in tally.failures.items():
            why[words] = why.get(words, 0) + count
    for words, count in sorted(why.items(), key=lambda one: -one[1])[:12]:
        print(f"  {count} puts failed: {words}")
    print(f"injected: {found.injected}")
    print(f"slots: {found.pinned_after} held, {found.slots_usable} of {found.slots} usable at once")
    print(f"extents lost: {found.extents_lost}")
    print(f"descriptors: {found.descriptors_before} before, {found.descriptors_after} after")
    quarters = found.watch.quarters()
    grown = quarters[-1] / quarters[0] - 1 if quarters else 0.0
    told = ", ".join(f"{size:.1f}" for size in quarters)
    print(f"RSS of the daemon by quarters: {told} MiB ({grown:+.1%})")
    print(f"store: {found.store.blocks_stored} blocks, problems {found.store.counts}")


def main(
    seconds: Annotated[float, typer.Option(min=1)] = 600,
    clients: Annotated[int, typer.Option(min=1)] = 8,
    pause_ms: Annotated[float, typer.Option(min=0)] = 5,
) -> None:
    with tempfile.TemporaryDirectory() as name, suppress(KeyboardInterrupt):
        tell(soak(Path(name), clients, 1 << 60, seconds, pause_ms / 1e3))


if __name__ == "__main__":
    typer.run(main)
