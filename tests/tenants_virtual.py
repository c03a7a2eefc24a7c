"""Two tenants on one modelled drive under a virtual clock: the gates' effect, exactly repeatable.

Nothing here takes processor time, so figures are of the drive and the shares alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from prefetchd.device import DONE, OP, READ, WRITE, Completions, Ops, StorageDevice
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.gate import Gate
from prefetchd.model import IoClass
from prefetchd.sidecar.drives import Drive, DriveGate

PAGE_BYTES, PAGES, REST_NS, EXTENT_BYTES = 1 << 16, 4, 500_000, 1 << 19
_DEPTH = 128


class Virtual(StorageDevice):
    """A tenant's ring: what has begun ends when the model says."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__((), np.zeros(0, np.uint8), _DEPTH)
        self._world, self._number = world, number
        self.flying = 0
        self.kept: list[int] = []

    @property
    def in_flight(self) -> int:
        return self.flying

    def submit(self, ops: Ops) -> int:
        ops = ops[: self.depth - self.flying]
        self.flying += len(ops)
        for tag, length, kind in ops[["tag", "length", "kind"]].tolist():
            self._world.begin(self._number, tag, length, write=kind == WRITE)
        return len(ops)


class World:
    """`flood`: of the other tenant's class of work, or None: it does nothing. `slept`: who reaps
    has slept until then, and says so."""

    def __init__(
        self, profile: DriveProfile, flood: IoClass | None, *, shared: bool, slept: bool = False
    ) -> None:
        self.slept = slept
        self.model, self.flood, self.now_ns = DriveModel(profile, 0), flood, 1
        self.flying: list[tuple[int, int, int, int]] = []  # due, number, tag, length
        self.devices = [Virtual(self, 0), Virtual(self, 1)]
        self.woken: list[int] = []
        drive = Drive()
        self.gates: list[Gate] = [Gate(), Gate()]
        if shared:
            gates = [
                DriveGate([drive], 1, lambda: self.woken.append(0), clock=lambda: self.now_ns),
                DriveGate([drive], 1, lambda: self.woken.append(1), clock=lambda: self.now_ns),
            ]
            for gate in gates:
                gate.attend(True)
            self.gates = [*gates]
        self.tags = 0
        self.moved = [0, 0]
        self.ahead: list[int] = []
        """The flood's bytes in flight when each of the quiet tenant's demands began."""

    def begin(self, number: int, tag: int, length: int, *, write: bool) -> None:
        due = self.model.submit(np.array([length]), write=write, now_ns=self.now_ns)
        heapq.heappush(self.flying, (int(due[0]), number, tag, length))

    def ops(self, count: int, length: int, kind: int) -> Ops:
        ops = np.zeros(count, OP)
        ops["tag"] = np.arange(self.tags, self.tags + count)
        ops["length"], ops["kind"] = length, kind
        self.tags += count
        return ops

    def pour(self) -> None:
        if self.flood is None:
            return
        writes = self.flood == IoClass.WRITE_BACK
        ops = self.ops(64, EXTENT_BYTES if writes else PAGE_BYTES, WRITE if writes else READ)
        while self.gates[1].submit(self.devices[1], ops, int(self.flood), self.now_ns) == 64:
            ops = self.ops(64, int(ops["length"][0]), int(ops["kind"][0]))

    def step(self) -> tuple[int, int]:
        """Let one operation end: whose, and its tag."""
        self.now_ns, number, tag, length = heapq.heappop(self.flying)
        self.devices[number].flying -= 1
        self.moved[number] += length
        done: Completions = np.array([(tag, length)], DONE)
        gate = self.gates[number]
        if self.slept and isinstance(gate, DriveGate):
            gate.noticed(self.now_ns)
        gate.ended(done, self.now_ns)
        if number == 1 or 1 in self.woken:
            self.pour()
        self.woken.clear()
        return number, tag

    def demand(self) -> int:
        """The quiet tenant's: how long it takes."""
        start_ns = self.now_ns
        self.ahead.append(sum(one[3] for one in self.flying if one[1] == 1))
        waiting, wanted = self.ops(PAGES, PAGE_BYTES, READ), PAGES
        while wanted:
            if len(waiting):
                begun = self.gates[0].submit(self.devices[0], waiting, 0, self.now_ns)
                waiting = waiting[begun:]
            if not len(waiting):
                self.gates[0].rest()
            number, _ = self.step()
            wanted -= number == 0
        return self.now_ns - start_ns

    def rest(self) -> None:
        until_ns = self.now_ns + REST_NS
        while self.flying and self.flying[0][0] <= until_ns:
            self.step()
        self.now_ns = until_ns


@dataclass(frozen=True, slots=True)
class Course:
    p50_us: float
    p99_us: float
    ahead_pages: float
    """The most of the flood that was in flight when a demand began."""
    flood_mb_s: float


def course(
    profile: DriveProfile,
    flood: IoClass | None,
    *,
    shared: bool,
    demands: int = 400,
    slept: bool = False,
) -> Course:
    world = World(profile, None, shared=shared, slept=slept)
    for _ in range(50):  # the drive is learnt of, alone and under load
        world.demand()
        world.rest()
    world.flood = flood
    world.pour()
    for _ in range(3000 if flood is not None else 0):
        world.step()
    world.ahead.clear()
    start_ns, before = world.now_ns, world.moved[1]
    waits = []
    for _ in range(demands):
        waits.append(world.demand() / 1e3)
        world.rest()
    p50, p99 = np.percentile(waits, [50, 99])
    rate = (world.moved[1] - before) / (world.now_ns - start_ns) * 1e3
    return Course(float(p50), float(p99), max(world.ahead) / PAGE_BYTES, rate)
