"""Several predictors at once, each as far as it has proved right. Made to be no worse than none.

Decides whose guesses count, how many of them, and what is worth holding. It guesses nothing
itself. Three measurements hold it back:

* a source's precision (share of its prefetched pages that were demanded) ranks its guesses against
  the others' and bounds their number; a useless source is left a rare probe, to recover by;
* a ghost of a plain LRU buffer of the same size tells what no prefetch at all would have missed;
  when more is missed than that, no guesses are passed on for a while;
* what a source asks to hold is held only while it gains more than the room it takes loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefetchd.model import (
    NO_IDS,
    Access,
    ChainHint,
    Codes,
    DoneHint,
    Feedback,
    Geometry,
    Ids,
    PageHint,
    Scores,
    Verdict,
)
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors._restraint import GhostLru, Guard, Holding
from prefetchd.registry import predictor_class

SOURCES = ("attention", "sliding_window", "cross_request")
SOURCES_MAX = 16  # a page's source code is this x the source's own code + the source's number
VERDICTS_DECAY = 0.998  # per verdict: the last 500 count
PROVEN_VERDICTS = 32
UNPROVEN_SHARE = 0.25  # of the limit, until a source is proven
PRECISION_FLOOR = 0.05  # good hints at a roomy staging have 0.12: most of theirs is there already
PASS_ACCESSES_MIN = 16  # with few layers a pass alone is too short to judge by
PROBE_ACCESSES = 32  # a useless source may guess one page in this many accesses


@dataclass(slots=True)
class _Source:
    """One predictor, what became of its guesses (decayed), and how it uses its holding."""

    predictor: Predictor
    holding: Holding
    right: float = 2.0
    ended: float = 4.0

    @property
    def precision(self) -> float:
        return self.right / self.ended

    def take(self, pages: Ids, codes: Codes, verdicts: Codes) -> None:
        decay = VERDICTS_DECAY ** len(pages)
        self.right = self.right * decay + int(np.count_nonzero(verdicts != Verdict.WASTED))
        self.ended = self.ended * decay + len(pages)
        self.predictor.on_feedback(Feedback(pages, codes, verdicts))


class Auto(Predictor):
    """Runs the predictors named in `sources` (found by name, at most 16) together.

    Raises RegistryError when one of them cannot be had. The number of a page's source, in
    `Guess.sources`, is its place in `sources` plus 16 x the source's own code.
    """

    name = "auto"

    def __init__(self, geometry: Geometry, slots: int, *, sources: Sequence[str] = SOURCES) -> None:
        super().__init__(geometry, slots)
        if not 1 <= len(sources) <= SOURCES_MAX:
            raise ValueError(f"auto runs 1 to {SOURCES_MAX} predictors, not {len(sources)}")
        ghost = GhostLru(geometry.pages, slots)
        self._guard = Guard(ghost)
        self._sources = [
            _Source(predictor_class(source)(geometry, slots), Holding(geometry, ghost))
            for source in sources
        ]
        self._accesses = 0
        self._pass_accesses = max(geometry.layers, PASS_ACCESSES_MIN)

    def on_access(self, access: Access) -> None:
        ghost_missed = self._guard.observe(access)
        for source in self._sources:
            source.holding.observe(access, ghost_missed)
            source.predictor.on_access(access)
        self._accesses += 1
        if self._accesses % self._pass_accesses == 0:
            self._guard.judge()
            for source in self._sources:
                source.holding.judge(source.predictor.predict(0, 0).keep)

    def on_page_hint(self, hint: PageHint) -> None:
        for source in self._sources:
            source.predictor.on_page_hint(hint)

    def on_chain_hint(self, hint: ChainHint) -> None:
        for source in self._sources:
            source.predictor.on_chain_hint(hint)

    def on_done_hint(self, hint: DoneHint) -> None:
        for source in self._sources:
            source.predictor.on_done_hint(hint)

    def on_feedback(self, feedback: Feedback) -> None:
        numbers = feedback.sources % SOURCES_MAX
        codes = feedback.sources // SOURCES_MAX
        for number, source in enumerate(self._sources):
            mine = numbers == number
            if mine.any():
                source.take(feedback.pages[mine], codes[mine], feedback.verdicts[mine])

    def predict(self, now_ns: int, limit: int) -> Guess:
        if not self._guard.open:
            return Guess()
        guesses = [
            source.predictor.predict(now_ns, room)
            for source, room in zip(self._sources, self._rooms(limit), strict=True)
        ]
        pages = np.concatenate([guess.pages for guess in guesses])
        scores = np.concatenate(
            [
                _confidence(guess) * np.float32(source.precision)
                for guess, source in zip(guesses, self._sources, strict=True)
            ]
        )
        codes = np.concatenate([_codes(guess, number) for number, guess in enumerate(guesses)])
        best = _best_first(pages, scores)
        best = best[: max(0, limit)]
        deadlines = [guess.deadline_ns for guess in guesses if len(guess.pages)]
        known = [deadline for deadline in deadlines if deadline is not None]
        return Guess(
            pages[best],
            scores[best],
            # Pages without a deadline may be wanted sooner than those with one.
            min(known) if known and len(known) == len(deadlines) else None,
            codes[best],
            self._held(guesses),
        )

    def _rooms(self, limit: int) -> list[int]:
        """How many pages each source may guess: the most precise all, the others in proportion."""
        best = max(source.precision for source in self._sources)
        rooms = []
        for source in self._sources:
            if source.ended < PROVEN_VERDICTS:
                share = UNPROVEN_SHARE
            elif source.precision < PRECISION_FLOOR:
                share = 0.0
            else:
                share = source.precision / best
            probe = self._accesses % PROBE_ACCESSES == 0
            least = 1 if share > 0 or probe else 0
            rooms.append(min(max(limit, 0), max(int(limit * share), least)))
        return rooms

    def _held(self, guesses: list[Guess]) -> Ids:
        """What has earned to be held, best first, each page once."""
        kept = [
            source.holding.earned(guess.keep)
            for source, guess in zip(self._sources, guesses, strict=True)
            if len(guess.keep)
        ]
        if len(kept) < 2:
            return kept[0] if kept else NO_IDS
        every = np.concatenate(kept)
        _, first = np.unique(every, return_index=True)
        return every[np.sort(first)]


def _confidence(guess: Guess) -> Scores:
    if guess.confidence is None:
        return np.full(len(guess.pages), 0.5, np.float32)
    return guess.confidence


def _codes(guess: Guess, number: int) -> Codes:
    own = 0 if guess.sources is None else guess.sources % SOURCES_MAX
    return np.full(len(guess.pages), number, np.uint8) + np.uint8(SOURCES_MAX) * np.uint8(own)


def _best_first(pages: Ids, scores: Scores) -> Ids:
    """Places in `pages` by falling score, each page at its best place only."""
    order = np.argsort(-scores, kind="stable")
    _, first = np.unique(pages[order], return_index=True)
    best: Ids = order[np.sort(first)]
    return best
