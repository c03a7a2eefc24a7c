"""A predictor behind a guard: what goes wrong in one of its hooks is told by name and place.

Decides the words of a predictor's fault. Refuses to know what a hook does; it neither retries nor
goes on without it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from prefetchd.history import UseHistory
from prefetchd.model import Access, ChainHint, DoneHint, Feedback, Geometry, PageHint
from prefetchd.predictor import Guess, Predictor
from prefetchd.testing_guess import form_faults


class PredictorError(Exception):
    """A hook of a predictor raised, or said what cannot be used; its cause is what it raised."""


class GuessError(ValueError):
    """The numbers of a guess make no sense, whatever their types are."""


class Terminated(SystemExit):
    """By a signal, which may arrive in the middle of a hook: not the hook's doing."""


class Guarded:
    """The hooks of `predictor`, each of which raises PredictorError and nothing else."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        # One that never guesses needs no turn of its own after a demand.
        self.guesses = type(predictor).predict is not Predictor.predict
        self.reads_history = type(predictor).share is not Predictor.share
        """Whether it may read the policy's, so that neither is changed without the other."""
        self._takes_several = type(predictor).on_accesses is not Predictor.on_accesses

    def share(self, history: UseHistory) -> None:
        try:
            self._predictor.share(history)
        except BaseException as error:
            self._raise("share", error)

    def on_accesses(self, accesses: Sequence[Access]) -> None:
        hook = "on_access"
        try:
            if self._takes_several:
                hook = "on_accesses"
                self._predictor.on_accesses(accesses)
            else:  # one by one from here, so that the place of a fault is found in its own hook
                for access in accesses:
                    self._predictor.on_access(access)
        except BaseException as error:
            self._raise(hook, error)

    def on_feedback(self, feedback: Feedback) -> None:
        try:
            self._predictor.on_feedback(feedback)
        except BaseException as error:
            self._raise("on_feedback", error)

    def on_hint(self, hint: PageHint | ChainHint | DoneHint) -> None:
        hook = "on_page_hint"
        try:
            if isinstance(hint, PageHint):
                self._predictor.on_page_hint(hint)
            elif isinstance(hint, ChainHint):
                hook = "on_chain_hint"
                self._predictor.on_chain_hint(hint)
            else:
                hook = "on_done_hint"
                self._predictor.on_done_hint(hint)
        except BaseException as error:
            self._raise(hook, error)

    def predict(self, now_ns: int, limit: int) -> Guess:
        try:
            guess: object = self._predictor.predict(now_ns, limit)
        except BaseException as error:
            self._raise("predict", error)
        if not isinstance(guess, Guess):
            self._raise("predict", TypeError(f"it returned {guess!r:.80}, not a Guess"))
        return guess

    def unusable(self, guess: Guess, error: Exception) -> NoReturn:
        """`guess` was the last one, but its arrays do not fit each other or hold no ids. What is
        wrong with their form is told rather than what came of it; but a GuessError does not come
        of it, and is told itself."""
        words = next(form_faults(guess), None)
        if words is not None and not isinstance(error, GuessError):
            error = TypeError(words).with_traceback(error.__traceback__)
        self._raise("predict", error, " (its guess cannot be used)")

    def _raise(self, hook: str, error: BaseException, remark: str = "") -> NoReturn:
        if isinstance(error, KeyboardInterrupt | Terminated):  # not the hook's doing, as exit() is
            raise error
        predictor = self._predictor
        name = predictor.name or type(predictor).__name__.lower()
        place = place_of(getattr(type(predictor), hook), error)
        what = f"{type(error).__name__}: {error}"
        raise PredictorError(f"predictor {name}, {hook}: {place}: {what}{remark}") from error


def made(
    factory: Callable[[Geometry, int], Predictor], geometry: Geometry, slots: int
) -> Predictor:
    """A new predictor. Raises what its `__init__` raises, and PredictorError for sys.exit(), which
    would end the whole program without a word."""
    try:
        return factory(geometry, slots)
    except Terminated:
        raise
    except SystemExit as error:
        place = place_of(factory.__init__, error)
        raise PredictorError(f"a predictor, __init__: {place}: SystemExit: {error}") from error


def place_of(hook: Callable[..., Any], error: BaseException) -> str:
    """Where in the hook's file the error arose, or where the hook begins."""
    code = getattr(hook, "__code__", None)
    if code is None:
        return "in a hook that is no plain function"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}, line {lines[-1] if lines else code.co_firstlineno}"
