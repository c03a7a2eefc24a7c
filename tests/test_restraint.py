"""What keeps auto from doing harm: the ghost of no prefetch, the guard, and what is held."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.model import NO_IDS, Access, Feedback, Geometry, Ids, Outcome, Verdict
from prefetchd.predictor import Predictor
from prefetchd.predictors._restraint import PARTS, GhostLru, Guard, Holding
from prefetchd.predictors.auto import Auto
from prefetchd.predictors.none import NoPrefetch
from prefetchd.registry import predictor_class

GEOMETRY = Geometry(layers=20, blocks=50)
SLOTS = 300


def met(pages: Ids | list[int] | range, outcome: Outcome = Outcome.RETAINED) -> Access:
    return Access(np.array(pages, np.int64), np.full(len(pages), outcome, np.uint8))


# --- the ghost and the guard --------------------------------------------------------------------


class PlainLru:
    """LRU in the plainest way, the model for the ghost and the buffer of the trials below."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: OrderedDict[int, None] = OrderedDict()

    def demand(self, page: int) -> bool:
        """Whether it was missed."""
        missed = page not in self.held
        self.held[page] = None
        self.held.move_to_end(page)
        if len(self.held) > self.slots:
            self.held.popitem(last=False)
        return missed


@given(
    slots=st.integers(1, 12),
    demands=st.lists(st.lists(st.integers(0, 19), max_size=8, unique=True), max_size=60),
)
def test_the_ghost_is_an_lru(slots: int, demands: list[list[int]]) -> None:
    """Exactly, while the pages of one demand fit: a demand is met as a whole."""
    ghost, plain = GhostLru(20, slots), PlainLru(slots)
    for demand in demands:
        pages = demand[:slots]
        held = set(plain.held)
        for page in pages:
            plain.demand(page)
        assert ghost.demand(np.array(pages, np.int64)).tolist() == [p not in held for p in pages]
        assert set(np.flatnonzero(ghost.holds(np.arange(20)))) == set(plain.held)


def test_the_ghost_stays_bounded_when_hot_pages_fill_its_ring() -> None:
    ghost = GhostLru(1000, 10)
    ghost.demand(np.array([500]))
    for _ in range(100):
        assert ghost.demand(np.array([1, 2, 1])).sum() <= 2
    assert ghost.holds(np.array([1, 2, 500])).tolist() == [True, True, False]
    assert ghost.demand(np.arange(700)).sum() == 698
    assert ghost.holds(np.arange(1000)).sum() == 10


def passes(guard: Guard, count: int, outcome: Outcome) -> list[bool]:
    """Passes of twenty demands of pages that the ghost holds; the guard's state after each."""
    states = []
    for _ in range(count):
        for _ in range(20):
            guard.observe(met([1, 2, 3], outcome))
        guard.judge()
        states.append(guard.open)
    return states


def test_harm_closes_the_guard_for_longer_and_longer() -> None:
    guard = Guard(GhostLru(100, 10))
    passes(guard, 5, Outcome.RETAINED)
    closed = "".join("-x"[state] for state in passes(guard, 60, Outcome.MISS))
    pauses = [len(pause) for pause in closed.split("x") if pause]
    assert pauses[:3] == [1, 7, 31]  # whole passes; each began within the one before
    assert all(passes(guard, 90, Outcome.RETAINED)[-10:])
    again = "".join("-x"[state] for state in passes(guard, 3, Outcome.MISS))
    assert again == "-x-"  # after good times it is short again


def test_misses_that_come_without_prefetch_too_do_not_close_it() -> None:
    guard = Guard(GhostLru(5000, 10))
    for start in range(0, 5000, 5):
        guard.observe(met(np.arange(start, start + 5), Outcome.MISS))
        if start % 100 == 0:
            guard.judge()
            assert guard.open


def replay(predictor: Predictor, demands: list[Ids], slots: int, burst: int) -> int:
    """Misses in an LRU buffer where prefetched pages arrive at once."""
    buffer, fresh, missed = PlainLru(slots), dict[int, int](), 0
    for pages in demands:
        guess = predictor.predict(0, 200)
        absent = [place for place, page in enumerate(guess.pages) if page not in buffer.held]
        for place in absent[:burst]:
            buffer.demand(int(guess.pages[place]))
            fresh[int(guess.pages[place])] = 0
        useful = [int(page) for page in pages if page in fresh and page in buffer.held]
        outcomes = [Outcome.MISS * buffer.demand(int(page)) for page in pages]
        missed += outcomes.count(Outcome.MISS)
        predictor.on_access(Access(pages, np.array(outcomes, np.uint8)))
        wasted = [page for page in fresh if page not in buffer.held]
        told = np.array(useful + wasted, np.int64)
        verdicts = [Verdict.USEFUL] * len(useful) + [Verdict.WASTED] * len(wasted)
        sources = np.array([fresh.pop(page) for page in told], np.uint8)
        predictor.on_feedback(Feedback(told, sources, np.array(verdicts, np.uint8)))
    return missed


HARMFUL = """
import numpy as np
from prefetchd.predictor import Guess, Predictor

class Harmful(Predictor):
    turn = 0
    def on_access(self, access):
        self.turn += 1
    def predict(self, now_ns, limit):
        return Guess((self.turn * 37 + 11 * np.arange(limit)) % self.geometry.pages)
"""


def test_a_harmful_predictor_costs_next_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "harmful.py"
    path.write_text(HARMFUL)
    random = np.random.default_rng(5)
    demands = [
        GEOMETRY.page_ids(np.unique(random.integers(0, 12, 8)), turn % GEOMETRY.layers)
        for turn in range(3000)
    ]
    missed = {
        name: replay(predictor, demands, SLOTS, burst=8)
        for name, predictor in {
            "none": NoPrefetch(GEOMETRY, SLOTS),
            "alone": predictor_class(str(path))(GEOMETRY, SLOTS),
            "guarded": Auto(GEOMETRY, SLOTS, sources=[str(path)]),
        }.items()
    }
    assert missed["none"] < 300
    assert missed["alone"] > 5000
    assert missed["guarded"] - missed["none"] < 0.1 * (missed["alone"] - missed["none"])


# --- holding ------------------------------------------------------------------------------------


def hold(asked: Ids, hot_every: int, turns: int = 2000) -> int:
    """Parts earned when page 0 comes back now and then, among pages that never do."""
    geometry = Geometry(1, 20_000)
    ghost = GhostLru(geometry.pages, 40)
    holding = Holding(geometry.pages, ghost)
    for turn in range(turns):
        pages = np.arange(3 * turn + 100, 3 * turn + 103)
        if turn % hot_every == 0:
            pages[0] = 0
        access = met(pages, Outcome.MISS)
        holding.observe(access, ghost.demand(pages))
        if turn % 20 == 0:
            holding.judge(asked)
    return holding.earned_parts


def test_pages_that_come_back_too_late_for_an_lru_earn_their_slots() -> None:
    asked = np.arange(PARTS)  # one page a part; of these only page 0 ever comes
    assert hold(asked, hot_every=15) == 1
    assert hold(asked[::-1].copy(), hot_every=15) == 0  # behind seven that are never wanted


def test_pages_that_an_lru_holds_anyway_earn_nothing() -> None:
    assert hold(np.arange(PARTS), hot_every=3) == 0


def test_only_the_earned_part_of_what_is_asked_is_held() -> None:
    holding = Holding(GEOMETRY.pages, GhostLru(GEOMETRY.pages, SLOTS))
    asked = np.arange(100, 180)
    assert holding.earned(asked).tolist() == []
    holding.earned_parts = 2
    assert holding.earned(asked).tolist() == list(range(100, 120))
    assert holding.earned(NO_IDS).tolist() == []
