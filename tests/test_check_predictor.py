"""`check_predictor` names each fault with its hook, its place and an example, and passes ours."""

from __future__ import annotations

import datetime
import random
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import monotonic as renamed
from typing import Any, ClassVar

import numpy as np
import pytest

from prefetchd import predictor as contract
from prefetchd import testing_patience
from prefetchd.model import NO_IDS, Access, ChainHint, Feedback, Geometry, Ids, PageHint
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors.oracle import Oracle
from prefetchd.registry import RegistryError, names
from prefetchd.testing import PredictorFaults, check_predictor, examine_predictor


class Right(Predictor):
    """Guesses the next block's pages; the faulty ones below each do one thing otherwise."""

    last: Ids = NO_IDS

    def on_access(self, access: Access) -> None:
        self.last = access.pages

    def likely(self, limit: int) -> Ids:
        after = self.last + self.geometry.layers
        return after[after < self.geometry.pages][:limit]

    def predict(self, now_ns: int, limit: int) -> Guess:
        pages = self.likely(limit)
        return Guess(pages, np.linspace(0.9, 0.5, len(pages), dtype=np.float32))


# --- what is said ---


class Nothing(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return None  # type: ignore[return-value]


class Listed(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.likely(limit).tolist())


class Floats(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.likely(limit) * 1.0)  # type: ignore[arg-type]


class Flatless(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.likely(limit)[:, None])


class Twice(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(np.repeat(self.likely(limit), 2)[:limit])


class Beyond(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess((self.last + self.geometry.pages)[:limit])


class Unlimited(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.likely(1 << 20))


class Hoarder(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(keep=np.arange(self.geometry.pages))


class Sure(Right):
    """Confidences made by the function `odds` of a count of pages."""

    odds: ClassVar[Any]

    def predict(self, now_ns: int, limit: int) -> Guess:
        pages = self.likely(limit)
        return Guess(pages, type(self).odds(len(pages)))


class Percent(Sure):
    odds = staticmethod(lambda count: np.full(count, 80, np.float32))


class Doubles(Sure):
    odds = staticmethod(lambda count: np.full(count, 0.5))


class Short(Sure):
    odds = staticmethod(lambda count: np.full(count // 2, 0.5, np.float32))


class Unknown(Sure):
    odds = staticmethod(lambda count: np.full(count, np.nan, np.float32))


class Rising(Sure):
    odds = staticmethod(lambda count: np.linspace(0.1, 0.9, count, dtype=np.float32))


class WideSources(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        pages = self.likely(limit)
        return Guess(pages, sources=np.zeros(len(pages), np.int64))


class Punctual(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.likely(limit), deadline_ns=now_ns + 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("faulty", "kind", "words"),
    [
        (Nothing, "guess", "it returned None: return a Guess"),
        (Listed, "type", "pages is a list, not a numpy array of int64"),
        (Floats, "type", r"pages holds float64, such as \d+\.0: make it int64, .*astype"),
        (Flatless, "type", r"pages has the shape \(\d+, 1\): make it flat"),
        (Twice, "duplicates", r"pages names page \d+ 2 times: name each page once"),
        (Beyond, "range", r"pages names page \d+, and there are 0 to 255: \d+ of \d+ ids"),
        (Unlimited, "limit", r"it names \d+ pages when asked for at most 0: cut"),
        (Hoarder, "limit", "keep names 256 pages, and staging has only 48 slots"),
        (Percent, "confidence", "a confidence is 80: it is a chance, from 0 to 1"),
        (Doubles, "confidence", "confidence holds float64, such as 0.5: make it float32"),
        (Short, "confidence", r"there are \d+ confidences for \d+ pages"),
        (Unknown, "confidence", "the confidence at place 0 is NaN"),
        (Rising, "order", r"confidence rises from 0.1 to 0.\d+ at place 1: the best comes first"),
        (WideSources, "type", "sources holds int64, such as 0: make it uint8"),
        (Punctual, "type", r"deadline_ns is \d+\.5: give an int, or None"),
    ],
)
def test_what_is_wrong_in_a_guess(faulty: type[Predictor], kind: str, words: str) -> None:
    report = examine_predictor(faulty, thorough=False)
    assert [(found.kind, found.hook) for found in report.findings] == [(kind, "predict")]
    place = r" \(after (call \d+, \w+ of .*|the start); 4 layers x 64 blocks, 48 slots"
    assert_words(report.words(), rf"^predict: {words}.*{place}")
    assert report.findings[0].times > 10


def assert_words(told: str, pattern: str) -> None:
    assert re.search(pattern, told, re.MULTILINE), told


# --- what is done ---


class Counting(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        self.last = self.last[1:]
        return super().predict(now_ns, limit)


class Remembering(Right):
    """Two calls in a row agree, and yet what was asked decides what comes after."""

    asked = 0

    def on_access(self, access: Access) -> None:
        self.last = access.pages[self.asked % 2 :]

    def predict(self, now_ns: int, limit: int) -> Guess:
        self.asked = limit % 7
        return super().predict(now_ns, limit)


class Borrowing(Right):
    """Its guess is a view of what it writes to later."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.buffer = np.arange(8)

    def on_access(self, access: Access) -> None:
        if len(access.pages):
            self.buffer[:] = np.arange(8) + access.pages[0] // 8 * 8

    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.buffer[:limit])


class Sorting(Right):
    def on_page_hint(self, hint: PageHint) -> None:
        hint.pages.sort()


class Forcing(Right):
    def on_access(self, access: Access) -> None:
        access.pages.flags.writeable = True
        access.pages[:1] = 3


class Dividing(Right):
    def on_chain_hint(self, hint: ChainHint) -> None:
        self.step = 100 // len(hint.blocks)


class Unready(Right):
    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess(self.missing)  # type: ignore[attr-defined]


class Refusing(Right):
    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        if geometry.layers == 1:
            raise ValueError("I want layers")


class Timed(Right):
    def on_access(self, access: Access) -> None:
        self.last = access.pages
        self.at = renamed()


class Dated(Right):
    def on_feedback(self, feedback: Feedback) -> None:
        self.at = datetime.datetime.now()


class Reading(Right):
    def on_chain_hint(self, hint: ChainHint) -> None:
        with open(__file__) as file:
            file.readline()


class Gambling(Right):
    def on_page_hint(self, hint: PageHint) -> None:
        self.luck = random.random()


class NumpyGambling(Right):
    def on_page_hint(self, hint: PageHint) -> None:
        self.luck = np.random.random()


class Unseeded(Right):
    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.random = np.random.default_rng()

    def on_access(self, access: Access) -> None:
        self.last = self.random.permutation(access.pages)


class Sharing(Right):
    """Instances share what the class has."""

    told = count()

    def on_access(self, access: Access) -> None:
        self.last = np.roll(access.pages, next(self.told) % 11)


class Hasty(Right):
    def on_accesses(self, accesses: Sequence[Access]) -> None:
        self.last = accesses[0].pages


@pytest.mark.parametrize(
    ("faulty", "kind", "words"),
    [
        (Counting, "state", "predict: two calls in a row with the same arguments differ: pages"),
        (Remembering, "state", "predict: it changes what later calls see: with more calls"),
        (Borrowing, "rewrites", "on_access: it changes the arrays of an earlier guess: return c"),
        (Sorting, "writes", rf"on_page_hint: {__file__}, line \d+: it writes to an array that"),
        (Forcing, "writes", r"on_access: it writes to an array that it was given: .* \(call \d+"),
        (Dividing, "raises", rf"on_chain_hint: {__file__}, line \d+: ZeroDivisionError: "),
        (Unready, "raises", rf"predict: {__file__}, line \d+: AttributeError: .*'missing'"),
        (Refusing, "raises", "__init__: ValueError: I want layers .1 layers x 48 blocks, 16 sl"),
        (
            Timed,
            "clock",
            rf"on_access: it reads a clock or waits: time.monotonic .{__file__}, line",
        ),
        (Dated, "clock", "on_feedback: it reads a clock or waits: datetime.now .*use the times"),
        (Reading, "files", rf"on_chain_hint: it opens a file: open .{__file__}, line \d+.; read"),
        (Gambling, "random", "on_page_hint: it uses chance: the generator of the module random"),
        (NumpyGambling, "random", "on_page_hint: it uses chance: numpy's global generator .*seed"),
        (Unseeded, "random", "__init__: it uses chance: os.urandom .as default_rng.. without"),
        (Unseeded, "differs", "predict: two instances that are told the same guess differently"),
        (Sharing, "differs", r"predict: two instances .*share: pages.*\(call \d+, predict after"),
        (Hasty, "batch", "on_accesses: it leads to another guess than on_access for each demand"),
    ],
)
def test_what_a_hook_must_not_do(faulty: type[Predictor], kind: str, words: str) -> None:
    report = examine_predictor(faulty, thorough=False)
    assert kind in [found.kind for found in report.findings]
    assert faulty is Unseeded or len(report.findings) == 1, report.words()
    assert_words(report.words(), f"^{words}")


# --- what takes other processes, or long ---


class Hashed(Right):
    """The order of a set of strings decides."""

    def on_access(self, access: Access) -> None:
        names = {str(page) for page in access.pages.tolist()}
        self.last = np.array([int(name) for name in names], np.int64)


class Keeping(Right):
    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.requests: dict[int, int] = {}

    def on_access(self, access: Access) -> None:
        self.requests[access.request] = len(access.pages)


class Filling(Right):
    """Takes long to fill, and is bounded."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.demands: deque[Ids] = deque(maxlen=2000)

    def on_access(self, access: Access) -> None:
        self.demands.append(access.pages)


class Tiring(Right):
    """Longer than any space lasts, and shorter than its memory is watched."""

    told = 0

    def on_access(self, access: Access) -> None:
        self.told += 1
        if self.told > 700:
            raise OverflowError("enough")


class Caching(Right):
    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.guesses: dict[tuple[int, ...], Guess] = {}

    def predict(self, now_ns: int, limit: int) -> Guess:
        guess = super().predict(now_ns, limit)
        return self.guesses.setdefault((limit, *guess.pages.tolist(), now_ns), guess)


@pytest.mark.parametrize(
    ("faulty", "kind", "words"),
    [
        (Hashed, "hash", r"predict: in another process .PYTHONHASHSEED=1. it guesses differently"),
        (
            Keeping,
            "memory",
            r"all hooks: its memory grows without end: [\d,]+, [\d,]+, [\d,]+ bytes after .*"
            r"3 layers x 24 blocks, 16 slots",
        ),
        (Tiring, "raises", rf"on_access: {__file__}, line \d+: OverflowError: enough"),
        (Caching, "memory", rf"all hooks: .*most of it taken in {__file__}, line \d+; forget"),
    ],
)
def test_what_only_a_thorough_check_finds(faulty: type[Predictor], kind: str, words: str) -> None:
    report = examine_predictor(faulty)
    assert kind in [found.kind for found in report.findings]
    assert_words(report.words(), f"^{words}")


class Looping(Right):
    def on_access(self, access: Access) -> None:
        while True:
            self.last = access.pages


class Deaf(Looping):
    """Goes on after it was told to stop."""

    def on_access(self, access: Access) -> None:
        with suppress(BaseException):
            super().on_access(access)
        super().on_access(access)


class Giving(Looping):
    """Stops when it is told to, and takes as long the next time."""

    def on_access(self, access: Access) -> None:
        with suppress(BaseException):
            super().on_access(access)


class Excusing(Looping):
    def on_access(self, access: Access) -> None:
        try:
            super().on_access(access)
        except BaseException as error:
            raise ValueError("another") from error


class Unmade(Right):
    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        while True:
            self.geometry = geometry


@pytest.mark.parametrize("endless", [Looping, Deaf, Giving, Excusing, Unmade])
def test_a_call_that_does_not_come_back_is_told_once(
    endless: type[Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing_patience, "PATIENCE_S", 0.05)
    monkeypatch.setattr(testing_patience, "AGAIN_S", 0.05)
    report = examine_predictor(endless)
    ((finding,), (note,)) = report.findings, report.notes
    hook = "__init__" if endless is Unmade else "on_access"
    assert (finding.kind, finding.hook, finding.times) == ("endless", hook, 1)
    place = "" if endless is Unmade else rf"{__file__}, line \d+: "
    assert_words(finding.words, f"^{place}TooLong: the call took over 0.05 s")
    assert note == "nothing more was tried"
    if endless is not Unmade:
        assert report.predictor == endless.__name__.lower()
        assert report.calls > 0


def test_what_is_bounded_may_take_long_to_fill() -> None:
    assert check_predictor(Filling).ok


# --- what passes ---


@pytest.mark.parametrize("name", names("predictor"))
def test_ours_pass(name: str) -> None:
    report = check_predictor(name)
    assert report.predictor == name
    assert not report.notes
    assert report.call_us["predict"] > 0


def test_the_oracle_passes_with_a_future_to_know() -> None:
    def make(geometry: Geometry, slots: int) -> Predictor:
        pages = np.random.default_rng(3).integers(0, geometry.pages, (300, 9))
        return Oracle(geometry, slots, future=[np.unique(demand) for demand in pages])

    report = check_predictor(make)
    assert report.predictor == "oracle"
    assert "not tried in other processes" in report.words()


def test_the_smallest_predictor_of_the_contract_passes(tmp_path: Path) -> None:
    text = str(contract.__doc__).split("one class:\n\n")[1].split("\n\n`prefetchd")[0]
    path = tmp_path / "smallest.py"
    path.write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    report = check_predictor(path)
    assert (report.predictor, report.notes) == ("nextblock", ())


def test_faults_are_raised_with_their_report_and_what_there_is_not_is_told() -> None:
    with pytest.raises(PredictorFaults, match="Guess, an empty one") as caught:
        check_predictor(Nothing, thorough=False)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.report.predictor == "nothing"
    with pytest.raises(RegistryError):
        check_predictor("no_such_predictor")
    report = examine_predictor(lambda geometry, slots: 7, thorough=False)  # type: ignore[arg-type,return-value]
    assert "__init__: it made 7: derive it from" in report.words()
