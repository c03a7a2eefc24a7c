"""What every predictor must do: `check_predictor` tries one and tells in words what is wrong.

Decides what is tried and which fault is told of which finding. Nothing is judged by time: what a
call costs is measured and reported. Refuses to say whether guesses are any good: a replay does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from prefetchd.model import Geometry
from prefetchd.predictor import Predictor
from prefetchd.registry import PLUGIN_PREFIX, predictor_class
from prefetchd.testing_guess import difference, faults_of, flat
from prefetchd.testing_play import HookFault, Make, Play, Space, arrays_of, changed
from prefetchd.testing_traffic import Ask, Step, traffic
from prefetchd.testing_watch import FILES, RANDOM, Watch, memory_growth

SEED = 20
SPACES = (
    Space(Geometry(4, 64), 48, 40),
    Space(Geometry(1, 48), 16, 90),
    Space(Geometry(6, 90), 120, 24),
    Space(Geometry(30, 24), 20, 5),
    Space(Geometry(28, 40), 600, 8),
)
"""Room for a pass over the layers or not, one layer or many, and few pages throughout."""
MEMORY_SPACE = Space(Geometry(3, 24), 16, 1 << 30)
MEMORY_STEPS = 1500
HASH_SEEDS = "1", "2"
_CHILD_S = 300
_REMEDIES = {
    "clock": "use the times that the events carry, and `now_ns`",
    "random": "make np.random.default_rng(seed) with a fixed seed in __init__, draw in no predict",
    "files": "read what you need in __init__",
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: its kind in one word, the hook, what is wrong with an example, and how often."""

    kind: str
    hook: str
    words: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """`notes`: what could not be tried, and why. `call_us`: the median time of a call, by hook."""

    predictor: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    calls: int
    call_us: dict[str, float]

    @property
    def ok(self) -> bool:
        return not self.findings

    def words(self) -> str:
        """Findings one a line, then notes, then what a call costs."""
        lines = []
        for finding in self.findings:
            more = f" ({finding.times} times)" if finding.times > 1 else ""
            lines.append(f"{finding.hook}: {finding.words}{more}")
        lines += [f"note: {note}" for note in self.notes]
        costs = ", ".join(f"{hook} {taken:.0f} us" for hook, taken in self.call_us.items())
        if costs:
            lines.append(f"a call takes (median, over {SPACES[-1]}): {costs}")
        count = f"{len(self.findings)} faults" if self.findings else "nothing is wrong"
        lines.append(f"{self.predictor}: {count}, in {self.calls} calls")
        return "\n".join(lines)


class PredictorFaults(AssertionError):
    """A predictor does what it must not; `report` has the findings."""

    def __init__(self, report: PredictorReport) -> None:
        super().__init__(report.words())
        self.report = report


def check_predictor(
    predictor: str | Path | Make | type[Predictor], *, thorough: bool = True
) -> PredictorReport:
    """`examine_predictor` for tests. Raises PredictorFaults when anything is found."""
    report = examine_predictor(predictor, thorough=thorough)
    if not report.ok:
        raise PredictorFaults(report)
    return report


def examine_predictor(
    predictor: str | Path | Make | type[Predictor],
    *,
    thorough: bool = True,
    progress: Progress = lambda done, whole: None,
) -> PredictorReport:
    """Try a predictor with invented traffic: a class, a factory, a name, or a path to a .py file.

    A factory takes (geometry, slots). Takes seconds; if not `thorough`, it is tried in two small
    page spaces only, in no other process, and its memory is not watched. Raises RegistryError when
    there is no such predictor.
    """
    make, source = _resolved(predictor)
    check = _Check(make)
    spaces = SPACES if thorough else SPACES[:2]
    for number, space in enumerate(spaces):
        progress(number, len(spaces) + 2)
        check.space(space)
    if thorough and not check.found:
        progress(len(spaces), len(spaces) + 2)
        check.processes(source)
        progress(len(spaces) + 1, len(spaces) + 2)
        check.memory()
    elif thorough:
        check.notes.append("other processes and memory are tried when the rest is right")
    progress(len(spaces) + 2, len(spaces) + 2)
    return PredictorReport(
        check.name, tuple(check.found.values()), tuple(check.notes), check.calls, check.call_us
    )


def _resolved(predictor: str | Path | Make | type[Predictor]) -> tuple[Make, str]:
    """What makes it, and how another process finds it; empty if it cannot."""
    if isinstance(predictor, str | Path):
        name = str(predictor)
        return predictor_class(name), os.path.abspath(name) if name.endswith(".py") else name
    module = getattr(predictor, "__module__", "")
    path: str = getattr(predictor, "__qualname__", "")
    if module.startswith(PLUGIN_PREFIX):
        return predictor, inspect.getfile(predictor)
    if not path or module in ("", "__main__") or "<" in path:
        return predictor, ""
    return predictor, f"{module}:{path}"


@dataclass(slots=True)
class _Check:
    make: Make
    name: str = "predictor"
    found: dict[tuple[str, str], Finding] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calls: int = 0
    call_us: dict[str, float] = field(default_factory=dict)
    first: list[list[Any]] = field(default_factory=list)
    """The guesses in the first space, to compare other processes' with."""

    def _find(self, kind: str, hook: str, words: str) -> None:
        known = self.found.get((kind, hook))
        new = replace(known, times=known.times + 1) if known else Finding(kind, hook, words)
        self.found[(kind, hook)] = new

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
        except HookFault as fault:
            self._find(fault.kind, fault.hook, fault.words)
            return
        self.call_us = {hook: median(taken) / 1e3 for hook, taken in play.took_ns.items()}
        self.first = self.first or silent

    def _run(self, play: Play) -> list[list[Any]]:
        self.name = play.predictor.name or type(play.predictor).__name__.lower()
        guesses = play.run(_steps(play.space))
        self.calls += sum(map(len, play.took_ns.values()))
        return guesses

    def _asked(self, space: Space) -> list[list[Any]]:
        """Every guess looked at, with more of them asked for than the traffic does."""
        play = Play(self.make, space, sealed=True)
        self._between(play, "before any other call", 0)
        guesses, kept = [], arrays_of()
        for number, step in enumerate(_steps(space), 1):
            place = f"call {number}, {step}; {space}"
            play.step(step)
            hook = "on_access" if step.hook == "on_accesses" else step.hook
            if changed(play.given):
                self._find("writes", hook, f"it writes to an array that it was given ({place})")
            if changed(kept):
                words = f"it changes the arrays of an earlier guess: return copies ({place})"
                self._find("rewrites", hook, words)
                kept = arrays_of()
            if isinstance(step.told, Ask):
                guesses.append(flat(play.guess))
                self._judge(play, play.guess, step.told.limit, place)
                kept = arrays_of(play.guess) if hasattr(play.guess, "pages") else arrays_of()
            self._between(play, place, number)
        self.calls += sum(map(len, play.took_ns.values()))
        return guesses

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
        for kind, words in faults_of(guess, play.space.geometry, play.space.slots, limit):
            self._find(kind, "predict", f"{words} (after {place}; limit {limit})")

    def _compared(
        self, space: Space, one: list[Any], other: list[Any], kind: str, hook: str, words: str
    ) -> bool:
        """Whether two runs guessed the same; if not, the first difference is a finding."""
        for number, pair in enumerate(zip(one, other, strict=True)):
            if told := difference(*pair):
                place = _nth_ask(space, number)
                self._find(kind, hook, f"{words}: {told} ({place}; {space})")
                return False
        return True

    def _watched(self, space: Space, silent: list[list[Any]]) -> bool:
        """Run anew and noted what it calls; whether it guesses as it did before."""
        watch = Watch(None)

        @contextmanager
        def around(hook: str) -> Iterator[None]:
            before = len(watch.seen)
            with watch.on():
                yield
            for kind, name, place in watch.seen[before:]:
                if hook != "__init__" or kind == RANDOM:
                    self._forbidden(kind, hook, name, place)

        watch.own = _file_of(self.make)
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
            told = _elsewhere(source, seed)
            if isinstance(told, str):
                self.notes.append(f"not tried in another process: {told}")
                return
            words = f"in another process (PYTHONHASHSEED={seed}) {_HASHES}"
            if not self._compared(SPACES[0], self.first, told, "hash", "predict", words):
                return

    def memory(self) -> None:
        """What it takes must stop growing, however long the traffic."""
        space = MEMORY_SPACE
        play = Play(self.make, space)
        steps = traffic(space.geometry, seed=SEED, turns=space.turns, request_turns=1)

        def go_on() -> None:
            for step in islice(steps, MEMORY_STEPS):
                play.step(step)
            play.took_ns.clear()

        grown = memory_growth(space.geometry, space.slots, go_on)
        self.calls += MEMORY_STEPS
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


def _steps(space: Space) -> Iterator[Step]:
    return traffic(space.geometry, seed=SEED, turns=space.turns)


def _nth_ask(space: Space, wanted: int) -> str:
    """Where in the traffic its n-th guess was asked for."""
    asks = 0
    before = "the start"
    for number, step in enumerate(_steps(space), 1):
        if isinstance(step.told, Ask):
            if asks == wanted:
                return f"call {number}, predict after {before}"
            asks += 1
        before = str(step)
    return "the end"


def _file_of(make: Make) -> str | None:
    try:
        return inspect.getfile(make)
    except TypeError:
        return None


# --- another process ---


def _elsewhere(source: str, hash_seed: str) -> list[list[Any]] | str:
    """The guesses in the first space of a process of its own, or why there are none."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
        "from prefetchd.testing_predictor import tell; tell(sys.argv[2])"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path), source]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_CHILD_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took over {_CHILD_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    guesses: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return guesses


def tell(source: str) -> None:
    """Print the guesses in the first space; called in another process."""
    if ":" in source:
        module, path = source.split(":", 1)
        make: Make = attrgetter(path)(importlib.import_module(module))
    else:
        make = predictor_class(source)
    print(json.dumps(Play(make, SPACES[0]).run(_steps(SPACES[0]))))
