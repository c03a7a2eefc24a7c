"""A whole runtime in virtual time on a device that fails and forgets, and a dictionary beside it.

`World` does one thing at a time to a runtime that has no thread of its own, keeps what its callers
may expect, and checks it. A key's pages carry a version, so that bytes of an earlier put of the
same key are told from those of the latest.
"""

from __future__ import annotations

import queue
import select
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from prefetchd import GrowError, GrowingBlock, Options, PutTicket, Runtime, Ticket
from prefetchd.assembly import assemble
from prefetchd.core import CoreLimits
from prefetchd.device import Arena, File
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.powerloss import Image, PowerLoss
from prefetchd.format import newest_superblock
from prefetchd.model import Idle, Ids, Mask
from prefetchd.store import of_memory
from tests.tier_bench import LAYERS, PAGE_BYTES, key_of, new_image

BLOCKS, SLOTS, KEYS = 6, 9, 12
SLOT_BYTES = 4096
SECOND_NS = 10**9
OPTIONS = Options(
    predictor="cross_request",
    evict="lru",
    staging_bytes=SLOTS * SLOT_BYTES,
    write_buffers=3,
    open_blocks_max=2,
    demand_timeout_s=0.5,
    put_timeout_s=1.0,
    flush_after_blocks=3,
    flush_after_s=2.0,
    core=CoreLimits(read_timeout_ns=200_000_000, filled_share_max=0.7),
)


@cache
def content(number: int, version: int) -> NDArray[np.uint8]:
    """(LAYERS, PAGE_BYTES) of one put of a key."""
    random = np.random.default_rng((number, version))
    return random.integers(0, 256, (LAYERS, PAGE_BYTES), np.uint8)


class _Clock:
    def __init__(self) -> None:
        self.now_ns = SECOND_NS

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class _Poll:
    """Waits in virtual time."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._real = select.poll()

    def register(self, what: Any, mask: int) -> None:
        self._real.register(what, mask)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        ready = self._real.poll(0)
        if not ready:
            self._clock.now_ns += int(timeout_ms * 1e6)
        return ready


class _NoPump:
    """The test drives everything itself."""

    def __init__(self, *_: object) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self) -> None: ...
    def call(self) -> None: ...
    def stop(self) -> None: ...


@dataclass
class Put:
    """`version`: what its block holds if it is this put that stores it."""

    ticket: PutTicket
    number: int
    version: int
    durable: bool
    noted: bool = False


@dataclass
class Reader:
    """A demand that has been answered: what each page must be for as long as it is held."""

    ticket: Ticket
    pages: list[NDArray[np.uint8]] = field(default_factory=list)


class World:
    def __init__(self, stripes: int = 1, *, encrypted: bool = False) -> None:
        self.clock = _Clock()
        self.wall_ns = 1_000 * SECOND_NS
        self.versions = 0
        self.ever: dict[int, set[int]] = {number: set() for number in range(KEYS)}
        self.now: dict[int, int] = {}  # by key: the version that is found
        self.late: dict[int, set[int]] = {number: set() for number in range(KEYS)}
        self.promised: dict[int, set[int]] = {}
        self.expires_ns: dict[int, float] = {}
        self.time_given_ns: dict[int, float] = {}  # by version: of the put that brought it
        self.puts: list[Put] = []
        self.readers: list[Reader] = []
        self.open: list[tuple[GrowingBlock, NDArray[np.uint8]]] = []
        self.evicted: set[bytes] = set()
        self.harmed = False
        self.stripes = stripes
        self.path_failed = False  # since the store was opened
        self.counts: Counter[str] = Counter()
        self._patches = ExitStack()
        virtual = {
            "foreground.select": SimpleNamespace(
                poll=lambda: _Poll(self.clock), POLLIN=select.POLLIN
            ),
            "engine.time": SimpleNamespace(monotonic_ns=self.clock, thread_time_ns=int),
            "engine.Pump": _NoPump,
        }
        for name, stand_in in virtual.items():
            self._patches.enter_context(mock.patch(f"prefetchd.{name}", stand_in))
        self._patches.enter_context(mock.patch("prefetchd.transfers._CLOSE_TIMEOUT_NS", 10**6))
        self.device: Faulty
        self._key = None
        if encrypted:
            self._key = Path(self._patches.enter_context(TemporaryDirectory())) / "key"
        self._start(new_image(stripes, BLOCKS, self._key))

    def _start(self, image: Image) -> None:
        def make(files: Sequence[File], arena: Arena, depth: int) -> Faulty:
            self.device = Faulty(PowerLoss(files, arena, depth, contents=image), Faults())
            return self.device

        options = replace(OPTIONS, device=make, key_file=self._key)
        shapes = [newest_superblock(file[: 1 << 14]) for file in image]
        self.runtime = Runtime(assemble(of_memory(shapes), options), options)
        self.runtime.room.wall_ns = lambda: self.wall_ns
        self.parts = self.runtime._parts
        self.catalog = self.parts.catalog
        self.writer = self.parts.driver.writer
        self.harmed = self.path_failed = False
        victims = self.catalog.victims

        def watched(count: int, held: Mask, *, mine: bool) -> Ids:
            chosen = victims(count, held, mine=mine)
            assert not held[chosen].any()
            self.note()  # what was stored before it goes
            self.evicted |= {self.catalog.table["key"][block].tobytes() for block in chosen}
            return chosen

        self.catalog.victims = watched  # type: ignore[method-assign]

    # --- what the model knows ---

    def name_of(self, number: int) -> bytes:
        """Its key, as the store calls it."""
        return self.catalog.names([key_of(number)])[0]

    def lookup(self, number: int) -> int:
        """The block of a key, or -1. One that was found and is not any more has a reason."""
        found = self.runtime.lookup([key_of(number)])
        self.note()
        if len(found):
            return int(found[0])
        key = self.name_of(number)
        over = self.expires_ns.get(number, np.inf) <= self.wall_ns
        gone = key in self.evicted or over
        if self.path_failed and not gone:
            self.counts["out of reach"] += number in self.now
            return -1  # it may be back with its path
        if number in self.now and not gone:
            owners = [put for put in self.puts if put.number == number]
            told = any(put.ticket.failures for put in owners)
            header = any("header" in kind for kind in self.parts.driver.blame.failures)
            assert told or header, f"key {number} is gone without a reason"
            assert number not in self.promised, f"key {number} was durable and is gone"
        self.now.pop(number, None)
        self.promised.pop(number, None)
        return -1

    def note(self) -> None:
        """Take in what the puts have been told."""
        for put in self.puts:
            if put.noted or not put.ticket.done:
                continue
            put.noted = True
            number = put.number
            if put.ticket.blocks[0] < 0:
                assert put.ticket.failures
                if any("ETIMEDOUT" in words for words in put.ticket.failures):
                    self.late[number].add(put.version)
                continue
            self.counts["stored"] += 1
            if self.now.get(number) != put.version:
                self.now[number] = put.version
                self.expires_ns[number] = self.time_given_ns[put.version]
                self.evicted.discard(self.name_of(number))
            if put.durable:
                self.promised[number] = {put.version} | self.late[number]
            elif put.version not in self.promised.get(number, ()):
                self.promised.pop(number, None)  # of a block out of reach, put again but fast
        ended = [put for put in self.puts if put.noted]
        for put in ended[:-40]:
            self.puts.remove(put)

    def expected(self, number: int, page: NDArray[np.uint8], layer: int) -> NDArray[np.uint8]:
        """What the model has for a page that was had; checks it."""
        allowed = {self.now[number]} if number in self.now else set()
        allowed |= self.late[number] | {p.version for p in self.puts if p.number == number}
        if number in self.now:
            pending = any(not put.noted for put in self.puts if put.number == number)
            if not pending and not self.late[number]:
                allowed = {self.now[number]}
        for version in sorted(allowed):
            if np.array_equal(page, content(number, version)[layer]):
                return page.copy()
        raise AssertionError(f"key {number}, layer {layer}: bytes that nobody put there")

    # --- what callers do ---

    def next_version(self, number: int, expires_ns: float = np.inf) -> int:
        """The version that a put of this key would store: that of a copy which is there already or
        on its way, else a new one."""
        if self.lookup(number) >= 0 and number in self.now:
            return self.now[number]
        pending = [put for put in self.puts if put.number == number and not put.noted]
        if pending:
            return pending[-1].version
        self.versions += 1
        self.ever[number].add(self.versions)
        self.time_given_ns[self.versions] = expires_ns
        return self.versions

    def put(self, number: int, *, durable: bool, ttl_s: int = 0, wait: bool = False) -> None:
        expires_ns = self.wall_ns + ttl_s * SECOND_NS if ttl_s else np.inf
        version = self.next_version(number, expires_ns)
        level = "durable" if durable else "fast"
        pages = content(number, version)[None]
        ticket = self.runtime.put(
            [key_of(number)], pages, durability=level, ttl_s=float(ttl_s) if ttl_s else None
        )
        self._putting(Put(ticket, number, version, durable), wait=wait)

    def _putting(self, put: Put, *, wait: bool) -> None:
        self.puts.append(put)
        if wait:
            self.runtime.engine.wait(lambda: put.ticket.done, self.clock() + 10 * SECOND_NS)
        self.note()

    def demand(self, numbers: list[int], layer: int, *, keep: bool) -> None:
        """Read what is found of these keys, and of the open blocks."""
        found = {number: block for number in numbers if (block := self.lookup(number)) >= 0}
        places = np.array(list(found.values()), np.int64)
        pages = np.concatenate(
            [self.runtime.pages(places, layer), *(block.pages(layer) for block, _ in self.open)]
        )
        owned = int(np.count_nonzero(self.parts.core.staging.pins)) + len(pages)
        ticket = self.runtime.demand(pages).wait()
        self.note()
        missing = ticket.missing
        crowded = owned > SLOTS - 1
        assert self.harmed or crowded or not missing.any(), "missing for no reason"
        reader = Reader(ticket)
        for place, number in enumerate(found):
            if not missing[place]:
                self.counts["read"] += 1
                reader.pages.append(self.expected(number, ticket.view(place), layer))
        for place, (_, written) in enumerate(self.open, len(found)):
            if not missing[place]:
                self.counts["read open"] += 1
                reader.pages.append(written[layer])  # the model's, which grows with it
        self.readers.append(reader)
        self.check_reader(reader)
        if not keep or len(self.readers) > 2:
            self.release(0)

    def release(self, place: int) -> None:
        reader = self.readers.pop(place)
        self.check_reader(reader)
        reader.ticket.release()
        self.runtime.engine.handle(Idle())

    def grow(self) -> None:
        try:
            block = self.runtime.grow(request=len(self.open))
        except GrowError:
            self.counts["not grown"] += 1
            return
        self.counts["grown"] += 1
        self.open.append((block, np.zeros((LAYERS, PAGE_BYTES), np.uint8)))

    def write(self, place: int, number: int, version: int, part: int) -> None:
        block, written = self.open[place]
        size = PAGE_BYTES // 4
        for layer in range(LAYERS):
            data = content(number, version)[layer, part * size : (part + 1) * size]
            block.write(layer, data, part * size)
            written[layer, part * size : (part + 1) * size] = data

    def seal(self, place: int, number: int, *, durable: bool, wait: bool) -> None:
        version = self.next_version(number)
        for part in range(4):
            self.write(place, number, version, part)
        block, _ = self.open[place]
        ticket = block.seal(key_of(number), durability="durable" if durable else "fast")
        if not block.is_open:
            self.open.pop(place)
            self.counts["sealed"] += 1
        self._putting(Put(ticket, number, version, durable), wait=wait)

    def drop(self, place: int) -> None:
        block, _ = self.open.pop(place)
        block.drop()

    # --- what happens to them ---

    def pass_time(self, milliseconds: int) -> None:
        self.clock.now_ns += milliseconds * 10**6
        self.wall_ns += milliseconds * 10**6
        self.turn()

    def turn(self) -> None:
        """What the pump would do."""
        self.runtime.engine.collect()
        self.runtime.engine.handle(Idle())
        self.runtime.engine.look_after_writes()
        self.note()

    def harm(self, kind: str, ahead: int) -> None:
        self.harmed = True
        self.device._script[self.device._accepted + ahead] = kind

    def fail_path(self, path: int) -> None:
        """Every operation on it ends with EIO from here on."""
        self.harmed = self.path_failed = True
        self.counts["paths failed"] += 1
        self.device.broken.add(path)

    def bring_back(self) -> None:
        """The device is well again; whether it is believed yet is up to the probes."""
        self.device.broken.clear()

    def heal(self) -> None:
        self.device.release_stalled()
        self.turn()

    def crash(self, seed: int) -> None:
        """Cut the power, or kill the process: it is the same to whoever opens the store next."""
        inner: Any = self.device.inner
        self.note()
        image = inner.crash(seed)
        self._stop(clean=False)
        self._reopen(image)

    def _stop(self, *, clean: bool) -> None:
        if clean:
            self.runtime.close()
        else:
            self.runtime.engine.stop()
            self.parts.close(clean=False)
        self.readers, self.open = [], []
        for put in self.puts:
            if not put.noted and put.ticket.done:
                put.noted = True
        self.puts = []

    def _reopen(self, image: Image) -> None:
        evicted, self.evicted = self.evicted, set()
        self._start([file.copy() for file in image])
        before, self.now = self.now, {}
        self.late = {number: set() for number in range(KEYS)}
        for number in range(KEYS):
            self._check_found(number, before, self.name_of(number) in evicted)
        self.runtime.engine.wait(lambda: self.writer.idle, self.clock() + 5 * SECOND_NS)
        self.check_books()
        used = self.catalog.blocks_used
        assert used == self.catalog.blocks_visible, "an extent is held for nothing"

    def _check_found(self, number: int, before: dict[int, int], evicted: bool) -> None:
        found = self.runtime.lookup([key_of(number)])
        over = self.expires_ns.get(number, np.inf) <= self.wall_ns
        promised = self.promised.get(number)
        if len(found) == 0:
            assert promised is None or evicted or over, f"durable key {number} is gone"
            self.promised.pop(number, None)
            return
        with self.runtime.demand(self.runtime.pages(found, 0)) as ticket:
            page = ticket.view(0)
            held = [v for v in self.ever[number] if np.array_equal(page, content(number, v)[0])]
        assert len(held) == 1, f"key {number}: bytes that nobody ever put there"
        if promised is not None and not evicted and not over:
            assert held[0] in promised, f"durable key {number} is an older one"
        self.now[number] = held[0]
        self.expires_ns[number] = float(self.catalog.table["expires_ns"][found[0]])

    def close_and_reopen(self) -> None:
        """A clean end, if the device lets it be one."""
        self.heal()
        self.bring_back()
        self.device._script.clear()  # the mark of a clean end is waited for without a limit
        inner: Any = self.device.inner
        self._stop_quietly()
        self._reopen(inner.contents)

    def _stop_quietly(self) -> None:
        try:
            self._stop(clean=True)
        except Exception as error:
            assert self.harmed, error  # noqa: PT017
            self._stop(clean=False)

    # --- what must hold ---

    def check(self) -> None:
        self.parts.core.staging.check()
        self.check_books()
        for reader in self.readers:
            self.check_reader(reader)
        for block, _ in self.open:
            assert block.is_open
        assert self.runtime.stats().store_writes.blocks_open == len(self.open)

    def check_reader(self, reader: Reader) -> None:
        had = [place for place, gone in enumerate(reader.ticket.missing) if not gone]
        assert len(had) == len(reader.pages)
        for place, page in zip(had, reader.pages, strict=True):
            assert np.array_equal(reader.ticket.view(place), page), "a reader's bytes have changed"

    def check_books(self) -> None:
        catalog = self.catalog
        assert catalog.blocks_used == int(np.count_nonzero(catalog._taken)) <= BLOCKS
        stripes = catalog.superblock.stripes
        for path in range(stripes):
            assert catalog.taken_on(path) == np.count_nonzero(catalog._taken[path::stripes])
        free = list(catalog.free)
        assert len(set(free)) == len(free) == BLOCKS - catalog.blocks_used
        assert not catalog._taken[free].any()
        for key, block in catalog.index.block_of.items():
            assert catalog._taken[block]
            assert catalog.index.visible[block]
            assert catalog.table["key"][block].tobytes() == key
        opened = int(np.count_nonzero(catalog.index.visible)) - catalog.blocks_visible
        assert opened >= len(self.open)

    def finish(self) -> None:
        """Everything comes to its end; then nothing is held for anybody."""
        while self.readers:
            self.release(0)
        while self.open:
            self.drop(0)
        self.device._script.clear()
        self.bring_back()
        self.heal()
        self.writer.commit.draining = True
        deadline_ns = self.clock() + 20 * SECOND_NS
        self.runtime.engine.wait(lambda: self.writer.idle, deadline_ns)
        self.runtime.lookup([])
        self.runtime.engine.wait(lambda: self.writer.idle, deadline_ns)
        self.note()
        lost = self.device.injected["lose"]
        staging = self.parts.core.staging
        assert not staging.pins.any(), "a pin is left"
        if not lost:
            assert (staging.state % 2 == 0).all(), "a slot is the device's, and it has none"
            assert self.writer.idle
            assert not any(self.writer._writing), "a write buffer is left"
            troubles = sum(
                n for kind, n in self.parts.driver.blame.failures.items() if "header" in kind
            )
            left = self.catalog.blocks_used - self.catalog.blocks_visible
            assert 0 <= left <= troubles, f"{left} extents are held for nothing"
        self.check()
        self.close_and_reopen()
        self.end()

    def end(self) -> None:
        try:
            self.runtime.engine.stop()
            self.parts.close(clean=False)
        finally:
            self._patches.close()
