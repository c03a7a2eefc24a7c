"""The staging buffer's books: which slot holds which page, in which state, for whom.

Decides slot life and death, with an eviction policy choosing among what may go. Owns no bytes,
does no I/O and reads no clock. A slot is FREE, READING (the device's, or a caller's who fills it),
READY (readable), ABANDONED (its read was given up, yet the device still owns it) or PARTED (its
page has gone, yet somebody reads it by the books); pins are readers who ask, and one more for what
the store does not have yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetchd.books import Books, Readers, private_books
from prefetchd.eviction import Eviction
from prefetchd.masks import every, some
from prefetchd.model import NO_IDS, Codes, Geometry, Ids, IoClass, Mask, Scores, Slots
from prefetchd.untold import Untold
from prefetchd.victim_line import VictimLine, worse

FREE, READING, READY, ABANDONED, PARTED = range(5)
_KEPT_SHARE_MAX = 0.5  # of the slots: what a predictor may ask to hold
_RESERVE_FEW = 8  # of the slots kept free for demands, prefetches take what is beyond so many
_PARTED_LOOKED_AT = 1024  # at a time


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pages thrown out; of these the prefetched ones nobody had asked for, and who guessed them."""

    pages: Ids
    wasted: Ids
    sources: Codes


NO_CODES: Codes = np.empty(0, np.uint8)
NO_MASK: Mask = np.empty(0, np.bool_)
NONE_EVICTED = Evicted(NO_IDS, NO_IDS, NO_CODES)


class Staging:
    """Struct of arrays over slots, and the map from pages (int32, -1 = not here), part of it in
    `books` (None: in its own)."""

    def __init__(
        self, slots: int, geometry: Geometry, eviction: Eviction, books: Books | None = None
    ) -> None:
        books = private_books(geometry, slots) if books is None else books
        self.slots = slots
        self.eviction = eviction
        self.slot_of, self.state, self.fresh = books.slot_of, books.state, books.fresh
        self.slot_of[:] = -1
        self.page_of = np.full(slots, -1, np.int64)
        self.pins = np.zeros(slots, np.int32)
        self.generation = np.zeros(slots, np.int64)
        self.attempts = np.zeros(slots, np.uint8)
        self.issued_ns = np.zeros(slots, np.int64)
        self.ahead = np.zeros(slots, np.int32)  # reads in flight when this one was issued
        self.prefetched = np.zeros(slots, np.bool_)
        self.source = np.zeros(slots, np.uint8)
        self.kept = np.zeros(slots, np.bool_)
        self.keeping = False  # whether any is kept
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int32)  # a stack; lowest slot on top
        self._free_count = slots
        self.reserve = max(min(_RESERVE_FEW, slots // 256), slots // 1024)
        self._spare = 0  # the same for prefetches; none before the first
        self._line = VictimLine(slots)
        self._untold = Untold()
        self.readers: Readers | None = None
        """Who reads by the books."""
        self._parted = NO_IDS

    def held(self, slots: Slots | None = None) -> Mask:
        """Which of these slots (None: of all) somebody reads, or keeps for the store (bool)."""
        held: Mask = (self.pins if slots is None else self.pins[slots]) > 0
        if self.readers is not None:
            held |= self.readers.reading(slots)
        return held

    def evictable(self) -> Mask:
        """Slots whose page may be thrown out (bool, one a slot), held ones excluded."""
        allowed: Mask = (self.state == READY) & ~self.held() & ~self.kept
        return allowed

    @property
    def choosing(self) -> bool:
        """Whether the next `replenish` is to line up victims."""
        free, line = self._free_count - self.reserve, self._line
        stale = free < 0 and line.stale
        return stale or free - self._spare + len(line) < line.length.wanted // 2

    def replenish(self) -> tuple[Evicted, Mask]:
        """Empty the worst slots until what demands and the next prefetches take is free again, and
        line up the victims after those: now, so that neither a demand nor a hint waits for it.

        Returns what went out, and which of it for prefetches.
        """
        self._reclaim()
        beyond = self._free_count - self.reserve - self._spare
        for_demands, lacking = max(0, self.reserve - self._free_count), max(0, -beyond)
        self._line.length.turn()
        if self.choosing:
            self.tell()
            self._line.choose(self.eviction, lacking, self.evictable())
        if lacking == 0:
            return NONE_EVICTED, NO_MASK
        victims, evicted = self._evict(self._victims(lacking, IoClass.PREFETCH))
        self._clear(victims)
        self._give_back(victims)
        return evicted, np.arange(len(evicted.pages)) >= for_demands

    def tell(self) -> None:
        """Show the policy what came and went since the last time: who brought it was in a hurry."""
        self._untold.tell(self.eviction)

    def place(
        self,
        pages: Ids,
        io_class: IoClass,
        sources: Codes | None = None,
        confidence: Scores | None = None,
    ) -> tuple[Slots, Evicted]:
        """Give slots to absent, distinct `pages`, evicting as needed; as many as can be had.

        Takes free slots (only a demand all of the reserve), then the victims lined up, then, for a
        demand only, pages held for a predictor. With `confidence` (best first) only pages more
        likely to be wanted than what goes out for them, now or at the next `replenish`, are placed.
        """
        self._reclaim()
        free = self._free_count
        if io_class == IoClass.PREFETCH:
            self._spare = min(_RESERVE_FEW, self.reserve)
            free = max(0, free - self._spare)
            if confidence is not None and len(pages) <= free <= self._line.length.wanted:
                pages = pages[: self._line.worth_less(confidence)]
        elif io_class != IoClass.DEMAND:
            free = max(0, free - self.reserve)
        if len(pages) <= free:
            slots, evicted = self._take_free(len(pages)), NONE_EVICTED
        else:
            victims = self._victims(len(pages) - free, io_class)
            if confidence is not None:
                victims = worse(self.eviction, victims, confidence[free:])
            victims, evicted = self._evict(victims)
            if io_class == IoClass.DEMAND:
                self.kept[victims] = False
            slots = np.concatenate([self._take_free(free), victims]) if free else victims
        self._line.length.took(len(slots))
        if len(slots):
            slots = np.sort(slots)  # neighbours on the medium can be read at once into neighbours
            self._fill(slots, pages[: len(slots)], io_class, sources)
        return slots, evicted

    def has_room(self, count: int) -> bool:
        """Whether so many pages that nobody demands would be placed."""
        self._reclaim()
        lacking = count - max(0, self._free_count - self.reserve)
        return lacking <= 0 or lacking <= int(np.count_nonzero(self.evictable()))

    def _take_free(self, count: int) -> Slots:
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count][::-1].astype(np.int64)

    def _evict(self, victims: Slots) -> tuple[Slots, Evicted]:
        """Part readable, unpinned slots from their pages; the caller fills or frees the slots, as
        far as nobody has begun to read them meanwhile."""
        pages = self.page_of[victims]
        unused = self.fresh[victims]
        self._untold.gone(victims, pages)
        self.slot_of[pages] = -1
        evicted = Evicted(pages, NO_IDS, NO_CODES)
        if some(unused):
            evicted = Evicted(pages, pages[unused], self.source[victims[unused]])
        return self._unread(victims), evicted

    def _unread(self, slots: Slots) -> Slots:
        """Those of these slots, whose pages have gone, that nobody reads by the books. The others
        are kept apart: nobody can begin to read them now."""
        if self.readers is None or not some(read := self.readers.reading(slots)):
            return slots
        parted = slots[read]
        self._clear(parted)
        self.state[parted] = PARTED
        self._parted = np.concatenate([self._parted, parted])
        return slots[~read]

    def _reclaim(self) -> None:
        """Slots that were still read when their pages went, and are no more, are free."""
        if len(self._parted):
            looked_at = self._parted[:_PARTED_LOOKED_AT]
            self._parted = self._parted[_PARTED_LOOKED_AT:]
            self._give_back(self._unread(looked_at))

    def _fill(self, slots: Slots, pages: Ids, io_class: IoClass, sources: Codes | None) -> None:
        self.state[slots] = READING  # before anybody can find the page there
        self.slot_of[pages] = slots
        self.page_of[slots] = pages
        prefetched = io_class == IoClass.PREFETCH
        self.prefetched[slots] = prefetched
        self.fresh[slots] = prefetched
        if sources is not None:
            self.source[slots] = sources[: len(slots)]
        self._untold.came(slots, pages, prefetched=prefetched)

    def _victims(self, count: int, io_class: IoClass) -> Slots:
        victims = self._line.take(
            count, lambda line: (self.state[line] == READY) & ~self.held(line) & ~self.kept[line]
        )
        if len(victims) < count:
            self.tell()
            allowed = self.evictable()
            if io_class == IoClass.DEMAND:
                allowed = (self.state == READY) & ~self.held()
            allowed[victims] = False
            more = self.eviction.victims(count - len(victims), allowed)
            victims = np.concatenate([victims, more])
        return victims

    def forget(self, pages: Ids) -> Evicted:
        """Empty the slots of pages that nobody reads, waits for or has on the way."""
        slots = self.slot_of[pages].astype(np.int64)
        slots = slots[slots >= 0]
        assert (self.state[slots] == READY).all() and not self.pins[slots].any()  # noqa: PT018
        slots, evicted = self._evict(slots)
        self._clear(slots)
        self._give_back(slots)
        return evicted

    def free(self, slots: Slots) -> None:
        """Empty slots and return them to the free ones. Nobody may own them."""
        self.unmap(slots)
        self._give_back(self._unread(slots))

    def _give_back(self, slots: Slots) -> None:
        self.state[slots] = FREE
        end = self._free_count + len(slots)
        self._free[self._free_count : end] = slots
        self._free_count = end

    def unmap(self, slots: Slots) -> None:
        """Part slots from their pages, which are no longer here."""
        pages = self.page_of[slots]
        held = pages >= 0
        if not every(held):
            slots, pages = slots[held], pages[held]
        if len(slots):
            self._untold.gone(slots, pages)
            self.slot_of[pages] = -1
            self._clear(slots)

    def _clear(self, slots: Slots) -> None:
        self.page_of[slots] = -1
        self.attempts[slots] = 0
        self.fresh[slots] = False
        self.kept[slots] = False

    def abandon(self, slots: Slots) -> None:
        """Give up reads that the device still owns: their pages are gone, their slots wait."""
        self.unmap(slots)
        self.pins[slots] = 0
        self.state[slots] = ABANDONED

    def keep(self, pages: Ids) -> None:
        """Hold these pages (and no others) while they are here, up to half of the slots."""
        self.kept[:] = False
        self.keeping = len(pages) > 0
        pages = pages[(pages >= 0) & (pages < len(self.slot_of))]
        slots = self.slot_of[pages[: int(self.slots * _KEPT_SHARE_MAX)]]
        self.kept[slots[slots >= 0]] = True

    def check(self) -> None:
        """Raise AssertionError where the books disagree with each other (for tests)."""
        mapped = np.flatnonzero(self.page_of >= 0)
        assert (self.slot_of[self.page_of[mapped]] == mapped).all()
        assert np.count_nonzero(self.slot_of >= 0) == len(mapped)
        free = self._free[: self._free_count]
        assert len(np.unique(free)) == len(free)
        assert (self.state[free] == FREE).all()
        assert np.count_nonzero(self.state == FREE) == len(free)
        assert (self.page_of[self.state == FREE] == -1).all()
        assert (self.page_of[self.state == ABANDONED] == -1).all()
        parted = np.sort(self._parted)
        assert (self.page_of[parted] == -1).all()
        assert np.array_equal(parted, np.flatnonzero(self.state == PARTED))
        assert (self.pins >= 0).all()
        assert (self.pins[(self.state == FREE) | (self.state == ABANDONED)] == 0).all()
