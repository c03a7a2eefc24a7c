"""What a store holds, found again when it is opened: from its journal or from its headers.

Decides which statements on the medium are believed. After a clean close the journal says all there
is. After anything else, and where the journal fails its checks, every header is read too and of
each block the newest statement holds, wherever it stands; then headers and journal are made to
agree. (docs/decisions/0007 says why that is right.) Knows no policy and runs once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from prefetchd.catalog import Catalog
from prefetchd.device import Arena, StorageDevice
from prefetchd.format import Binding, Superblock, namespace_id
from prefetchd.header_reads import Reader, read_headers
from prefetchd.journal import (
    Journal,
    area_offset,
    generation_of,
    newest,
    page_offset,
    unpack,
)
from prefetchd.model import Ids, Mask
from prefetchd.records import (
    PUBLISH,
    REMOVE,
    Records,
    decode_headers,
    mixed,
    multipliers,
    record_dtype,
)
from prefetchd.restating import (
    CHUNK_BYTES,
    extend_journal,
    flush,
    write_headers,
    write_journal,
)
from prefetchd.store import Store

if TYPE_CHECKING:
    from prefetchd.cipher import PageCipher

log = logging.getLogger("prefetchd")

Progress = Callable[[int, int], None]
"""Called with (blocks looked at, blocks in all)."""


def recover(
    store: Store,
    device: StorageDevice,
    arena: Arena,
    namespace: str,
    visible: Mask,
    *,
    scan: bool = False,
    cipher: PageCipher | None = None,
    progress: Progress | None = None,
) -> tuple[Catalog, Journal]:
    """Prove that the device writes and reads, mark the store in use, find what it holds. Of a store
    that is only read nothing is written, and only reading proved; it is mended in memory.

    `arena` is scratch inside the device's arena, at least one extent long; `visible` (all False)
    is the catalog's from here on, and so is `cipher`. `scan`: do not believe the journal. Raises
    StoreError.
    """
    closed = store.superblock
    if store.read_only:
        store.read_through(device, arena)
    else:
        store.mark(device, arena, clean=False)
    shape = store.superblock
    binding = Binding(namespace_id(namespace), shape.fingerprint, shape.page_bytes)
    catalog = Catalog(shape, binding, visible, cipher)
    found = _Found(store, device, arena, progress)
    journal = None
    if closed.clean and not scan:
        journal = found.by_journal(closed)
    if journal is None:
        started_ns = time.monotonic_ns()
        given_up = closed.clean and closed.journal[0] == 0
        journal = found.by_headers(trust=not (scan or given_up))
        took_s = (time.monotonic_ns() - started_ns) / 1e9
        log.info("store %s: %d headers were read in %.2f s", store.where, shape.blocks, took_s)
    catalog.adopt(found.table, found.occupied)
    catalog.sequence = max(catalog.sequence, int(found.table["sequence"].max(initial=0)))
    return catalog, journal


class _Found:
    """`table`: the newest statement about each block; `seen`: the blocks there is one about."""

    def __init__(
        self, store: Store, device: StorageDevice, arena: Arena, progress: Progress | None
    ) -> None:
        self._store = store
        self._reader = Reader(store, device, arena)
        self._device = device
        self._arena = arena
        self._progress = progress or (lambda done, whole: None)
        self._shape: Superblock = store.superblock
        blocks = self._shape.blocks
        self.table: Records = np.zeros(blocks, record_dtype(self._shape.proof_words))
        self.seen = np.zeros(blocks, np.bool_)
        self.occupied = np.zeros(blocks, np.bool_)
        self._header_sequence = np.zeros(blocks, np.uint64)
        self._empty = np.isin(np.arange(self._shape.stripes), self._shape.detached)

    # --- the journal ---

    def by_journal(self, closed: Superblock) -> Journal | None:
        """The journal of a clean close; None, after saying so, if it is not all there."""
        generation, pages, count = closed.journal
        if generation == 0:
            return None
        records, _, whole = self._journal_pages(generation, pages)
        if not whole or len(records) != count:
            log.warning(
                "store %s: its journal is damaged, %d of %d records are there; the headers of all "
                "blocks are read instead",
                self._store.where,
                len(records),
                count,
            )
            return None
        newest(self.table, self.seen, records)
        if self._has_doubles():
            log.info("store %s: blocks were put twice while a path was away", self._store.where)
            return None
        return Journal(self._shape, generation, pages, count)

    def _has_doubles(self) -> bool:
        """Whether two blocks may have one key: a hash of it is enough to tell."""
        held = self.table["kind"] == PUBLISH
        names = [np.ascontiguousarray(self.table[name][held]) for name in ("key", "namespace")]
        words = np.concatenate([name.view("<u4").reshape(-1, 4) for name in names], axis=1)
        hashes = mixed(words.astype(np.uint64) @ multipliers(8))
        return len(np.unique(hashes)) < len(hashes)

    def _journal_pages(self, generation: int, last: int) -> tuple[Records, int, bool]:
        """What its first `last` pages hold, up to which page, and whether all could be read."""
        size = self._shape.header_bytes
        step = max(1, min(len(self._arena), CHUNK_BYTES) // size)
        found, used = [self.table[:0]], 0
        for first in range(0, last, step):
            row = self._arena[: min(step, last - first) * size].reshape(1, -1)
            offset = np.array([page_offset(self._shape, generation, first)])
            if not self._reader.read(row, offset, np.zeros(1, np.int64))[0]:
                return np.concatenate(found), used, False
            records, pages = unpack(row[0], self._shape, generation)
            found.append(records)
            used = first + pages if pages else used
        return np.concatenate(found), used, True

    def _generation(self) -> int:
        """Of the newest area that has a head."""
        size = self._shape.alignment_bytes
        rows = self._arena[: 2 * size].reshape(2, size)
        offsets = np.array([area_offset(self._shape, area) for area in (0, 1)])
        whole = self._reader.read(rows, offsets, np.zeros(2, np.int64))
        return max(
            generation_of(rows[area], self._shape, area) if whole[area] else 0 for area in (0, 1)
        )

    # --- the headers ---

    def by_headers(self, *, trust: bool) -> Journal:
        """The newest of journal (if `trust`) and headers; both then say the same."""
        generation = self._generation()
        journal, whole = Journal(self._shape, generation, 0, 0), False
        if trust and generation:
            # All of the area: what comes next must not stand before a page that says more.
            records, pages, whole = self._journal_pages(generation, self._shape.journal_pages)
            newest(self.table, self.seen, records)
            journal = Journal(self._shape, generation, pages, len(records))
        elif trust:
            log.warning("store %s: its journal is gone; its headers are all there is", self._where)
        in_journal = self.table["sequence"].copy()
        self._scan()
        self._forget_doubles()
        if self._store.read_only:
            return journal
        self._mend()
        if self.occupied.any():  # a journal would not say what lies there; look again next time
            journal.give_up()
            return journal
        unsaid = self.table[self.seen & (self.table["sequence"] != in_journal)]
        if not self._restate(journal, unsaid, goes_on=whole):
            log.warning("store %s: its journal cannot be written; it goes on without", self._where)
            journal.give_up()
        return journal

    def _restate(self, journal: Journal, unsaid: Records, *, goes_on: bool) -> bool:
        """Have the journal say all there is: what it does not say yet, or everything anew."""
        if goes_on and journal.has_room(len(unsaid)):
            return extend_journal(self._device, self._arena, self._shape, journal, unsaid)
        live = self.table[self.table["kind"] == PUBLISH]
        return write_journal(self._device, self._arena, journal, live)

    @property
    def _where(self) -> str:
        return self._store.where

    def _scan(self) -> None:
        shape = self._shape
        unread = done = 0
        for blocks, rows, whole in read_headers(self._reader):
            records, good = decode_headers(rows, blocks, shape)
            good &= whole
            self._header_sequence[blocks[good]] = records["sequence"][good]
            newest(self.table, self.seen, records[good])
            lost = blocks[~whole]
            away = np.count_nonzero(self._reader.away[shape.files(lost)])
            self.occupied[lost] = self.table["kind"][lost] != PUBLISH
            self.occupied[lost] &= ~self._empty[shape.files(lost)]
            unread += len(lost) - int(away)
            done += len(blocks)
            self._progress(done, shape.blocks)
        if unread:
            log.warning(
                "store %s: %d headers cannot be read: %s; what lies there is neither found nor "
                "written over, unless the journal tells what it is",
                self._where,
                unread,
                self._reader.reason,
            )

    def _forget_doubles(self) -> None:
        """Of two blocks with one key, which a crash can leave behind, the older one goes."""
        held = np.flatnonzero((self.table["kind"] == PUBLISH) & ~self.occupied)
        rows = self.table[held]
        names = [
            np.ascontiguousarray(rows[field]).view("<u8").reshape(-1, 2).T
            for field in ("key", "namespace")
        ]
        columns = np.concatenate(names) if len(held) else np.zeros((4, 0), np.uint64)
        order = np.lexsort((rows["sequence"], *columns))
        same = (columns[:, order[1:]] == columns[:, order[:-1]]).all(axis=0)
        older = held[order[:-1][same]]
        self.table["kind"][older] = REMOVE
        first = max(self._shape.epoch << 40, int(self.table["sequence"].max(initial=0))) + 1
        self.table["sequence"][older] = np.arange(first, first + len(older), dtype=np.uint64)

    def _mend(self) -> None:
        """Write the headers that say less than the journal; what cannot be written is left alone,
        and so is its extent."""
        newer = self.seen & (self.table["sequence"] != self._header_sequence) & ~self.occupied
        newer &= ~self._reader.away[self._shape.files(np.arange(self._shape.blocks))]
        stale: Ids = np.flatnonzero(newer)
        failed = write_headers(self._device, self._arena, self._shape, self.table[stale])
        self.occupied[stale[failed]] = True
        for file in np.flatnonzero(~self._reader.away).tolist() if len(stale) else []:
            flush(self._device, self._arena, file)
