"""The staging buffer's books: which slot holds which page, in which state, for whom.

Decides slot life and death, with an eviction policy choosing among what may go. Owns no bytes,
does no I/O and reads no clock. A slot is FREE, READING (the device's, or a caller's who fills it),
READY (readable) or ABANDONED (its read was given up, yet the device still owns it); pins are
readers, and one more for what the store does not have yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetchd.eviction import Eviction
from prefetchd.line_length import LineLength
from prefetchd.model import NO_IDS, Codes, Geometry, Ids, IoClass, Mask, Scores, Slots, every, some

FREE, READING, READY, ABANDONED = range(4)
_KEPT_SHARE_MAX = 0.5  # of the slots: what a predictor may ask to hold
_RESERVE_MAX, _RESERVE_SHARE = 8, 1 / 256  # slots kept free for demands
_VICTIMS_SPARE = 8


@dataclass(frozen=True, slots=True)
class Evicted:
    """Pages thrown out; of these the prefetched ones nobody had asked for, and who guessed them."""

    pages: Ids
    wasted: Ids
    sources: Codes


@dataclass(frozen=True, slots=True)
class _Came:
    slots: Slots
    pages: Ids
    prefetched: bool


@dataclass(frozen=True, slots=True)
class _Gone:
    slots: Slots
    pages: Ids


NO_CODES: Codes = np.empty(0, np.uint8)
NO_MASK: Mask = np.empty(0, np.bool_)
NONE_EVICTED = Evicted(NO_IDS, NO_IDS, NO_CODES)


class Staging:
    """Struct of arrays over slots, and the map from pages (int32, -1 = not here)."""

    def __init__(self, slots: int, geometry: Geometry, eviction: Eviction) -> None:
        self.slots = slots
        self.eviction = eviction
        self.slot_of = np.full(geometry.pages, -1, np.int32)
        self.page_of = np.full(slots, -1, np.int64)
        self.state = np.zeros(slots, np.uint8)
        self.pins = np.zeros(slots, np.int32)
        self.generation = np.zeros(slots, np.int64)
        self.attempts = np.zeros(slots, np.uint8)
        self.issued_ns = np.zeros(slots, np.int64)
        self.ahead = np.zeros(slots, np.int32)  # reads in flight when this one was issued
        self.prefetched = np.zeros(slots, np.bool_)
        self.fresh = np.zeros(slots, np.bool_)  # prefetched, and not demanded since
        self.source = np.zeros(slots, np.uint8)
        self.kept = np.zeros(slots, np.bool_)
        self.keeping = False  # whether any is kept
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int32)  # a stack; lowest slot on top
        self._free_count = slots
        self.reserve = min(_RESERVE_MAX, int(slots * _RESERVE_SHARE))
        self._spare = 0  # the same for prefetches; none before the first
        self._queue: Slots = np.empty(0, np.int64)  # victims lined up, worst first
        self._line = LineLength(slots)
        self._queue_worth: Scores | None = None  # one a victim, if the policy has an opinion
        self._untold: list[_Came | _Gone] = []  # not yet shown to the policy

    def evictable(self) -> Mask:
        """Slots whose page may be thrown out (bool, one a slot), held ones excluded."""
        allowed: Mask = (self.state == READY) & (self.pins == 0) & ~self.kept
        return allowed

    @property
    def choosing(self) -> bool:
        """Whether the next `replenish` is to line up victims."""
        free, left = self._free_count - self.reserve, len(self._queue)
        stale = free < 0 and self._line.stale(left)
        return stale or free - self._spare + left < self._line.wanted // 2

    def replenish(self) -> tuple[Evicted, Mask]:
        """Empty the worst slots until what demands and the next prefetches take is free again, and
        line up the victims after those: now, so that neither a demand nor a hint waits for it.

        Returns what went out, and which of it for prefetches.
        """
        beyond = self._free_count - self.reserve - self._spare
        for_demands, lacking = max(0, self.reserve - self._free_count), max(0, -beyond)
        self._line.turn()
        if self.choosing:
            self.tell()
            self._queue = self.eviction.victims(lacking + self._line.wanted, self.evictable())
            self._line.chosen(len(self._queue))
            self._queue_worth = self.eviction.worth(self._queue)
        if lacking == 0:
            return NONE_EVICTED, NO_MASK
        victims = self._victims(lacking, IoClass.PREFETCH)
        evicted = self._evict(victims)
        self._clear(victims)
        self._give_back(victims)
        return evicted, np.arange(len(victims)) >= for_demands

    def tell(self) -> None:
        """Show the policy what came and went since the last time: who brought it was in a hurry."""
        for change in self._untold:
            if isinstance(change, _Came):
                self.eviction.inserted(change.slots, change.pages, prefetched=change.prefetched)
            else:
                self.eviction.removed(change.slots, change.pages)
        self._untold.clear()

    def place(
        self,
        pages: Ids,
        io_class: IoClass,
        sources: Codes | None = None,
        confidence: Scores | None = None,
    ) -> tuple[Slots, Evicted]:
        """Give slots to absent, distinct `pages`, evicting as needed; as many as can be had.

        Takes free slots (only a demand takes the reserve), then the victims lined up, then, for a
        demand only, pages held for a predictor. With `confidence` (best first) only pages more
        likely to be wanted than what goes out for them, now or at the next `replenish`, are placed.
        """
        free = self._free_count
        if io_class != IoClass.DEMAND:
            free = max(0, free - self.reserve)
            if io_class == IoClass.PREFETCH:
                self._spare = self.reserve
                if confidence is not None and len(pages) <= free <= self._line.wanted:
                    pages = pages[: self._worthwhile(confidence)]
        if len(pages) <= free:
            slots, evicted = self._take_free(len(pages)), NONE_EVICTED
        else:
            victims = self._victims(len(pages) - free, io_class)
            if confidence is not None:
                victims = self._worse(victims, confidence[free:])
            evicted = self._evict(victims)
            if io_class == IoClass.DEMAND:
                self.kept[victims] = False
            slots = np.concatenate([self._take_free(free), victims]) if free else victims
        self._line.took(len(slots))
        if len(slots):
            slots = np.sort(slots)  # neighbours on the medium can be read at once into neighbours
            self._fill(slots, pages[: len(slots)], io_class, sources)
        return slots, evicted

    def has_room(self, count: int) -> bool:
        """Whether so many pages that nobody demands would be placed."""
        lacking = count - max(0, self._free_count - self.reserve)
        return lacking <= 0 or lacking <= int(np.count_nonzero(self.evictable()))

    def _worthwhile(self, confidence: Scores) -> int:
        """How many of the first pages are worth more than the next victims."""
        worth = self._queue_worth
        if worth is None:
            return len(confidence)
        count = min(len(confidence), len(worth))
        better = confidence[:count] > worth[:count]
        return len(confidence) if every(better) else int(np.argmin(better))

    def _take_free(self, count: int) -> Slots:
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count][::-1].astype(np.int64)

    def _evict(self, victims: Slots) -> Evicted:
        """Part readable, unpinned slots from their pages; the caller fills or frees the slots."""
        pages = self.page_of[victims]
        unused = self.fresh[victims]
        self._untold.append(_Gone(victims, pages))
        self.slot_of[pages] = -1
        if not some(unused):
            return Evicted(pages, NO_IDS, NO_CODES)
        return Evicted(pages, pages[unused], self.source[victims[unused]])

    def _fill(self, slots: Slots, pages: Ids, io_class: IoClass, sources: Codes | None) -> None:
        self.slot_of[pages] = slots
        self.page_of[slots] = pages
        self.state[slots] = READING
        prefetched = io_class == IoClass.PREFETCH
        self.prefetched[slots] = prefetched
        self.fresh[slots] = prefetched
        if sources is not None:
            self.source[slots] = sources[: len(slots)]
        self._untold.append(_Came(slots, pages, prefetched))

    def _victims(self, count: int, io_class: IoClass) -> Slots:
        # A few more than needed, since some may have come into use since they were chosen.
        queue = self._queue[: count + _VICTIMS_SPARE]
        good = (self.state[queue] == READY) & (self.pins[queue] == 0) & ~self.kept[queue]
        if every(good[:count]):
            victims: Slots = queue[:count]
            used = count
        else:
            places = np.flatnonzero(good)[:count]
            victims = queue[places]
            used = int(places[-1]) + 1 if len(places) else len(queue)
        self._queue = self._queue[used:]
        if self._queue_worth is not None:
            self._queue_worth = self._queue_worth[used:]
        if len(victims) < count:
            self.tell()
            allowed = self.evictable()
            if io_class == IoClass.DEMAND:
                allowed = (self.state == READY) & (self.pins == 0)
            allowed[victims] = False
            more = self.eviction.victims(count - len(victims), allowed)
            victims = np.concatenate([victims, more])
        return victims

    def _worse(self, victims: Slots, confidence: Scores) -> Slots:
        """The first of `victims` (worst first) that are worth less than what would replace them."""
        worth = self.eviction.worth(victims)
        if worth is None:
            return victims
        better = confidence[: len(victims)] > worth
        return victims if every(better) else victims[: int(np.argmin(better))]

    def forget(self, pages: Ids) -> Evicted:
        """Empty the slots of pages that nobody reads, waits for or has on the way."""
        slots = self.slot_of[pages].astype(np.int64)
        slots = slots[slots >= 0]
        assert (self.state[slots] == READY).all() and not self.pins[slots].any()  # noqa: PT018
        evicted = self._evict(slots)
        self._clear(slots)
        self._give_back(slots)
        return evicted

    def free(self, slots: Slots) -> None:
        """Empty slots and return them to the free ones. Nobody may own them."""
        self.unmap(slots)
        self._give_back(slots)

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
            self._untold.append(_Gone(slots, pages))
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
        assert (self.pins >= 0).all()
        assert (self.pins[(self.state == FREE) | (self.state == ABANDONED)] == 0).all()
