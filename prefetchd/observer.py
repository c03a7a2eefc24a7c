"""Who is told of what happens: the predictor, the eviction policy, the planner, the counters.

Decides when they are told: a demand is shown to the policies later, when nothing urgent waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.counters import Counters
from prefetchd.guarded import Guarded
from prefetchd.masks import every
from prefetchd.model import (
    NO_IDS,
    Access,
    Codes,
    Feedback,
    Ids,
    Mask,
    Outcome,
    Slots,
    Used,
    Verdict,
)
from prefetchd.planner import Planner
from prefetchd.predictor import Guess
from prefetchd.staging import READY, Evicted, Staging
from prefetchd.unseen import Batch, Unseen

_FEEDBACK_BATCH = 16
_LATE = np.uint8(Verdict.LATE)  # beside it 0 is USEFUL
Number = TypeVar("Number", bound=np.generic)

PUSHED_OUT, FORETOLD = np.uint8(1), np.uint8(2)
"""Marks of a page: a prefetch took its place; the last guess that named all that is needed did."""


class Observer:
    def __init__(self, staging: Staging, predictor: Guarded, planner: Planner) -> None:
        self.counters = Counters()
        self._staging = staging
        self._predictor = predictor
        self._planner = planner
        self._feedback: list[Feedback] = []
        self._marks = np.zeros(len(staging.slot_of), np.uint8)  # PUSHED_OUT, FORETOLD
        self._unseen = Unseen(staging.eviction.geometry)
        self._unshown: deque[Access] = deque()  # the latest of these, new to the predictor as well
        self.foretold_gone = False
        """Whether any page that was foretold has gone out since."""
        self._foretold = NO_IDS
        self._pushing = False  # whether a prefetch has ever taken a page's place
        self._former: Mask | None = None
        """Pages that an earlier predictor guessed and whose end is not known yet."""

    def exchange(self, predictor: Guarded) -> None:
        """Another predictor from here on, which is told of no guess but its own."""
        staging = self._staging
        self._predictor, self._feedback = predictor, []
        self.foretell(NO_IDS)
        if self._former is None:
            self._former = np.zeros(len(self._marks), np.bool_)
        self._former[staging.page_of[staging.fresh]] = True

    def foretell(self, pages: Ids) -> None:
        """The last guess named these pages, and they are all that is needed."""
        self._marks[self._foretold] &= ~FORETOLD
        self._marks[pages] |= FORETOLD
        self._foretold, self.foretold_gone = pages, False

    @property
    def foretold(self) -> bool:
        """Whether the last guess named anything that is all that is needed."""
        return len(self._foretold) > 0

    def all_foretold(self, pages: Ids) -> bool:
        return every(self._marks[pages] >= FORETOLD)

    def demanded(self, slots: Slots, access: Access, *, once: bool = False) -> None:
        self.counters.count_outcomes(access.outcomes)
        if not once:
            self._add(slots, access)

    def _add(self, slots: Slots, access: Access) -> None:
        self._unseen.add((slots, access))
        self._unshown.append(access)
        while len(self._unshown) > self._unseen.demands:  # some were dropped
            self._unshown.popleft()

    def used(self, event: Used, now_ns: int) -> None:
        """As if these pages had been demanded while they were here; some may have gone since."""
        staging, pages, scores = self._staging, event.pages, event.scores
        slots = staging.slot_of[pages].astype(np.int64)
        slots[(slots >= 0) & (staging.state[slots] != READY)] = -1
        outcomes = np.zeros(len(pages), np.uint8)
        fresh = np.flatnonzero(staging.fresh[slots] & (slots >= 0))
        if len(fresh):
            used, first = np.unique(slots[fresh], return_index=True)
            outcomes[fresh[first]] = Outcome.TIMELY
            self.prefetches_used(used, late=np.zeros(len(used), np.bool_))
        self.counters.count_outcomes(outcomes)
        for part, request in zip(event.parts(), event.requests.tolist(), strict=True):
            given = None if scores is None else scores[part]
            self._add(slots[part], Access(pages[part], outcomes[part], request, given, now_ns))

    @property
    def unshown(self) -> bool:
        """Whether the predictor has not been shown all demands."""
        return len(self._unshown) > 0

    @property
    def crowded(self) -> bool:
        """Whether so much is unseen that some of it would soon be dropped."""
        return self._unseen.crowded

    def missed(self, pages: Ids) -> None:
        """Demanded pages that are not here: some of them would be, but for a prefetch."""
        if not self._pushing:
            return
        if polluted := int(np.count_nonzero(self._marks[pages] & PUSHED_OUT)):
            self.counters.pollution += polluted
            self._marks[pages] &= ~PUSHED_OUT

    def evicted(self, evicted: Evicted, *, by_prefetch: Mask | bool) -> None:
        if len(evicted.pages) == 0:
            return
        self._pushing = self._pushing or bool(np.any(by_prefetch))
        if self._pushing or self.foretold:
            marks = PUSHED_OUT * by_prefetch
            if self.foretold:
                foretold = self._marks[evicted.pages] & FORETOLD
                self.foretold_gone = self.foretold_gone or bool(foretold.any())
                marks = marks | foretold
            self._marks[evicted.pages] = marks
        self.prefetches_wasted(evicted.wasted, evicted.sources)

    def guessed(self, guess: Guess) -> None:
        """Shown to the eviction policy in turn with the demands around it."""
        if guess.confidence is not None and len(guess.pages):
            self._unseen.add(guess)

    def show_next(self, *, at_once: bool, early: bool = False) -> bool:
        """Let the policies learn from the oldest they have not seen; whether more is due.

        They learn from several demands in one step, as soon as there are enough, or, if that is
        wanted `early`, any: that takes little longer than to learn from one. If `at_once`, the
        predictor learns from each by itself, and before.
        """
        if at_once and self._unshown:
            self._predictor.on_accesses([self._unshown.popleft()])
            if self._unshown:
                return True
        if self.due(at_once=at_once, early=early):
            self._show(self._unseen.batch())
            if self.due(at_once=at_once, early=early):
                return True
            if not at_once:
                return len(self._feedback) >= _FEEDBACK_BATCH  # in a step of its own
        if len(self._feedback) >= _FEEDBACK_BATCH:
            self._show_feedback()
        return False

    def due(self, *, at_once: bool, early: bool = False) -> bool:
        if at_once and self._unshown:
            return True
        some = len(self._unseen) if at_once else self._unseen.demands
        return self._unseen.enough or (early and some > 0)

    def _show(self, batch: Batch) -> None:
        """The predictor first: in a history that the policy keeps it finds things as they stood
        before these demands, and learns from the difference."""
        for pages, chances in batch.foretold:
            self._staging.eviction.expected(pages, chances)
        new = len(self._unshown) - self._unseen.demands
        if new > 0:
            self._predictor.on_accesses([self._unshown.popleft() for _ in range(new)])
        if batch.accesses:
            self._show_demands(batch)
        for pages, chances in batch.guesses:
            self._staging.eviction.expected(pages, chances)

    def _show_demands(self, batch: Batch) -> None:
        """To the eviction policy, as demanded, and as touched while still in the same slots."""
        staging = self._staging
        pages = _joined([access.pages for access in batch.accesses])
        given = [access.scores for access in batch.accesses if access.scores is not None]
        scores = _joined(given) if given else None
        staging.eviction.demanded(pages, scores)
        staging.tell()
        if not staging.eviction.by_touch:
            return
        slots = _joined(batch.slots)
        here = (staging.page_of[np.maximum(slots, 0)] == pages) & (slots >= 0)
        if not every(here):
            slots, pages = slots[here], pages[here]
            scores = None if scores is None else scores[here]
        if len(slots):
            staging.eviction.touched(slots, pages, scores)

    def ended(self, blocks: Ids, *, rests: bool) -> None:
        """A request over these blocks, in prefix order, is likely to be back, soon or after a rest.
        A prefix is of use without its tail and not the other way round, so the tail is the first
        to go."""
        geometry = self._staging.eviction.geometry
        pages = geometry.all_pages(blocks[::-1])
        slots = self._staging.slot_of[pages].astype(np.int64)
        self._staging.tell()
        eviction = self._staging.eviction
        (eviction.rests if rests else eviction.returns)(slots[slots >= 0])

    def prefetches_used(self, slots: Slots, *, late: Mask) -> None:
        """Prefetched pages were demanded for the first time; `late` where still on the way."""
        staging = self._staging
        self.verdicts(staging.page_of[slots], staging.source[slots], late.view(np.uint8) * _LATE)
        staging.fresh[slots] = False

    def prefetches_wasted(self, pages: Ids, sources: Codes) -> None:
        if len(pages):
            self.verdicts(pages, sources, np.full(len(pages), Verdict.WASTED, np.uint8))

    def verdicts(self, pages: Ids, sources: Codes, verdicts: Codes) -> None:
        self.counters.count_verdicts(verdicts)
        if self._former is not None:
            own = ~self._former[pages]
            self._former[pages] = False
            pages, sources, verdicts = pages[own], sources[own], verdicts[own]
            if len(pages) == 0:
                return
        self._feedback.append(Feedback(pages, sources, verdicts))

    def _show_feedback(self) -> None:
        feedback = Feedback(
            np.concatenate([f.pages for f in self._feedback]),
            np.concatenate([f.sources for f in self._feedback]),
            np.concatenate([f.verdicts for f in self._feedback]),
        )
        self._feedback = []
        self._planner.observe_feedback(feedback)
        self._predictor.on_feedback(feedback)


def _joined(arrays: Sequence[NDArray[Number]]) -> NDArray[Number]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
