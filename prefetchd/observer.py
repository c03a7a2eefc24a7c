"""Who is told of what happens: the predictor, the eviction policy, the planner, the counters.

Decides when they are told: a demand is shown to the policies later, when nothing urgent waits.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from prefetchd.counters import Counters
from prefetchd.guarded import Guarded
from prefetchd.model import Access, Codes, Feedback, Ids, Slots, Verdict
from prefetchd.planner import Planner
from prefetchd.predictor import Guess
from prefetchd.staging import Evicted, Staging

_UNSEEN_MAX = 64  # demands and guesses not yet shown; the oldest is dropped first
_BATCH, _CROWDED = 8, 48


class Observer:
    def __init__(self, staging: Staging, predictor: Guarded, planner: Planner) -> None:
        self.counters = Counters()
        self._staging = staging
        self._predictor = predictor
        self._planner = planner
        self._feedback: list[Feedback] = []
        self._showing = False
        self._pushed_out = np.zeros(len(staging.slot_of), np.bool_)  # by a prefetch
        self._unseen: deque[tuple[Slots, Access] | Guess] = deque(maxlen=_UNSEEN_MAX)

    def demanded(self, slots: Slots, access: Access) -> None:
        self.counters.count_outcomes(access.outcomes)
        self._unseen.append((slots, access))

    @property
    def crowded(self) -> bool:
        """Whether so much is unseen that some of it would soon be dropped."""
        return len(self._unseen) >= _CROWDED

    def missed(self, pages: Ids) -> None:
        """Demanded pages that are not here: some of them would be, but for a prefetch."""
        self.counters.pollution += int(np.count_nonzero(self._pushed_out[pages]))
        self._pushed_out[pages] = False

    def evicted(self, evicted: Evicted, *, by_prefetch: bool) -> None:
        self._pushed_out[evicted.pages] = by_prefetch
        self.prefetches_wasted(evicted.wasted, evicted.sources)

    def guessed(self, guess: Guess) -> None:
        """Shown to the eviction policy in turn with the demands around it."""
        if guess.confidence is not None and len(guess.pages):
            self._unseen.append(guess)

    def show_next(self, *, at_once: bool) -> bool:
        """Let the policies learn from the oldest thing they have not seen; whether more is due.

        Unless `at_once`, they learn in batches: a processor that has just learned from one demand
        learns from the next in half the time.
        """
        self._showing |= at_once or len(self._unseen) >= _BATCH
        if self._showing and self._unseen:
            told = self._unseen.popleft()
            if isinstance(told, Guess):
                assert told.confidence is not None
                self._staging.eviction.expected(told.pages, told.confidence)
            else:
                self._show_demand(*told)
        self._showing &= bool(self._unseen)
        if not self._showing and len(self._feedback) >= _BATCH:
            self._show_feedback()
        return self._showing

    def _show_demand(self, slots: Slots, access: Access) -> None:
        """Show a demand, to the eviction policy as far as its pages are still in their slots."""
        self._staging.eviction.demanded(access.pages, access.scores)
        self._staging.tell()
        placed = slots >= 0
        here = placed & (self._staging.page_of[np.where(placed, slots, 0)] == access.pages)
        if here.all():
            self._staging.eviction.touched(slots, access.pages, access.scores)
        elif here.any():
            scores = None if access.scores is None else access.scores[here]
            self._staging.eviction.touched(slots[here], access.pages[here], scores)
        self._predictor.on_access(access)

    def returns(self, blocks: Ids) -> None:
        """A request over these blocks, in prefix order, is likely to be back. A prefix is of use
        without its tail and not the other way round, so the tail is the first to go."""
        geometry = self._staging.eviction.geometry
        real = blocks[(blocks >= 0) & (blocks < geometry.blocks)][::-1]
        pages = (real[:, None] * geometry.layers + np.arange(geometry.layers)).reshape(-1)
        slots = self._staging.slot_of[pages].astype(np.int64)
        self._staging.tell()
        self._staging.eviction.returns(slots[slots >= 0])

    def prefetches_used(self, slots: Slots, *, late: Codes) -> None:
        """Prefetched pages were demanded for the first time; `late` is 1 where still on the way."""
        self.verdicts(
            self._staging.page_of[slots],
            self._staging.source[slots],
            np.where(late, Verdict.LATE, Verdict.USEFUL).astype(np.uint8),
        )
        self._staging.fresh[slots] = False

    def prefetches_wasted(self, pages: Ids, sources: Codes) -> None:
        if len(pages):
            self.verdicts(pages, sources, np.full(len(pages), Verdict.WASTED, np.uint8))

    def verdicts(self, pages: Ids, sources: Codes, verdicts: Codes) -> None:
        self.counters.count_verdicts(verdicts)
        self._feedback.append(Feedback(pages, sources, verdicts))

    def _show_feedback(self) -> None:
        if not self._feedback:
            return
        feedback = Feedback(
            np.concatenate([f.pages for f in self._feedback]),
            np.concatenate([f.sources for f in self._feedback]),
            np.concatenate([f.verdicts for f in self._feedback]),
        )
        self._feedback = []
        self._planner.observe_feedback(feedback)
        self._predictor.on_feedback(feedback)
