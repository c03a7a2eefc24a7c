"""What keeps `auto` from doing harm: a ghost of no prefetch, and the worth of what is held.

Decides when guesses are passed on and how many of the held pages have earned their
slots, from demands and their outcomes alone. Knows nothing of where guesses come from.
"""

from __future__ import annotations

import numpy as np

from prefetchd.model import NO_IDS, Access, Codes, Geometry, Ids, Mask, Outcome

DECAY = 0.6  # per pass over the layers
READ_SHARE = 0.3  # one more 64 KiB read at depth, 30 us, against 100 us for one alone
HARM_RATIO, HARM_MARGIN = 1.03, 3.0  # the margin is in lone reads
PAUSE_PASSES_MIN, PAUSE_PASSES_MAX, PAUSE_GROWTH = 2, 64, 4
GOOD_PASSES = 8  # after as many without harm the next pause is shorter again
SAMPLE, SAMPLED_LAYERS_MIN = 4, 24
COUNTED = 8192  # of more in the oldest quarter of a ring as many are looked at, about
PARTS = 8  # in which the held pages are judged, the most wanted first
# Beside an array numpy takes ten times as long for a member of an enumeration.
_TIMELY, _LATE = np.uint8(Outcome.TIMELY), np.uint8(Outcome.LATE)
_NO_CODES, _NO_MASK = np.empty(0, np.uint8), np.empty(0, np.bool_)


class Sample:
    """The pages that measures are taken on, every fourth layer's where there are many layers, and
    their numbers, which count these pages only."""

    def __init__(self, geometry: Geometry) -> None:
        self._layers = geometry.layers
        self.every = SAMPLE if geometry.layers >= SAMPLED_LAYERS_MIN else 1
        self._rows = -(-geometry.layers // self.every)
        self.pages = geometry.blocks * self._rows

    def has(self, pages: Ids) -> Mask:
        has: Mask = pages % self._layers % self.every == 0
        return has

    def numbers(self, pages: Ids) -> Ids:
        """Of pages that the sample has."""
        if self.every == 1:
            return pages
        blocks = pages // self._layers
        return blocks * self._rows + (pages - blocks * self._layers) // self.every

    def shows(self, access: Access) -> bool:
        """Whether it has the first page of a demand; most demands are of one layer."""
        pages = access.pages
        return len(pages) > 0 and int(pages[0]) % self._layers % self.every == 0

    def of(self, access: Access) -> Access:
        """What the sample has of a demand, its pages by their numbers."""
        if self.every == 1:
            return access
        blocks = access.pages // self._layers
        layers = access.pages - blocks * self._layers
        rows = layers // self.every
        numbers, outcomes = blocks * self._rows + rows, access.outcomes
        mine = rows * self.every == layers
        if not mine.all():
            numbers, outcomes = numbers[mine], outcomes[mine]
        return Access(numbers, outcomes, access.request, None, access.now_ns)


class GhostLru:
    """Which pages an LRU buffer of `slots` pages would hold, had it seen the same demands.

    A ring of demands in order; a page is held if its last demand lies behind the tail, which moves
    on until at most `slots` distinct pages are left. Eight bytes a page and 32 a slot; where hot
    pages fill the ring, the tail moves early and the ghost is a little smaller than asked.
    """

    def __init__(self, pages: int, slots: int) -> None:
        self._slots = slots
        self._ring = np.zeros(8 * slots + 64, np.int32 if pages < 2**31 else np.int64)
        self._last = np.full(pages, -1, np.int64)
        self._head = self._tail = self._held = 0
        self.oldest_hits = 0
        """Demands, so far, of pages in the oldest quarter of the ring."""

    def demand(self, pages: Ids) -> Mask:
        """Take in a demand; which of its pages were not held (a repeated page counts once).

        More pages than the ring has are taken in pieces.
        """
        if len(pages) > len(self._ring):
            return np.concatenate(
                [self.demand(part) for part in np.split(pages, [len(pages) - len(self._ring)])]
            )
        positions = self._head + np.arange(len(pages))
        self._let_go(self._head + len(pages) - len(self._ring))
        last = self._last[pages]
        missed = last < self._tail
        self.oldest_hits += int(np.count_nonzero(~missed & (last < self._quarter())))
        self._ring[positions % len(self._ring)] = pages
        self._last[pages] = positions
        self._head += len(pages)
        missed &= self._last[pages] == positions
        self._held += int(np.count_nonzero(missed))
        self._shrink()
        return missed

    def _shrink(self) -> None:
        """Move the tail on by no more than it takes to hold few enough."""
        while (excess := self._held - self._slots) > 0:
            # Most of what lies behind the tail has been demanded again since.
            end = min(self._head, self._tail + 8 * excess + 64)
            oldest = np.flatnonzero(self._are_last(end))[:excess]
            self._held -= len(oldest)
            self._tail = end if len(oldest) < excess else self._tail + int(oldest[-1]) + 1

    def holds(self, pages: Ids) -> Mask:
        return self._last[pages] >= self._tail

    def oldest_count(self) -> int:
        """How many pages are in the oldest quarter of the ring, as a sample of it tells."""
        end = self._quarter()
        every = max(1, (end - self._tail) // COUNTED)
        return every * int(np.count_nonzero(self._are_last(end, every)))

    def _quarter(self) -> int:
        return self._tail + (self._head - self._tail) // 4

    def _count(self, end: int) -> int:
        """Pages whose last demand lies between the tail and `end`."""
        return int(np.count_nonzero(self._are_last(end)))

    def _are_last(self, end: int, every: int = 1) -> Mask:
        """Of every so many demands from the tail to `end`, which were the last of their pages."""
        positions = np.arange(self._tail, end, every)
        last: Mask = self._last[self._ring[positions % len(self._ring)]] == positions
        return last

    def _let_go(self, tail: int) -> None:
        """Move the tail on, to `tail` at least: pages demanded last before it are gone."""
        if tail > self._tail:
            self._held -= self._count(tail)
            self._tail = tail


class Gains:
    """Which prefetched pages spared a miss: when they were demanded, the ghost had let them go.

    That a page was demanded is not enough: one that prefetching had pushed out before, and that
    had stayed without any, is no gain. The outcome of a demand and the verdict on the prefetch
    come by different ways and in either order; whichever is first waits. Two bytes a page.
    """

    def __init__(self, pages: int) -> None:
        self._source_of = np.zeros(pages, np.uint8)  # its number + 1, while its demand is awaited
        self._met = np.zeros(pages, np.uint8)  # 1 no gain, 2 gain, while its verdict is awaited

    def demanded(self, access: Access, ghost_missed: Mask) -> tuple[Codes, Mask]:
        """The sources of the pages whose verdict was known, and whether each was a gain."""
        found = access.outcomes.tobytes()
        if Outcome.TIMELY not in found and Outcome.LATE not in found:
            return _NO_CODES, _NO_MASK
        fetched = (access.outcomes == _TIMELY) | (access.outcomes == _LATE)
        pages, gained = access.pages[fetched], ghost_missed[fetched]
        waited: Mask = self._source_of[pages] > 0
        sources = self._source_of[pages[waited]] - np.uint8(1)
        self._source_of[pages] = 0
        self._met[pages[~waited]] = np.uint8(1) + gained[~waited]
        return sources, gained[waited]

    def judged(self, pages: Ids, sources: Codes) -> tuple[Codes, Mask]:
        """Pages were useful: the same, for those whose demand was known."""
        met = self._met[pages]
        known: Mask = met > 0
        self._source_of[pages[~known]] = sources[~known] + np.uint8(1)
        self._met[pages] = 0
        return sources[known], met[known] == 2


class Guard:
    """Whether to pass guesses on at all, by comparing stalls with those of the ghost.

    Too much prefetch does not harm by degrees: pages push each other out, and a buffer that ran
    well falls over within a pass. Fewer guesses then help little, a pause does. Pauses grow while
    they follow each other closely, so that lasting harm soon costs two passes in some sixty.
    """

    def __init__(self, ghost: GhostLru) -> None:
        self._ghost = ghost
        self._cost = self._ghost_cost = 0.0
        self._pause_passes = PAUSE_PASSES_MIN
        self._paused_passes = 0  # still to go
        self._good_passes = 0

    @property
    def open(self) -> bool:
        return self._paused_passes == 0

    def observe(self, access: Access) -> Mask:
        """Take in a demand; which of its pages would have been missed without any prefetch."""
        found = access.outcomes.tobytes()
        ghost_missed = self._ghost.demand(access.pages)
        # A late page waits for a part of its read only: taken as half a miss.
        self._cost += _cost(found.count(Outcome.MISS) + found.count(Outcome.LATE) / 2)
        self._ghost_cost += _cost(float(np.count_nonzero(ghost_missed)))
        if self.open and self._cost > self._ghost_cost * HARM_RATIO + HARM_MARGIN:
            self._paused_passes = self._pause_passes
            self._pause_passes = min(PAUSE_GROWTH * self._pause_passes, PAUSE_PASSES_MAX)
            self._good_passes = 0
        return ghost_missed

    def judge(self) -> None:
        """At the end of a pass over the layers."""
        if self._paused_passes > 0:
            self._paused_passes -= 1
            self._cost = self._ghost_cost = 0.0
        else:
            self._good_passes += 1
            if self._good_passes % GOOD_PASSES == 0:
                self._pause_passes = max(self._pause_passes // PAUSE_GROWTH, PAUSE_PASSES_MIN)
        self._cost *= DECAY
        self._ghost_cost *= DECAY


def _cost(missed: float) -> float:
    """The wait for a demand's missed pages, in units of one lone read: they are read together."""
    return 1 + READ_SHARE * missed if missed else 0.0


class Holding:
    """How many of the pages that one source asks to hold are worth their slots.

    Holding a page matters only when the buffer would have let it go. So the asked pages, taken as
    most wanted first and judged in parts, are counted while the ghost does not hold them: a part
    is worth its slots if these are demanded more often, each, than the ghost's oldest pages,
    which would have to make room.
    """

    def __init__(self, pages: int, ghost: GhostLru) -> None:
        self.earned_parts = 0
        self._ghost = ghost
        self._pages = pages
        self._part_of: Codes | None = None  # taken once the source asks to hold anything
        self._asked = NO_IDS
        self._demanded = np.zeros(PARTS + 1)  # part PARTS is everything else
        self._absent = np.zeros(PARTS)
        self._oldest_demanded = self._oldest = 0.0
        self._oldest_hits_before = 0

    def observe(self, access: Access, ghost_missed: Mask) -> None:
        if self._part_of is not None and ghost_missed.any():
            part = self._part_of[access.pages[ghost_missed]]
            self._demanded += np.bincount(part, minlength=PARTS + 1)

    def judge(self, asked: Ids) -> None:
        """At the end of a pass over the layers: what has been earned, and what is asked now."""
        if len(self._asked):
            absent = _parts(len(self._asked))[~self._ghost.holds(self._asked)]
            self._absent += np.bincount(absent, minlength=PARTS)
            self._oldest += self._ghost.oldest_count()
            self._oldest_demanded += self._ghost.oldest_hits - self._oldest_hits_before
            marginal = self._oldest_demanded / max(self._oldest, 1)
            rates = self._demanded[:PARTS] / np.maximum(self._absent, 1)
            worth = (rates > marginal) & (self._demanded[:PARTS] > 1)
            self.earned_parts = PARTS if worth.all() else int(np.argmin(worth))
            self._decay()
        self._oldest_hits_before = self._ghost.oldest_hits
        if asked is not self._asked and (len(asked) or len(self._asked)):
            if self._part_of is None:
                self._part_of = np.full(self._pages, PARTS, np.uint8)
            self._part_of[self._asked] = PARTS
            self._part_of[asked] = _parts(len(asked))
            self._asked = asked

    def earned(self, asked: Ids) -> Ids:
        return asked[: -(-self.earned_parts * len(asked) // PARTS)]

    def _decay(self) -> None:
        self._demanded *= DECAY
        self._absent *= DECAY
        self._oldest *= DECAY
        self._oldest_demanded *= DECAY


def _parts(count: int) -> Ids:
    return np.arange(count) * PARTS // max(count, 1)
