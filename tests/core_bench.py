"""A core on a bench: events go in by short calls, commands come out in short form.

A test fixture. Knows no device: a test says which reads end, when and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prefetchd.core import Core, CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.model import (
    Cancel,
    Command,
    Completed,
    Demanded,
    Event,
    Feedback,
    Fill,
    Geometry,
    Hinted,
    Idle,
    Ids,
    IoClass,
    PageHint,
    PlanSoon,
    Read,
    Ready,
    Released,
)
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.predictor import Guess, Predictor
from prefetchd.staging import Staging

GEOMETRY = Geometry(layers=2, blocks=50)
FAR_NS = 10**15
Told = tuple[Any, ...]


def ids(*pages: int) -> Ids:
    return np.array(pages, np.int64)


class Scripted(Predictor):
    """Guesses what a test puts into `guess`, and remembers the feedback."""

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self.guess = Guess()
        self.feedback: list[Feedback] = []

    def on_feedback(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)

    def predict(self, now_ns: int, limit: int) -> Guess:
        return self.guess


def told(command: Command) -> Told:
    """A command as plain numbers, to be compared."""
    if isinstance(command, Read):
        name = f"{IoClass(command.io_class).name.lower()} read"
        return (name, command.pages.tolist(), command.slots.tolist())
    if isinstance(command, Ready):
        return ("ready", command.ticket, command.slots.tolist(), command.outcomes.tolist())
    if isinstance(command, Cancel):
        return ("cancel", command.slots.tolist())
    if isinstance(command, Fill):
        return ("fill", command.pages.tolist(), command.slots.tolist())
    return ("plan soon",)


class Bench:
    """A core with `slots` slots, its clock, and the reads that it has asked for."""

    def __init__(
        self,
        slots: int = 8,
        *,
        limits: CoreLimits | None = None,
        predictor: type[Predictor] = Scripted,
        evict: str = "lru",
        geometry: Geometry = GEOMETRY,
    ) -> None:
        self.staging = Staging(slots, geometry, EVICTIONS[evict](slots, geometry))
        self.predictor = predictor(geometry, slots)
        planner = Planner(PlannerLimits())
        self.core = Core(self.staging, self.predictor, planner, limits or CoreLimits())
        self.now_ns = 1_000
        self.reads: list[Read] = []
        self.plans_wanted = 0

    @property
    def counters(self) -> Any:
        return self.core.counters

    def handle(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, self.now_ns)
        self.staging.check()
        self.reads += [command for command in commands if isinstance(command, Read)]
        self.plans_wanted += sum(isinstance(command, PlanSoon) for command in commands)
        return commands

    def tell(self, event: Event) -> list[Told]:
        """What comes of an event, but for the wish to plan."""
        return [told(c) for c in self.handle(event) if not isinstance(c, PlanSoon)]

    def demand(self, ticket: int, *pages: int, deadline_ns: int = FAR_NS) -> list[Told]:
        return self.tell(Demanded(ticket, ids(*pages), deadline_ns))

    def release(self, ticket: int) -> list[Told]:
        return self.tell(Released(ticket))

    def guess(self, *pages: int, **rest: Any) -> list[Told]:
        """A plan is made of this guess, as soon as all that comes before it is done."""
        assert isinstance(self.predictor, Scripted)
        self.predictor.guess = Guess(ids(*pages), **rest)
        return self.settle()

    def settle(self) -> list[Told]:
        """As many idle turns as are wanted, one step of learning each."""
        found: list[Told] = []
        for _ in range(100):
            wanted = self.plans_wanted
            found += self.tell(Idle())
            if self.plans_wanted == wanted:
                return found
        raise AssertionError("there is no end to the turns that it wants")

    def hint(self, *pages: int) -> list[Told]:
        assert isinstance(self.predictor, Scripted)
        self.predictor.guess = Guess(ids(*pages))
        return self.tell(Hinted(PageHint(ids(*pages), np.ones(len(pages), np.float32))))

    def idle(self, now_ns: int) -> list[Told]:
        self.now_ns = now_ns
        return self.guess()

    def end(self, read: Read | None = None, verified: Sequence[bool] | bool = True) -> list[Told]:
        """A read, the oldest one if none is named, has ended."""
        read = read or self.reads[0]
        self.reads = [other for other in self.reads if other is not read]
        good = np.broadcast_to(np.array(verified, np.bool_), read.slots.shape)
        return self.tell(Completed(read.slots, read.generations, good.copy()))

    def stage(self, *pages: int) -> None:
        """Pages demanded and released: resident, unpinned, the last one the youngest."""
        self.demand(10**6, *pages)
        while self.reads:
            self.end()
        self.release(10**6)

    def resident(self) -> list[int]:
        return np.flatnonzero(self.staging.slot_of >= 0).tolist()

    def pinned(self) -> int:
        return int(self.staging.pins.sum())
