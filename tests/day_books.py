"""What must hold of a running store at any moment, and what of a quiet one: its books add up.

Decides what counts as a leak of slots, extents, memory, threads or file descriptors. Asks a runtime
for nothing that would change it, beyond letting go of what has expired.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prefetchd import Runtime
from prefetchd.model import NO_IDS, Forgotten
from tests.memory_campaign import held_by

RSS_GROWTH_BYTES, HELD_GROWTH_BYTES = 8 << 20, 64 << 10
"""The most that memory may grow over the last three quarters of a day: of the whole process, and
of what can be reached from the runtime."""


class Violation(Exception):  # noqa: N818  (it is a finding, not a fault of the campaign)
    """Something that was promised did not hold."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True, slots=True)
class Footprint:
    """`held`: bytes reachable from the runtime, by class; `rss`: bytes of the process in memory."""

    rss: int
    held: Counter[str]
    threads: int
    descriptors: int


def footprint(runtime: Runtime) -> Footprint:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with runtime.engine.lock:
        held = held_by(runtime)
    held.pop("Memory", 0)  # a device that is the medium itself
    descriptors = len(os.listdir("/proc/self/fd"))
    return Footprint(resident, held, threading.active_count(), descriptors)


def check_growth(early: Footprint, late: Footprint) -> None:
    """Threads and open files may become fewer: in a process with others they are not all ours.

    Raises Violation.
    """
    more, by_class = late.rss - early.rss, late.held - early.held
    held = sum(late.held.values()) - sum(early.held.values())
    must(more <= RSS_GROWTH_BYTES, f"the process has grown by {more} bytes")
    must(
        held <= HELD_GROWTH_BYTES, f"the runtime holds {held} bytes more: {by_class.most_common(6)}"
    )
    must(late.threads <= early.threads, f"{early.threads} threads have become {late.threads}")
    must(
        late.descriptors <= early.descriptors,
        f"{early.descriptors} open files have become {late.descriptors}",
    )


class CapWatch:
    """Looks at the byte cap whenever an extent is taken, which is when it could be exceeded."""

    def __init__(self, runtime: Runtime, cap_bytes: int) -> None:
        catalog = runtime._parts.catalog
        shape = catalog.superblock
        self._catalog, self._cap_bytes = catalog, cap_bytes
        self._extent_bytes = shape.extent_bytes
        self._beside_bytes = shape.file_bytes - shape.blocks * shape.extent_bytes
        self._reserve = catalog.reserve
        self.peak_bytes = 0
        catalog.reserve = self._watched  # type: ignore[method-assign]

    def _watched(self) -> int:
        block = self._reserve()
        self.look()
        return block

    def look(self) -> None:
        used = self._beside_bytes + self._catalog.blocks_used * self._extent_bytes
        self.peak_bytes = max(self.peak_bytes, used)
        must(used <= self._cap_bytes, f"{used} bytes are used, the cap is {self._cap_bytes}")


def check_books(runtime: Runtime) -> None:
    """At any moment: every extent is accounted for once, and every block that was ever put."""
    with runtime.engine.lock:
        parts, room = runtime._parts, runtime.room
        catalog, writer = parts.catalog, parts.driver.writer
        parts.core.staging.check()
        used, free = catalog.blocks_used, len(catalog.free)
        blocks = catalog.superblock.blocks
        must(used + free == blocks, f"{used} extents used + {free} free are not {blocks}")
        free_ones = np.array([*catalog.free], np.int64)
        must(len(np.unique(free_ones)) == free, "an extent is free twice")
        must(not catalog._taken[free_ones].any(), "an extent is free and taken")
        paths = range(catalog.superblock.stripes)
        on_paths = [int(np.count_nonzero(catalog._taken[path :: len(paths)])) for path in paths]
        counted = [catalog.taken_on(path) for path in paths]
        must(counted == on_paths, f"{on_paths} extents are taken on the paths, counted {counted}")
        visible = catalog.blocks_visible
        coming = sum(not job.visible for job in writer._jobs.values())
        leaving = len(room._leaving) + len(catalog.discarded) + writer.commit.removing
        words = f"{used} extents used: {visible} found, {coming} coming, {leaving} leaving"
        must(used == visible + coming + leaving, words)
        gone = room.evicted + room.expired + room.rotten
        words = f"{writer.admitted} blocks admitted: {visible} found, {coming} coming, {gone} gone"
        must(writer.admitted == visible + coming + gone, words)
        must(len(catalog.index.block_of) == visible, "keys and found blocks are not as many")


def check_quiet(runtime: Runtime) -> None:
    """With no ticket open: nobody holds anything, and nothing is there whose time is over."""
    engine, parts = runtime.engine, runtime._parts
    with engine.lock:
        engine.handle(Forgotten(NO_IDS))  # pins given back count as given back
        runtime.room.tidy()
        pinned = int(np.count_nonzero(parts.core.staging.pins))
        kept = len(runtime._puts.behind._kept) * runtime.geometry.layers  # until they are written
        must(pinned == kept, f"{pinned} slots are pinned: no ticket is open, {kept} are written")
        must(not runtime._tickets and not engine.core.unanswered, "a demand is still open")
        must(not runtime._puts._open, "a put is still open")
        visible = np.flatnonzero(parts.catalog.index.visible)
        times = parts.catalog.table["expires_ns"][visible]
        must((times > runtime.room.wall_ns()).all(), "a block is found though its time is over")
