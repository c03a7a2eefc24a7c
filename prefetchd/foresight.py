"""What to fetch before anybody asks: from hints and demands to guesses to a plan.

Decides when the predictor is asked and what is left of its last plan. Gives out no slots and
starts no reads; the core does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefetchd.guarded import Guarded, GuessError
from prefetchd.model import NO_IDS, DoneHint, Geometry, Hint, Ids, Mask, PageHint, Scores
from prefetchd.observer import Observer
from prefetchd.planner import NO_PLAN, Plan, Planner
from prefetchd.predictor import Guess, in_range
from prefetchd.staging import Staging

RESTS = frozenset({"end_turn"})
"""Reasons after which a request rests: of recorded agents 59 % were back within five minutes, and
97 % after a tool. Its pages go before the others'."""
_ONE = np.float32(1).view(np.uint32)
_HINT_DRIVEN_DEMANDS = 8  # for so many demands after a hint, planning waits for the next hint


class Foresight:
    """`candidates`: guesses asked of the predictor at a time."""

    def __init__(
        self,
        staging: Staging,
        predictor: Guarded,
        planner: Planner,
        observer: Observer,
        candidates: int,
    ) -> None:
        self._staging = staging
        self._predictor = predictor
        self._planner = planner
        self._observer = observer
        self.candidates = candidates
        self._plan = NO_PLAN
        self.fresh = False
        """Whether nothing has happened since the plan was made: whoever drives says so."""
        self.restores = False
        """Whether the plan is of pages that will be needed in any case."""
        self.unfinished = False
        """Whether the last guess was cut short: more is to be planned when the plan is used up."""
        self._stands = False  # whether asking the predictor again would bring nothing new
        self._hinted_ns: int | None = None
        self._hint_driven = 0

    @property
    def hint_driven(self) -> bool:
        """Whether hints keep coming, so that planning may wait for the next one."""
        return self._hint_driven > 0

    @property
    def predictor(self) -> Guarded:
        return self._predictor

    def demanded(self, pages: Ids, now_ns: int, *, missed: bool) -> bool:
        """A demand came; whether it asks for a turn of learning and planning."""
        self._stands = self._stands and self._observer.all_foretold(pages)
        if self._hinted_ns is not None:
            self._planner.observe_lead(now_ns - self._hinted_ns)
            self._hinted_ns = None
        if self._hint_driven:
            self._hint_driven -= 1
            return False
        # What the eviction learns must not depend on whether the predictor ever guesses.
        learns = self._staging.eviction.history is not None
        return self._predictor.guesses or missed or learns

    def hinted(self, hint: Hint, now_ns: int) -> None:
        """Pass a hint on; ids that no page has are the engine's fault, and dropped."""
        self._stands = False
        hint = _real(hint, self._staging.eviction.geometry)
        if isinstance(hint, PageHint):
            self._hinted_ns = now_ns
            # One that never guesses has no use for the time that learning later would save.
            self._hint_driven = _HINT_DRIVEN_DEMANDS if self._predictor.guesses else 0
        elif isinstance(hint, DoneHint):
            # Its last demands came before its end, or they would look like a new request's.
            self.learn_all()
            if len(hint.blocks):
                self._observer.ended(hint.blocks, rests=hint.reason in RESTS)
        self._predictor.on_hint(hint)

    def learn_all(self) -> None:
        while self._observer.show_next(at_once=True, early=True):
            pass

    @property
    def reads_history(self) -> bool:
        return self._predictor.reads_history

    def exchange(self, predictor: Guarded) -> None:
        """Another predictor from here on. The plan was the old one's."""
        self._observer.exchange(predictor)
        self._predictor = predictor
        self._plan, self._stands, self.fresh = NO_PLAN, False, False
        self.restores = self.unfinished = False
        if not predictor.guesses:
            self._hint_driven = 0
        self._staging.keep(NO_IDS)

    @property
    def learning_due(self) -> bool:
        return self._observer.due(at_once=not self._hint_driven, early=self._staging.choosing)

    def learn(self) -> bool:
        """One small step of learning from demands; whether more is due.

        While hints drive the planning time is short, and it is done in batches; but victims are
        chosen by all that is known.
        """
        early = self._staging.choosing
        return self._observer.show_next(at_once=not self._hint_driven, early=early)

    def plan(self, now_ns: int) -> None:
        """Ask the predictor anew. What is left of the old plan has lost its reason.

        Unless the last guess still stands: it named all that returning requests need by all that
        had been demanded, nothing else has been demanded since, and none of it has gone out.
        """
        if not self._predictor.guesses or (self._stands and not self._observer.foretold_gone):
            return
        limit = self.candidates
        guess = self._predictor.predict(now_ns, limit)
        try:
            if len(guess.keep) or self._staging.keeping:
                self._staging.keep(guess.keep)
            guess = self._real(guess)
            self._observer.guessed(guess)
            self._use(guess, limit, now_ns)
            while self._all_here and 0 < limit < self._staging.slots:
                limit = min(2 * limit, self._staging.slots)
                guess = self._predictor.predict(now_ns, limit)
                guess = self._real(guess)
                self._use(guess, limit, now_ns)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            self._predictor.unusable(guess, error)

    def _real(self, guess: Guess) -> Guess:
        sure = guess.confidence
        if sure is not None:
            if len(sure) != len(guess.pages):  # or who uses it later stumbles over it
                raise GuessError(f"there are {len(sure)} confidences for {len(guess.pages)} pages")
            if len(sure) and not _chances(sure):
                told = f"{sure.min()} to {sure.max()}"
                raise GuessError(f"confidences are between 0 and 1, not {told}")
        return in_range(guess, len(self._staging.slot_of)) if len(guess.pages) else guess

    @property
    def _all_here(self) -> bool:
        """Whether a restore was cut short before its first page that is to be read.

        Then more is asked for, up to what fills the staging. The eviction policy is not told anew.
        """
        return self.unfinished and len(self._plan.pages) == 0 and not self._planner.distrusts

    def _use(self, guess: Guess, limit: int, now_ns: int) -> None:
        self._plan = self._planner.plan(guess, self._staging.slot_of, now_ns)
        self.fresh = True
        self.restores = guess.restores
        planned_max = self._planner.limits.candidates_max
        cut = len(guess.pages) >= limit or len(self._plan.pages) >= planned_max
        self.unfinished = guess.restores and cut
        left_out = self.unfinished or self._planner.distrusts
        # What the predictor has not been shown yet may well bring something new.
        unseen = self._observer.unshown
        self._stands = guess.restores and not (left_out or unseen or len(guess.keep))
        if self._stands or self._observer.foretold:
            self._observer.foretell(guess.pages if self._stands else NO_IDS)

    def unsettle(self) -> None:
        """Something planned could not be had: it may be worth another try."""
        self._stands = False

    def forget(self, pages: Ids) -> None:
        """These pages are gone from the store, and from the plan."""
        if len(pages) and len(self._plan.pages):
            self._plan = self._plan.only(~np.isin(self._plan.pages, pages))

    @property
    def planned(self) -> int:
        """Pages of the plan that have not been taken."""
        return len(self._plan.pages)

    @property
    def used_up(self) -> bool:
        """Whether the plan is at its end and another should follow."""
        return self.unfinished and len(self._plan.pages) == 0

    def take(self, room: int) -> Plan:
        """Up to `room` pages of the plan, best first, all absent; the rest stays planned."""
        if len(self._plan.pages) == 0 or room <= 0:
            return NO_PLAN
        plan, self._plan = self._plan, NO_PLAN
        if len(plan.pages) > room:
            plan, self._plan = plan.split(room)
        if not self.fresh:  # some may have come meanwhile
            plan = plan.only(self._staging.slot_of[plan.pages] < 0)
        return plan


def _real(hint: Hint, geometry: Geometry) -> Hint:
    if isinstance(hint, PageHint):
        if (real := _below(hint.pages, geometry.pages)) is None:
            return hint
        return PageHint(hint.pages[real], hint.scores[real])
    real = _below(hint.blocks, geometry.blocks)
    return hint if real is None else replace(hint, blocks=hint.blocks[real])


def _chances(values: Scores) -> bool:
    """Whether all of some values are between 0 and 1."""
    # Those from 0 to 1 are, as whole numbers, the least there are: one look instead of two.
    if values.dtype == np.float32 and np.maximum.reduce(values.view(np.uint32)) <= _ONE:
        return True
    return bool(values.min() >= 0 and values.max() <= 1)  # not of one that is no number


def _below(ids: Ids, end: int) -> Mask | None:
    """Which ids there are; None: all, as nearly always."""
    # A negative id is a huge one, seen so.
    if len(ids) == 0 or np.maximum.reduce(ids.view(np.uint64)) < end:
        return None
    real: Mask = (ids >= 0) & (ids < end)
    return real
