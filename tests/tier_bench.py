"""The write side of a store without threads, over a device that forgets; and a model beside it.

`Tier` is the real catalog, writer, commit, room and recovery, driven one step at a time. `World`
does things to it by chance, cuts the power, and checks what every kind of recovery finds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.arena import aligned_arena
from prefetchd.commit import Commit
from prefetchd.devices.memory import Memory
from prefetchd.devices.powerloss import Image, PowerLoss
from prefetchd.driver import Driver
from prefetchd.engine import Engine
from prefetchd.format import Superblock, encode_superblock, newest_superblock, superblock_place
from prefetchd.journal import Journal
from prefetchd.key_file import make
from prefetchd.model import Ids
from prefetchd.paths import Paths
from prefetchd.pipeline import FlushLimits, Waiter
from prefetchd.places import locate
from prefetchd.records import NEVER_NS, PUBLISH, Records
from prefetchd.recovery import recover
from prefetchd.room import Room
from prefetchd.store import of_memory, plan_superblock
from prefetchd.writer import Writer, Written
from tests.runtime_bench import layout

BLOCKS, LAYERS, PAGE_BYTES, BUFFERS = 9, 2, 4000, 3
SECOND_NS = 10**9


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


@cache
def pages_of(number: int) -> NDArray[np.uint8]:
    """What is put under a key: (LAYERS, PAGE_BYTES)."""
    return np.random.default_rng(number).integers(0, 256, (LAYERS, PAGE_BYTES), np.uint8)


def new_image(stripes: int, blocks: int = BLOCKS, key: Path | None = None) -> Image:
    """`key`: encrypted; where the key file is made."""
    planned = plan_superblock(layout(PAGE_BYTES, LAYERS), blocks, 4096, encrypted=key is not None)
    shape = msgspec.structs.replace(planned, stripes=stripes)
    if key is not None:
        shape = msgspec.structs.replace(shape, key_check=make(key, shape.store_id))
    image: Image = []
    for part in map(shape.of_stripe, range(stripes)):
        file = np.zeros(part.file_bytes, np.uint8)
        block = encode_superblock(part)
        file[superblock_place(part) :][: len(block)] = block
        image.append(file)
    head = Journal(shape, *shape.journal).head()
    image[0][head.offset :][: len(head.data)] = head.data
    return image


class _Alone:
    """As much of an engine as room needs: a clock, a lock, nobody to tell."""

    def __init__(self) -> None:
        self.now_ns = SECOND_NS
        self.lock = threading.RLock()

    def clock(self) -> int:
        return self.now_ns

    def handle(self, event: object) -> None:
        pass


class Tier:
    def __init__(
        self,
        image: Image,
        *,
        scan: bool = False,
        device: Callable[..., Memory] = PowerLoss,
        limits: FlushLimits | None = None,
        depth: int = 16,
    ) -> None:
        shapes: list[Superblock] = [newest_superblock(file[: 1 << 14]) for file in image]
        self.store = of_memory(shapes)
        extent, header = shapes[0].extent_bytes, shapes[0].header_bytes
        size = BUFFERS * extent + Commit.region_bytes(header)
        probes = size
        size += len(shapes) * shapes[0].superblock_bytes
        arena = aligned_arena(size + shapes[0].slot_bytes, 4096)
        staging, self.scratch = arena[: shapes[0].slot_bytes], arena[shapes[0].slot_bytes :]
        self.device = device(self.store.files, arena, depth, contents=image)
        visible = np.zeros(shapes[0].blocks, np.bool_)
        self.catalog, journal = recover(
            self.store, self.device, self.scratch, "default", visible, scan=scan
        )
        limits = limits or FlushLimits(3, SECOND_NS)
        end = BUFFERS * extent
        start = len(staging)
        self.commit = Commit(self.catalog, journal, self.scratch[end:probes], start + end, limits)
        buffers = self.scratch[:end].reshape(BUFFERS, extent)
        self.writer = Writer(self.catalog, buffers, start, self.commit)
        memory = self.scratch[probes:]
        names = [str(number) for number in range(len(shapes))]
        self.paths = Paths(names, self.catalog, self.commit, memory, start + probes)
        self.driver = Driver(
            self.device, self.catalog, staging.reshape(1, -1), self.writer, self.paths
        )
        self.alone = _Alone()
        self.wall_ns = 1_000 * SECOND_NS
        self.held = np.zeros(shapes[0].blocks, np.bool_)
        self.room = Room(
            cast(Engine, self.alone), self.driver, lambda: self.held, [], 0, evict=True
        )
        self.room.wall_ns = lambda: self.wall_ns
        self.puts = 0

    def put(self, number: int, durable: bool, expires_ns: int = NEVER_NS) -> int | None:
        """Start a put; None if there is no buffer or extent for it. Its number otherwise."""
        self.room.tidy()
        key, waiter = key_of(number), Waiter(self.puts, 0, durable, 2**62)
        if self.writer.under_way(key):
            if not self.writer.join(key, waiter):
                return None
        elif self.catalog.find(key) >= 0 or self.writer.full or not self.room.has_extent():
            return None
        else:
            job = self.writer.reserve(waiter, key, self.catalog.binding.seed(key))
            self.writer.filled(job, self.writer.fill(job, pages_of(number)), expires_ns)
        self.puts += 1
        self.go()
        return self.puts - 1

    def go(self) -> None:
        self.driver.write(self.alone.now_ns)
        self.driver.start(self.alone.now_ns)

    def reap(self) -> list[Written]:
        _, written = self.driver.reap(self.alone.now_ns)
        self.go()
        return written

    def settle(self) -> list[Written]:
        """Let everything end."""
        self.commit.draining = True
        ended: list[Written] = []
        self.go()
        while not self.writer.idle:
            self.alone.now_ns += SECOND_NS
            ended += self.reap()
        self.commit.draining = False
        return ended

    def close(self) -> Image:
        self.settle()
        self.store.mark_clean(self.device, self.scratch, self.commit.journal)
        return self.device.contents

    def stored(self) -> dict[bytes, int]:
        return dict(self.catalog.index.block_of)

    def statements(self) -> Records:
        """What is said of every block, apart from the order in which it was said."""
        live: Records = self.catalog.live()[["block", "key", "namespace", "expires_ns", "sequence"]]
        return live


def read(image: Image, tier: Tier, block: int) -> NDArray[np.uint8]:
    pages: Ids = block * LAYERS + np.arange(LAYERS)
    files, offsets = locate(tier.catalog.superblock, pages)
    places = zip(np.broadcast_to(files, LAYERS).tolist(), offsets.tolist(), strict=True)
    return np.stack([image[file][at : at + PAGE_BYTES] for file, at in places])


class World:
    """A tier, and what its callers have been told. `durable`: keys that no crash may take;
    `gone`: keys that have been evicted or have expired since."""

    def __init__(self, stripes: int, seed: int, blocks: int = BLOCKS) -> None:
        self.tier = Tier(new_image(stripes, blocks))
        self.random = np.random.default_rng(seed)
        self.waiting: dict[int, tuple[int, bool]] = {}
        self.durable: set[int] = set()
        self.put_ever: set[int] = set()
        self.expires_ns: dict[int, int] = {}

    def note(self, ended: list[Written]) -> None:
        for end in ended:
            number, durable = self.waiting.pop(end.put)
            assert end.block >= 0, "nothing fails here"
            if durable and self.tier.catalog.find(key_of(number)) >= 0:
                self.durable.add(number)

    def forget(self) -> None:
        """What is no longer found was evicted or has expired: nobody is promised it any more."""
        self.durable &= {int.from_bytes(key, "big") for key in self.tier.stored()}

    def put(self, number: int, durable: bool, ttl_s: int = 0) -> None:
        expires_ns = self.tier.wall_ns + ttl_s * SECOND_NS if ttl_s else NEVER_NS
        self.tier.room.tidy()
        known = self.tier.catalog.find(key_of(number)) >= 0
        new = not known and not self.tier.writer.under_way(key_of(number))
        put = self.tier.put(number, durable, expires_ns)
        self.forget()
        if put is not None:
            self.waiting[put] = number, durable
            self.put_ever.add(number)
            if new:
                # A crash may bring back an evicted copy, which has the time it was given.
                self.expires_ns[number] = max(expires_ns, self.expires_ns.get(number, 0))

    def evict(self) -> None:
        self.tier.room.tidy()
        self.tier.room._evict(mine=False)
        self.forget()

    def pass_time(self, milliseconds: int) -> None:
        self.tier.alone.now_ns += milliseconds * 10**6
        self.tier.wall_ns += milliseconds * 10**6
        self.tier.room.tidy()
        self.forget()
        self.tier.go()

    def reap(self) -> None:
        self.note(self.tier.reap())

    def act(self) -> None:
        """Something, by chance."""
        what = self.random.random()
        if what < 0.4:
            ttl_s = int(self.random.integers(1, 6)) if self.random.random() < 0.2 else 0
            self.put(int(self.random.integers(0, 40)), bool(self.random.random() < 0.5), ttl_s)
        elif what < 0.9:
            self.reap()
        elif what < 0.95:
            self.pass_time(int(self.random.integers(1, 2000)))
        else:
            self.evict()

    def reopen(self, image: Image, *, scan: bool) -> Tier:
        tier = Tier([file.copy() for file in image], scan=scan, device=Memory)
        tier.wall_ns = self.tier.wall_ns
        tier.room.tidy()
        return tier

    def check_crash(self, seed: int) -> int:
        """Cut the power; whatever reads the medium then must find all it was promised, and
        nothing wrong. How many blocks were found."""
        image = cast(Any, self.tier.device).crash(seed)
        self.tier.room.tidy()
        self.forget()
        risky = {j.key for jobs in self._pipeline() for j in jobs}
        found = {}
        for scan in (False, True):
            tier = self.reopen(image, scan=scan)
            stored = {int.from_bytes(key, "big"): b for key, b in tier.stored().items()}
            assert stored.keys() <= self.put_ever
            assert self.durable <= stored.keys(), "a durable block is gone"
            settled = {int.from_bytes(k, "big") for k in self.tier.stored() if k not in risky}
            assert settled <= stored.keys(), "more is gone than was at risk"
            for number, block in stored.items():
                assert (read(tier.device.contents, tier, block) == pages_of(number)).all()
                assert self.expires_ns[number] > tier.wall_ns
            self.check_books(tier)
            found[scan] = len(stored)
            self.check_agreement(tier)
        return found[False]

    def go_on(self, seed: int) -> None:
        """Cut the power, and be what is there afterwards."""
        self.tier.room.tidy()
        self.forget()
        wall_ns = self.tier.wall_ns
        self.tier = Tier(cast(Any, self.tier.device).crash(seed))
        self.tier.wall_ns = wall_ns
        self.waiting.clear()
        promised = set(self.durable)
        self.forget()
        assert self.durable == promised

    def _pipeline(self) -> tuple[list[Any], ...]:
        commit = self.tier.commit
        under = commit._under.jobs if commit._under else []
        return commit._unflushed, commit._ready, commit._said, under

    @staticmethod
    def check_books(tier: Tier) -> None:
        catalog = tier.catalog
        assert catalog.blocks_used == int(np.count_nonzero(catalog._taken))
        stripes = catalog.superblock.stripes
        for path in range(stripes):
            assert catalog.taken_on(path) == np.count_nonzero(catalog._taken[path::stripes])
        assert catalog.blocks_visible == len(catalog.index.block_of)
        assert len(set(catalog.free)) == len(catalog.free)
        assert len(catalog.free) == catalog.superblock.blocks - catalog.blocks_used

    def check_agreement(self, tier: Tier) -> None:
        """Once a recovered store is closed, journal and headers say the same."""
        image = tier.close()
        by_journal = self.reopen(image, scan=False)
        by_headers = self.reopen(image, scan=True)
        assert (by_journal.statements() == by_headers.statements()).all()
        assert by_journal.stored() == by_headers.stored()
        assert len(by_journal.catalog.live()) == int(
            np.count_nonzero(by_journal.catalog.table["kind"] == PUBLISH)
        )


def campaign(seeds: range, steps: int, tell: Callable[[int], object] = lambda done: None) -> int:
    """One world a ten seeds, a power failure each; how many blocks were found in all."""
    found, world = 0, None
    for seed in seeds:
        if world is None or seed % 10 == 0:
            world = World(stripes=1 + seed // 10 % 3, seed=seed)
        for _ in range(steps):
            world.act()
        found += world.check_crash(seed)
        if seed % 2:
            world.go_on(seed)
        tell(1)
    return found
