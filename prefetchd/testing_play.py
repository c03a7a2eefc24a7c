"""One predictor that is told invented traffic: each call made, and what comes of it.

Decides how a step becomes calls of hooks, and what a fault of a hook is called. Refuses to judge
guesses or to compare them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.guarded import Terminated, place_of
from prefetchd.history import UseHistory
from prefetchd.layer_turns import turns_of
from prefetchd.model import Access, Feedback, Geometry, Verdict
from prefetchd.predictor import Guess, Predictor
from prefetchd.testing_guess import flat
from prefetchd.testing_patience import TooLong, in_time
from prefetchd.testing_traffic import Ask, Ended, Step, traffic

Make = Callable[[Geometry, int], Predictor]
Arrays = list[tuple[NDArray[Any], NDArray[Any]]]
"""Arrays, and copies of them."""
SEED = 20
ENDLESS = "endless"
"""The kind of a call that did not come back: whoever hears of it tries no more."""
_ENDED_PAGES = 8


@dataclass(frozen=True, slots=True)
class Space:
    """A page space to try a predictor in, and for how many passes over the layers."""

    geometry: Geometry
    slots: int
    turns: int

    def steps(self) -> Iterator[Step]:
        return traffic(self.geometry, seed=SEED, turns=self.turns)

    def __str__(self) -> str:
        shape = self.geometry
        return f"{shape.layers} layers x {shape.blocks} blocks, {self.slots} slots"


class HookError(Exception):
    """A hook raised: the kind of fault, which hook, and what, in words."""

    def __init__(self, kind: str, hook: str, words: str) -> None:
        super().__init__(words)
        self.kind, self.hook, self.words = kind, hook, words


def arrays_of(*things: object) -> Arrays:
    """All arrays in these events or guesses, with copies to compare them with later."""
    found: Arrays = []
    for thing in things:
        for field in fields(thing):  # type: ignore[arg-type]
            value = getattr(thing, field.name)
            if isinstance(value, np.ndarray):
                found.append((value, value.copy()))
    return found


def changed(arrays: Arrays) -> bool:
    return any(now.tobytes() != then.tobytes() for now, then in arrays)


class Play:
    """A predictor in a space. Raises HookError when the predictor cannot be made or a hook raises.

    `around` is entered around each call of a hook, given its name; `shared`: a history is shared
    with it, as an eviction policy does; `sealed`: the arrays it is given are read-only.
    """

    def __init__(
        self,
        make: Make,
        space: Space,
        *,
        around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
        one_by_one: bool = False,
        shared: bool = False,
        sealed: bool = False,
    ) -> None:
        self.space = space
        self.took_ns: dict[str, list[int]] = defaultdict(list)
        self.given: Arrays = []
        """Of the latest step."""
        self.guess: object = Guess()
        """The latest that the traffic asked for."""
        self._around, self._one_by_one, self._sealed = around, one_by_one, sealed
        self.predictor = self._made(make)
        own = type(self.predictor).on_accesses is not Predictor.on_accesses
        self._several = own and not one_by_one
        self._history = UseHistory(space.geometry) if shared else None
        if self._history is not None:
            self._call("share", self._history)

    def _made(self, make: Make) -> Predictor:
        try:
            with in_time(), self._around("__init__"):
                made: object = make(self.space.geometry, self.space.slots)
        except (KeyboardInterrupt, Terminated):
            raise
        except BaseException as error:  # sys.exit() too: a live engine would end by it
            words = f"{type(error).__name__}: {error} ({self.space})"
            raise HookError(_kind_of(error), "__init__", words) from error
        if not isinstance(made, Predictor):
            words = f"it made {made!r:.60}: derive it from prefetchd.predictor.Predictor"
            raise HookError("raises", "__init__", words)
        return made

    def run(self) -> list[list[Any]]:
        """All the space's steps; the guesses that the traffic asked for, as plain values."""
        guesses = []
        for step in self.space.steps():
            self.step(step)
            if isinstance(step.told, Ask):
                guesses.append(flat(self.guess))
        return guesses

    @property
    def calls(self) -> int:
        return sum(map(len, self.took_ns.values()))

    def step(self, step: Step) -> None:
        told = step.told
        self.given = []
        if isinstance(told, Ask):
            self.guess = self.predict(told.now_ns, told.limit)
        elif isinstance(told, Ended):
            if feedback := self._feedback(told.seed):
                self._tell("on_feedback", feedback)
        elif isinstance(told, tuple):
            self._demand(told)
        else:
            self._tell(step.hook, told)

    def predict(self, now_ns: int, limit: int) -> object:
        return self._call("predict", now_ns, limit)

    def _demand(self, accesses: tuple[Access, ...]) -> None:
        if self._several:
            self._seal(*accesses)
            self._call("on_accesses", accesses)
        for access in accesses if not self._several else ():
            self._tell("on_access", access)
        if self._history is not None:
            pages = np.concatenate([access.pages for access in accesses])
            for turns, _ in turns_of(pages, self.space.geometry):
                self._history.demanded(turns)

    def _feedback(self, seed: int) -> Feedback | None:
        """Of the best pages of the last guess, as far as it is one."""
        guess = self.guess
        if not isinstance(guess, Guess) or not isinstance(guess.pages, np.ndarray):
            return None
        pages = guess.pages[:_ENDED_PAGES].copy()
        if len(pages) == 0:
            return None
        given = guess.sources
        usable = isinstance(given, np.ndarray) and len(given) >= len(pages)
        sources = given[: len(pages)].copy() if usable else np.zeros(len(pages), np.uint8)  # type: ignore[index]
        random = np.random.default_rng(seed)
        return Feedback(
            pages, sources, random.integers(0, len(Verdict), len(pages)).astype(np.uint8)
        )

    def _tell(self, hook: str, told: object) -> None:
        self._seal(told)
        self._call(hook, told)

    def _seal(self, *told: object) -> None:
        self.given += arrays_of(*told)
        for array, _ in self.given if self._sealed else ():
            array.setflags(write=False)

    def _call(self, hook: str, *told: Any) -> object:
        method = getattr(self.predictor, hook)
        try:
            with in_time():
                began_ns = time.perf_counter_ns()
                with self._around(hook):
                    answer: object = method(*told)
                self.took_ns[hook].append(time.perf_counter_ns() - began_ns)
        except (KeyboardInterrupt, Terminated):
            raise
        except BaseException as error:
            place = place_of(getattr(type(self.predictor), hook), error)
            words = f"{place}: {type(error).__name__}: {error}"
            raise HookError(_kind_of(error), hook, words) from error
        return answer


def _kind_of(error: BaseException) -> str:
    return ENDLESS if isinstance(error, TooLong) else "raises"
