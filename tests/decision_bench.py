"""What the core's decisions cost in a large decode: `python -m tests.decision_bench`.

Eight requests of 128 K tokens in one batch (8 x 8,192 blocks), 16 blocks for each of 8 KV heads, of
which four in five stay from step to step; the others change for blocks used before, but for 3 % of
them; as in recorded decodes. Hints one layer ahead name twice as many. Times are of
`Core.handle` alone, of processor time, by kind of event, in microseconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

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


@dataclass(slots=True)
class Costs:
    """Microseconds by kind of event, of (step, layer)s with `pages` demanded pages in all."""

    turns: int = 0
    pages: int = 0
    spent_us: dict[str, float] = field(default_factory=dict)

    @property
    def total_us(self) -> float:
        return sum(self.spent_us.values())


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


class Timed:
    """A core whose every event is timed; reads end as soon as they are looked at."""

    def __init__(self, shape: Shape, predictor: str) -> None:
        geometry = Geometry(shape.layers, shape.requests * shape.blocks)
        slots = int(geometry.pages * shape.staging_share)
        staging = Staging(slots, geometry, EVICTIONS["cycle"](slots, geometry))
        guesser = predictor_class(predictor)(geometry, slots)
        self.core = Core(staging, guesser, Planner(PlannerLimits()), CoreLimits())
        self.costs = Costs()
        self.now_ns = 0
        self._reads: list[Read] = []

    def handle(self, event: Event) -> list[Command]:
        begun = time.thread_time_ns()
        commands = self.core.handle(event, self.now_ns)
        spent_us = (time.thread_time_ns() - begun) / 1e3
        kind = type(event).__name__.lower()
        self.costs.spent_us[kind] = self.costs.spent_us.get(kind, 0.0) + spent_us
        self._reads += [command for command in commands if isinstance(command, Read)]
        return commands

    def end_reads(self) -> None:
        while self._reads:
            reads, self._reads = self._reads, []
            slots = np.concatenate([read.slots for read in reads])
            generations = np.concatenate([read.generations for read in reads])
            self.handle(Completed(slots, generations, np.ones(len(slots), np.bool_)))

    def turn(self, number: int, pages: Ids, scores: Scores, hint: PageHint | None) -> None:
        """One layer: the demand, the hint for the next, what can wait, and the release."""
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
        self.costs.turns += 1
        self.costs.pages += len(pages)


def measure(shape: Shape, predictor: str, *, hints: bool, steps: int, warmup: int) -> Costs:
    timed = Timed(shape, predictor)
    coming = list(needs(shape, steps))
    for number, (_, pages, _, scores) in enumerate(coming):
        if number == warmup * shape.layers:
            timed.costs = Costs()
        following = coming[number + 1 : number + 2]
        timed.turn(number, pages, scores, following[0][2] if hints and following else None)
    return timed.costs


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    print("predictor, hints: us a (step, layer); us a demanded block; by event, us")
    for predictor, hints in (("none", False), ("attention", True), ("auto", False), ("auto", True)):
        costs = measure(Shape(layers=layers), predictor, hints=hints, steps=40, warmup=32)
        events = {kind: round(us / costs.turns) for kind, us in costs.spent_us.items()}
        a_turn, a_block = costs.total_us / costs.turns, costs.total_us / costs.pages
        print(f"{predictor}, {hints}: {a_turn:.0f}; {a_block:.2f}; {events}", flush=True)


if __name__ == "__main__":
    main()
