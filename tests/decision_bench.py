"""What the core's decisions cost in a large decode: `python -m tests.decision_bench [layers [blocks
[requests]]]`.

Eight requests of 128 K tokens in one batch (8 x 8,192 blocks), 16 blocks for each of 8 KV heads, of
which four in five stay from step to step; the others change for blocks used before, but for 3 % of
them; as in recorded decodes. Hints one layer ahead name twice as many.

Processor time of `Core.handle` alone, told apart by what it was spent on (`Part`). A core does the
same in every round, so each turn's time is the least of several rounds: what else goes on in the
machine disturbs one round or another, and none of it is the core's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.core import Core, CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.model import (
    Command,
    Completed,
    Demanded,
    Event,
    Geometry,
    Hinted,
    Idle,
    Ids,
    PageHint,
    PlanSoon,
    Read,
    Released,
    Scores,
)
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.registry import predictor_class
from prefetchd.staging import Staging

LAYER_NS = 600_000
FAR_NS = 1 << 60
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    requests: int = 8
    blocks: int = 8192
    layers: int = 32
    heads: int = 8
    top_k: int = 16
    stays: float = 0.8
    warm_blocks: int = 400
    novel: float = 0.03
    staging_share: float = 0.03
    slots_min: int = 256


PARTS = ("demand", "hint to reads", "learning", "victims", "planning")
"""`demand`: from the event to its answer, its reads and their ends, its release. `hint to reads`:
what `decision_ns` is in results. `learning`: demands and outcomes shown to policy and predictor.
`victims`: chances brought up to date, the worst chosen and emptied. `planning`: of idle turns, the
rest."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time in ns [turn, part] of (step, layer)s with so many demanded pages in all."""

    spent_ns: NDArray[np.int64]
    pages: int

    def least(self, other: Costs) -> Costs:
        return Costs(np.minimum(self.spent_ns, other.spent_ns), self.pages)

    @property
    def parts_us(self) -> NDArray[np.float64]:
        """Each part of a mean (step, layer)."""
        us: NDArray[np.float64] = self.spent_ns.sum(axis=0) / (1e3 * len(self.spent_ns))
        return us

    @property
    def page_us(self) -> float:
        return float(self.spent_ns.sum()) / 1e3 / self.pages


class Watch:
    """Adds processor time to the part that is on; parts within others count by themselves."""

    def __init__(self) -> None:
        self.spent_ns = dict.fromkeys(PARTS, 0)
        self._on: list[str] = []
        self._since_ns = 0

    def enter(self, part: str) -> None:
        now_ns = time.thread_time_ns()
        if self._on:
            self.spent_ns[self._on[-1]] += now_ns - self._since_ns
        self._on.append(part)
        self._since_ns = time.thread_time_ns()

    def leave(self) -> None:
        self.spent_ns[self._on.pop()] += time.thread_time_ns() - self._since_ns
        self._since_ns = time.thread_time_ns()

    def over(self, owner: object, method: str, part: str) -> None:
        """Whatever this method of this object takes is of that part."""
        inner = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return inner(*arguments, **named)
            finally:
                self.leave()

        setattr(owner, method, timed)


def needs(shape: Shape, steps: int) -> Iterator[tuple[int, Ids, PageHint, Scores]]:
    """Layer, blocks and their scores turn by turn, and what a hint had said of them."""
    random = np.random.default_rng(1)
    each = shape.heads * shape.top_k * 5 // 8  # heads share some of theirs
    own = np.arange(shape.requests)[:, None] * shape.blocks
    warm = random.integers(0, shape.blocks, (shape.layers, shape.requests, shape.warm_blocks))
    sets = [some[:, :each] for some in warm]
    geometry = Geometry(shape.layers, shape.requests * shape.blocks)
    for _ in range(steps):
        for layer in range(shape.layers):
            goes = random.random(sets[layer].shape) > shape.stays
            kept = warm[layer][
                np.arange(len(own))[:, None], random.integers(0, shape.warm_blocks, goes.shape)
            ]
            novel = random.random(goes.shape) < shape.novel
            fresh = np.where(novel, random.integers(0, shape.blocks, goes.shape), kept)
            sets[layer] = np.where(goes, fresh, sets[layer])
            blocks = np.unique(sets[layer] + own)
            others = random.integers(0, geometry.blocks, len(blocks))
            said = random.permutation(blocks)[: int(0.9 * len(blocks))]
            hinted = np.concatenate([said, np.setdiff1d(others, blocks)])
            scores = np.linspace(1, 0, len(hinted), dtype=np.float32)
            hint = PageHint(geometry.page_ids(hinted, layer), scores)
            weights = random.random(len(blocks)).astype(np.float32)
            yield layer, geometry.page_ids(blocks, layer), hint, weights


_PART_OF = {Hinted: "hint to reads", Idle: "planning"}


class Timed:
    """A core whose every event is timed; reads end as soon as they are looked at."""

    def __init__(self, shape: Shape, predictor: str) -> None:
        geometry = Geometry(shape.layers, shape.requests * shape.blocks)
        slots = max(int(geometry.pages * shape.staging_share), shape.slots_min)
        staging = Staging(slots, geometry, EVICTIONS["cycle"](slots, geometry))
        guesser = predictor_class(predictor)(geometry, slots)
        self.core = Core(staging, guesser, Planner(PlannerLimits()), CoreLimits())
        self.watch = Watch()
        self.watch.over(self.core.foresight, "learn", "learning")
        self.watch.over(staging, "replenish", "victims")
        for choice in ("victims", "worth"):
            self.watch.over(staging.eviction, choice, "victims")
        self.now_ns = 0
        self._reads: list[Read] = []

    def handle(self, event: Event) -> list[Command]:
        self.watch.enter(_PART_OF.get(type(event), "demand"))
        commands = self.core.handle(event, self.now_ns)
        self.watch.leave()
        self._reads += [command for command in commands if isinstance(command, Read)]
        return commands

    def end_reads(self) -> None:
        while self._reads:
            reads, self._reads = self._reads, []
            slots = np.concatenate([read.slots for read in reads])
            generations = np.concatenate([read.generations for read in reads])
            self.handle(Completed(slots, generations, np.ones(len(slots), np.bool_)))

    def turn(self, number: int, pages: Ids, scores: Scores, hint: PageHint | None) -> list[int]:
        """One layer: the demand, the hint for the next, what can wait, and the release. What each
        part took."""
        self.watch.spent_ns = dict.fromkeys(PARTS, 0)
        self.end_reads()
        self.handle(Demanded(number, pages, FAR_NS, 0, scores))
        self.end_reads()
        if hint is not None:
            self.handle(Hinted(hint))
        if number:
            self.handle(Released(number - 1))
        while PlanSoon() in self.handle(Idle()):
            pass
        self.now_ns += LAYER_NS
        return list(self.watch.spent_ns.values())


def measure(
    shape: Shape, predictor: str, *, hints: bool, steps: int, warmup: int, rounds: int = 1
) -> Costs:
    coming = list(needs(shape, steps))
    first = warmup * shape.layers
    said = [hint if hints else None for _, _, hint, _ in coming[1:]] + [None]
    each = []
    for _ in range(rounds):
        timed = Timed(shape, predictor)
        spent = [
            timed.turn(number, pages, scores, hint)
            for number, ((_, pages, _, scores), hint) in enumerate(zip(coming, said, strict=True))
        ]
        measured = sum(len(pages) for _, pages, _, _ in coming[first:])
        each.append(Costs(np.array(spent[first:]), measured))
    return reduce(Costs.least, each)


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]]
    shape = Shape(**dict(zip(("layers", "blocks", "requests"), sizes, strict=False)))
    print(f"us of processor time a (step, layer), and a demanded page; {', '.join(PARTS)}")
    for predictor, hints in (("none", False), ("attention", True), ("auto", False), ("auto", True)):
        costs = measure(shape, predictor, hints=hints, steps=40, warmup=32, rounds=ROUNDS)
        parts = ", ".join(f"{part:.0f}" for part in costs.parts_us)
        name = f"{predictor}, {'hints' if hints else 'no hints'}"
        print(f"{name}: {costs.parts_us.sum():.0f}, {costs.page_us:.2f}; {parts}", flush=True)


if __name__ == "__main__":
    main()
