"""Checking and repairing a store that nobody uses.

Decides what counts as wrong, in which words it is told, and what a repair removes. Reading every
byte is the survey's; what is believed of journal and headers is the recovery's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prefetchd.arena import aligned_arena
from prefetchd.assembly import open_device
from prefetchd.catalog import Catalog
from prefetchd.device import Arena, StorageDevice
from prefetchd.format import Superblock, namespace_id
from prefetchd.journal import Journal
from prefetchd.key_file import cipher_of
from prefetchd.options import Options
from prefetchd.records import PUBLISH, REMOVE
from prefetchd.recovery import recover
from prefetchd.restating import write_headers, write_journal
from prefetchd.store import Store
from prefetchd.store_opening import Opening, open_store
from prefetchd.store_place import StoreError
from prefetchd.survey import Progress, Survey, arena_bytes, survey

if TYPE_CHECKING:
    from prefetchd.cipher import PageCipher

PROBLEMS_MAX = 1000
"""So many are named; the others are counted."""
_SHAPE = (
    "layers",
    "page_bytes",
    "slot_bytes",
    "blocks",
    "alignment_bytes",
    "fingerprint",
    "key_check",
)


class Problem(msgspec.Struct, frozen=True):
    """`block`: -1 if it is of none."""

    kind: str
    path: str
    block: int
    words: str


class Report(msgspec.Struct, frozen=True):
    """What a check found. `counts`: all problems by kind; `problems` names the first of them.

    `seconds` and `bytes_read` are of the pass over all blocks; `notes` is what is no fault.
    """

    store: str
    clean: bool
    blocks: int
    blocks_stored: int
    pages_right: int
    bytes_read: int
    seconds: float
    counts: dict[str, int]
    problems: list[Problem]
    notes: list[str]
    schema: str = "prefetchd.store.check/1"


class Repaired(msgspec.Struct, frozen=True):
    """What a repair did. `removed`: blocks; `left`: what could not be helped, in words."""

    store: str
    blocks_stored: int
    removed: int
    headers_written: int
    left: list[str]
    schema: str = "prefetchd.store.repair/1"


@dataclass(frozen=True, slots=True)
class Held:
    """An open store, all that was found in it, and memory that its device may use. `closed`: its
    first superblock as it was found. `cipher`: if its pages are encrypted and to be read."""

    store: Store
    device: StorageDevice
    arena: Arena
    catalog: Catalog
    journal: Journal
    closed: Superblock
    cipher: PageCipher | None
    notes: tuple[str, ...]


@contextmanager
def held(
    place: Path,
    opening: Opening,
    *,
    device: str = "uring",
    distrust: bool = False,
    pages: bool = False,
    progress: Progress | None = None,
) -> Iterator[Held]:
    """`distrust`: journal and headers are both read, however it was closed. `pages`: they will be
    read, too. Raises StoreError."""
    store = open_store(place, None, opening)
    try:
        closed = store.superblock
        key, space = opening.key_file, namespace_id("default")
        cipher = cipher_of(closed, str(place), key, space) if pages else None
        if distrust:
            store.superblocks[0] = msgspec.structs.replace(closed, clean=False)
        size = max(arena_bytes(closed), closed.extent_bytes)
        arena = aligned_arena(size, closed.alignment_bytes)
        opened, notes = open_device(Options(device=device), store.files, arena)
        try:
            visible = np.zeros(closed.blocks, np.bool_)
            catalog, journal = recover(store, opened, arena, "default", visible, progress=progress)
            notes = (*store.notes, *notes)
            yield Held(store, opened, arena, catalog, journal, closed, cipher, notes)
        finally:
            opened.close()
    finally:
        store.release()


def check(
    place: Path,
    opening: Opening,
    *,
    device: str = "uring",
    scanning: Progress | None = None,
    progress: Progress | None = None,
) -> Report:
    """Read every page of a store and verify it, and its records against each other. Raises
    StoreError if it cannot be opened."""
    opening = replace(opening, read_only=True)
    with held(place, opening, device=device, pages=True, progress=scanning) as found:
        problems = _Problems(found)
        problems.about_the_whole()
        start_ns = time.monotonic_ns()
        table = found.catalog.table
        seen = survey(found.store, found.device, found.arena, table, progress, found.cipher)
        seconds = (time.monotonic_ns() - start_ns) / 1e9
        problems.about_blocks(seen)
        return Report(
            str(place),
            found.closed.clean,
            found.closed.blocks,
            seen.blocks,
            seen.pages_right,
            seen.bytes_read,
            seconds,
            dict(problems.counts),
            problems.named,
            [*found.notes, *problems.notes],
        )


class _Problems:
    def __init__(self, found: Held) -> None:
        self.counts: Counter[str] = Counter()
        self.named: list[Problem] = []
        self.notes: list[str] = []
        self._found = found

    def _add(self, kind: str, file: int, block: int, words: str) -> None:
        self.counts[kind] += 1
        if len(self.named) < PROBLEMS_MAX:
            path = self._found.store.files[file].path
            self.named.append(Problem(kind, path, block, words))

    def about_the_whole(self) -> None:
        found, closed = self._found, self._found.closed
        for number, part in enumerate(found.store.superblocks):
            different = [name for name in _SHAPE if getattr(part, name) != getattr(closed, name)]
            if different:
                words = f"its superblock says other {', '.join(different)} than the first path's"
                self._add("superblock", number, -1, words)
        if not closed.clean:
            self.notes.append(
                "it was not closed cleanly, or a copy of its superblock is damaged; journal and "
                "headers are both believed"
            )
        elif closed.journal[0] == 0:
            self.notes.append("it has no journal; its headers are all there is")
        elif found.journal.state != closed.journal:
            words = "its journal is damaged, or names a key twice; its headers are believed instead"
            self._add("journal", 0, -1, words)

    def about_blocks(self, seen: Survey) -> None:
        stripes = self._found.closed.stripes
        for block, words in sorted(seen.unread.items()):
            self._add("unreadable", block % stripes, block, f"block {block}: {words}")
        for block, layers in sorted(seen.pages.items()):
            some = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
            words = f"block {block}: pages of layers {some} are not what was written"
            self._add("checksum", block % stripes, block, words)
        believed = self._found.closed.clean and "journal" not in self.counts
        for block, words in sorted(seen.headers.items()):
            # After an unclean close the two may differ, and the newer one holds.
            if believed and self._found.closed.journal[0]:
                self._add("header", block % stripes, block, f"block {block}: its header {words}")
        catalog = self._found.catalog
        used = int(np.count_nonzero(catalog.table["kind"] == PUBLISH))
        if catalog.blocks_used != used:
            lost = catalog.blocks_used - used
            self._add("accounting", 0, -1, f"{lost} extents are neither stored nor free")


# --- repair ---


def repair(
    place: Path,
    opening: Opening,
    *,
    device: str = "uring",
    scanning: Progress | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Remove blocks that fail, make journal and headers agree, free what belongs to nothing.

    Raises StoreError, and removes nothing, if most of what lies on a path cannot be read: then the
    path is at fault and not the blocks.
    """
    words: dict[str, Any] = {"device": device, "progress": scanning}
    with held(place, opening, distrust=True, pages=True, **words) as found:
        table = found.catalog.table
        seen = survey(found.store, found.device, found.arena, table, progress, found.cipher)
        _check_paths(found, seen)
        bad = np.array(sorted({*seen.pages, *seen.unread}), np.int64)
        live = bad[table["kind"][bad] == PUBLISH]
        stale = np.array(sorted(set(seen.headers) - set(bad.tolist())), np.int64)
        gone = stale[table["kind"][stale] != PUBLISH]
        here = stale[table["kind"][stale] == PUBLISH]
        removed = np.concatenate([bad, gone])
        found.catalog.say(removed, REMOVE)
        found.catalog.say(here, PUBLISH)
        written = np.concatenate([removed, here])
        missed = write_headers(found.device, found.arena, found.closed, table[written])
        lost = written[missed].tolist()
        left = [f"the header of block {block} cannot be written" for block in lost]
        # A header that cannot be written would be believed again if the journal were lost; the
        # journal says that it is gone, with a higher sequence number.
        if not write_journal(found.device, found.arena, found.journal, table[table["kind"] != 0]):
            raise StoreError(f"store {place}: its journal cannot be written; see the kernel log")
        found.store.mark_clean(found.device, found.arena, found.journal)
        stored = int(np.count_nonzero(table["kind"] == PUBLISH))
        return Repaired(str(place), stored, len(live), len(written) - len(left), left)


def _check_paths(found: Held, seen: Survey) -> None:
    stripes = found.closed.stripes
    held_by = Counter((np.flatnonzero(found.catalog.table["kind"] == PUBLISH) % stripes).tolist())
    unread = Counter(block % stripes for block in seen.unread)
    for file, count in unread.items():
        if 2 * count > max(1, held_by[file]) and count > 1:
            raise StoreError(
                f"{found.store.files[file].path}: {count} of {held_by[file]} blocks cannot be "
                f"read ({next(iter(seen.unread.values()))}); the path is at fault, nothing was "
                "removed"
            )
