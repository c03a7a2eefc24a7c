"""The driver: what is urgent overtakes what is queued, and what is cancelled never starts."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np

from prefetchd.catalog import Catalog
from prefetchd.commit import Commit
from prefetchd.device import OP, WRITE, File
from prefetchd.devices.memory import Memory
from prefetchd.driver import Driver
from prefetchd.format import Binding
from prefetchd.hostinfo import errno_name
from prefetchd.journal import Journal
from prefetchd.model import Cancel, IoClass, Read
from prefetchd.paths import Paths
from prefetchd.pipeline import FlushLimits
from prefetchd.store import plan_superblock
from prefetchd.testing import aligned_arena
from prefetchd.writer import Writer
from tests.runtime_bench import BLOCKS, PAGE_BYTES, layout

SLOTS = 6


class OneAtATime(Memory):
    started: list[int]

    def submit(self, ops: Any) -> int:
        taken = super().submit(ops)
        self.started = [*getattr(self, "started", []), *(ops["memory"][:taken] // PAGE_BYTES)]
        return taken


def make() -> tuple[Driver, OneAtATime]:
    shape = plan_superblock(layout(), BLOCKS, 4096)
    arena = aligned_arena(SLOTS * PAGE_BYTES)
    device = OneAtATime([File(-1, "memory", shape.file_bytes)], arena, 1)
    visible = np.ones(BLOCKS, np.bool_)
    catalog = Catalog(shape, Binding(bytes(16), shape.fingerprint, shape.page_bytes), visible)
    commit = Commit(catalog, Journal(shape, 1, 0, 0), arena[:0], len(arena), FlushLimits())
    writer = Writer(catalog, arena[:0].reshape(0, 0), len(arena), commit)
    paths = Paths(["memory"], catalog, commit, arena[:0], 0)
    return Driver(device, catalog, arena.reshape(SLOTS, PAGE_BYTES), writer, paths), device


def read(driver: Driver, io_class: IoClass, *slots: int) -> None:
    chosen = np.array(slots)
    driver.read(Read(chosen * 2, chosen, np.ones(len(slots), np.int64), io_class, 0))
    driver.start(0)


def reaped(driver: Driver) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    while driver.queued or driver.device.in_flight:
        reads, _ = driver.reap(0)
        driver.start(0)
        if reads is not None:
            found += zip(reads.slots.tolist(), reads.whole.tolist(), strict=True)
    return found


def test_a_demand_overtakes_prefetches_that_the_device_has_no_room_for() -> None:
    driver, device = make()
    read(driver, IoClass.PREFETCH, 0, 1, 2)
    read(driver, IoClass.DEMAND, 4, 5)
    assert [slot for slot, _ in reaped(driver)] == [0, 4, 5, 1, 2] == device.started
    device.close()


def test_writes_are_let_past_demands_that_never_end() -> None:
    driver, device = make()
    write = np.zeros(2, OP)
    write["kind"], write["length"], write["tag"] = WRITE, 4096, [1 << 63, 1 << 63 | 1]
    kinds: list[int] = []
    begin = device.submit

    def submit(ops: Any) -> int:
        taken = begin(ops)
        kinds.extend(ops["kind"][:taken].tolist())
        return taken

    device.submit = submit  # type: ignore[method-assign]
    for turn in range(300):
        if turn == 100:
            driver.waiting[IoClass.WRITE_BACK].append(write)  # both at once
        read(driver, IoClass.DEMAND, turn % SLOTS)
        device.reap()
    (places,) = (np.array(kinds) == WRITE).nonzero()
    assert places.tolist() == [164, 229], "after so many reads that began meanwhile, one of them"
    assert not driver.waiting[IoClass.WRITE_BACK]
    device.close()


def test_a_queued_read_that_is_cancelled_ends_without_the_device() -> None:
    driver, device = make()
    read(driver, IoClass.PREFETCH, 0, 1, 2)
    read(driver, IoClass.DEMAND, 3, 4)
    driver.cancel(Cancel(np.array([0, 2, 3])))
    assert sorted(reaped(driver)) == [(0, True), (1, True), (2, False), (3, False), (4, True)]
    assert device.started == [0, 4, 1], "0 had begun"
    assert dict(driver.blame.failures) == {errno_name(errno.ECANCELED): 2}
    device.close()


def test_a_path_is_not_blamed_for_reads_that_it_never_had() -> None:
    driver, device = make()
    read(driver, IoClass.PREFETCH, 0, 1, 2, 3)
    assert device.in_flight == 1
    driver.cancel(Cancel(np.arange(4)))
    assert driver.paths.stats()[0].errors == 1
