"""What is tried with a predictor, and which fault is told of which outcome.

Decides in which page spaces it is told invented traffic, how often, and which runs are compared:
asked more often or not, watched or not, in batches or one by one, elsewhere. What is to be compared
is counted and compared in whole; no time decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from statistics import median
from typing import Any

import numpy as np

from prefetchd.model import Geometry
from prefetchd.predictor import Predictor
from prefetchd.testing_guess import difference, faults_of, flat
from prefetchd.testing_play import (
    ENDLESS,
    SEED,
    Arrays,
    HookError,
    Make,
    Play,
    Space,
    arrays_of,
    changed,
)
from prefetchd.testing_process import guesses_elsewhere
from prefetchd.testing_traffic import Ask, Step, traffic
from prefetchd.testing_watch import FILES, RANDOM, Watch, memory_growth

SPACES = (
    Space(Geometry(4, 64), 48, 40),
    Space(Geometry(1, 48), 16, 60),
    Space(Geometry(6, 90), 120, 14),
    Space(Geometry(30, 24), 20, 3),
    Space(Geometry(28, 40), 600, 5),
)
"""Room for a pass over the layers or not, one layer or many, and few pages throughout."""
QUICK_SPACES = tuple(replace(space, turns=12) for space in SPACES[:2])
MEMORY_SPACE = Space(Geometry(3, 24), 16, 1 << 30)
MEMORY_STEPS = 1000
ROUNDING = 1e-3
"""Sums over a batch round otherwise than sums one by one, and confidences may show it."""
HASH_SEEDS = "1", "2"
_REMEDIES = {
    "clock": "use the times that the events carry, and `now_ns`",
    "random": "make np.random.default_rng(seed) with a fixed seed in __init__, and do not draw "
    "in predict",
    "files": "read what you need in __init__",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: its kind in one word, the hook, what is wrong with an example, and how often."""

    kind: str
    hook: str
    words: str
    times: int = 1


@dataclass(slots=True)
class Tries:
    """What has been found so far about what `make` makes."""

    make: Make
    name: str = "predictor"
    found: dict[tuple[str, str], Finding] = field(default_factory=dict)
    poor: set[tuple[str, str]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    calls: int = 0
    call_us: dict[str, float] = field(default_factory=dict)
    first: list[list[Any]] = field(default_factory=list)
    """The guesses in the first space, to compare other processes' with."""

    def _find(self, kind: str, hook: str, words: str, *, shows_little: bool = False) -> None:
        """The first of its kind is told, or the first that shows something."""
        key = kind, hook
        known = self.found.get(key, Finding(kind, hook, "", 0))
        if not known.words or (key in self.poor and not shows_little):
            known = replace(known, words=words)
            (self.poor.add if shows_little else self.poor.discard)(key)
        self.found[key] = replace(known, times=known.times + 1)

    @property
    def is_stuck(self) -> bool:
        """Whether a call did not come back: another try would not, either."""
        return any(kind == ENDLESS for kind, _ in self.found)

    def space(self, space: Space) -> None:
        """All that is tried in one page space; a hook that raises ends it."""
        try:
            asked = self._asked(space)
            play = Play(self.make, space)
            silent = self._run(play)
            if self._watched(space, silent):
                self._compared(space, asked, silent, "state", "predict", _CHANGES_STATE)
            kind = type(play.predictor)
            if kind.on_accesses is not Predictor.on_accesses:
                single = self._run(Play(self.make, space, one_by_one=True))
                self._compared(space, single, silent, "batch", "on_accesses", _BATCHES)
            if kind.share is not Predictor.share:
                self._run(Play(self.make, space, shared=True))
        except HookError as fault:
            self._find(fault.kind, fault.hook, fault.words)
            return
        self.call_us = {hook: median(taken) / 1e3 for hook, taken in play.took_ns.items()}
        self.first = self.first or silent

    def _run(self, play: Play) -> list[list[Any]]:
        with self._counted(play):
            return play.run()

    @contextmanager
    def _counted(self, play: Play) -> Iterator[None]:
        """Its calls count, whatever comes of them."""
        self.name = play.predictor.name or type(play.predictor).__name__.lower()
        try:
            yield
        finally:
            self.calls += play.calls

    def _asked(self, space: Space) -> list[list[Any]]:
        """Every guess looked at, with more of them asked for than the traffic does."""
        play = Play(self.make, space)
        with self._counted(play):
            self._between(play, f"the start; {space}", 0)
            guesses, kept = [], arrays_of()
            for number, step in enumerate(space.steps(), 1):
                place = f"call {number}, {step}; {space}"
                play.step(step)
                self._look_at_arrays(play, step, kept, place)
                if isinstance(step.told, Ask):
                    guesses.append(flat(play.guess))
                    self._judge(play, play.guess, step.told.limit, place)
                    kept = arrays_of(play.guess) if hasattr(play.guess, "pages") else arrays_of()
                self._between(play, place, number)
        return guesses

    def _look_at_arrays(self, play: Play, step: Step, kept: Arrays, place: str) -> None:
        """Whether those it was given, and those of its latest guess, `kept`, are as they were."""
        hook = "on_access" if step.hook == "on_accesses" else step.hook
        if changed(play.given):
            where = "" if ("writes", hook) in self.found else self._where_written(play.space)
            words = f"{where}it writes to an array that it was given: work on a copy ({place})"
            self._find("writes", hook, words)
        if changed(kept):
            words = f"it changes the arrays of an earlier guess: return copies ({place})"
            self._find("rewrites", hook, words)
            kept.clear()

    def _where_written(self, space: Space) -> str:
        """The line, if it is found by forbidding it; which some compiled code that only reads does
        not bear, so that this alone proves nothing."""
        try:
            Play(self.make, space, sealed=True).run()
        except HookError as fault:
            if "read-only" in fault.words:
                return fault.words.split(": ", 1)[0] + ": "
        return ""

    def _between(self, play: Play, place: str, number: int) -> None:
        """Calls of `predict` that the traffic does not make, and which must leave no trace."""
        limit = 64
        one = play.predict(number, limit)
        self._judge(play, one, limit, place)
        before = flat(one)
        self._judge(play, play.predict(number + 7, 0), 0, place)
        told = difference(before, flat(play.predict(number, limit)))
        if told:
            words = f"two calls in a row with the same arguments differ: {told} ({place})"
            self._find("state", "predict", words)

    def _judge(self, play: Play, guess: object, limit: int, place: str) -> None:
        little = not np.size(getattr(guess, "pages", ()))
        for kind, words in faults_of(guess, play.space.geometry, play.space.slots, limit):
            told = f"{words} (after {place}; limit {limit})"
            self._find(kind, "predict", told, shows_little=little)

    def _compared(
        self, space: Space, one: list[Any], other: list[Any], kind: str, hook: str, words: str
    ) -> bool:
        """Whether two runs guessed the same; if not, the first difference is a finding."""
        rounding = ROUNDING if kind == "batch" else 0.0
        for number, pair in enumerate(zip(one, other, strict=True)):
            if told := difference(*pair, rounding=rounding):
                place = _nth_ask(space, number)
                self._find(kind, hook, f"{words}: {told} ({place}; {space})")
                return False
        return True

    def _watched(self, space: Space, silent: list[list[Any]]) -> bool:
        """Run anew and noted what it calls; whether it guesses as it did before."""
        watch = Watch(file_of(self.make))

        @contextmanager
        def around(hook: str) -> Iterator[None]:
            before = len(watch.seen)
            with watch.on():
                yield
            for kind, name, place in watch.seen[before:]:
                if hook != "__init__" or kind == RANDOM:
                    self._forbidden(kind, hook, name, place)

        again = self._run(Play(self.make, space, around=around))
        return self._compared(space, silent, again, "differs", "predict", _DIFFERS)

    def _forbidden(self, kind: str, hook: str, name: str, place: str) -> None:
        does = {"clock": "reads a clock or waits", RANDOM: "uses chance", FILES: "opens a file"}
        at = f" ({place})" if place else ""
        self._find(kind, hook, f"it {does[kind]}: {name}{at}; {_REMEDIES[kind]}")

    def processes(self, source: str) -> None:
        """The same in other processes, whose strings have other hashes."""
        if not source:
            self.notes.append(
                "not tried in other processes, as they cannot import it: it is made in a function "
                "or in a script; name a file, or a class in a module"
            )
            return
        for seed in HASH_SEEDS:
            told = guesses_elsewhere(source, SPACES[0], hash_seed=seed)
            if isinstance(told, str):
                self.notes.append(f"not tried in another process: {told}")
                return
            words = f"in another process (PYTHONHASHSEED={seed}) {_HASHES}"
            if not self._compared(SPACES[0], self.first, told, "hash", "predict", words):
                return

    def memory(self) -> None:
        """What it takes must stop growing, however long the traffic."""
        try:
            self._memory(MEMORY_SPACE)
        except HookError as fault:
            self._find(fault.kind, fault.hook, fault.words)

    def _memory(self, space: Space) -> None:
        play = Play(self.make, space)
        steps = traffic(space.geometry, seed=SEED, turns=space.turns, request_turns=1)

        asks = count()

        def go_on() -> None:
            for step in islice(steps, MEMORY_STEPS):
                if not isinstance(step.told, Ask) or next(asks) % 8 == 0:  # the dearest call
                    play.step(step)
            self.calls += play.calls
            play.took_ns.clear()

        grown = memory_growth(space.geometry, space.slots, file_of(self.make), go_on)
        if grown:
            sizes = ", ".join(f"{size:,}" for size in grown[0])
            words = (
                f"its memory grows without end: {sizes} bytes after ever more of the same traffic "
                f"({space}), most of it {grown[1]}; forget the oldest, as deque(maxlen=...) does"
            )
            self._find("memory", "all hooks", words)


_CHANGES_STATE = (
    "it changes what later calls see: with more calls of predict in between, the same traffic "
    "leads to another guess"
)
_BATCHES = "it leads to another guess than on_access for each demand of the batch, which gives"
_DIFFERS = (
    "two instances that are told the same guess differently, by chance, time, the order of a set, "
    "or something that instances share"
)
_HASHES = "it guesses differently: the order of a set of strings, or hash(), decides something"


def _nth_ask(space: Space, wanted: int) -> str:
    """Where in the traffic its n-th guess was asked for."""
    asks = 0
    before = "the start"
    for number, step in enumerate(space.steps(), 1):
        if isinstance(step.told, Ask):
            if asks == wanted:
                return f"call {number}, predict after {before}"
            asks += 1
        before = str(step)
    return "the end"


def file_of(make: Make) -> str | None:
    try:
        return inspect.getfile(make)
    except TypeError:
        return None
