"""The rule for copies (`docs/consistency.md`), by state machine: a whole runtime on a device that
fails, lags, lies and forgets gives exactly what a dictionary has, or a miss.

`python -m tests.test_consistency_model 5000` takes so many steps, `--seed N` others.
"""

from __future__ import annotations

import sys

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefetchd.devices.faulty import KINDS
from tests.consistency_bench import KEYS, World
from tests.tier_bench import LAYERS

numbers = st.integers(0, KEYS - 1)
faults = st.sampled_from(("", "", "", *KINDS))
STEPS = 50


class Consistency(RuleBasedStateMachine):
    encrypted = False

    @initialize(stripes=st.integers(1, 2))
    def begin(self, stripes: int) -> None:
        self.world = World(stripes, encrypted=self.encrypted)

    @rule(
        number=numbers,
        durable=st.booleans(),
        ttl_s=st.sampled_from([0, 0, 0, 2]),
        wait=st.booleans(),
        fault=faults,
    )
    def put(self, number: int, durable: bool, ttl_s: int, wait: bool, fault: str) -> None:
        self.harm_now(fault)
        self.world.put(number, durable=durable, ttl_s=ttl_s, wait=wait)

    @rule(number=numbers)
    def lookup(self, number: int) -> None:
        self.world.lookup(number)

    @rule(
        numbers=st.lists(numbers, unique=True, max_size=3),
        layer=st.integers(0, LAYERS - 1),
        keep=st.booleans(),
        fault=faults,
    )
    def demand(self, numbers: list[int], layer: int, keep: bool, fault: str) -> None:
        self.harm_now(fault)
        self.world.demand(numbers, layer, keep=keep)

    @precondition(lambda self: self.world.readers)
    @rule()
    def release(self) -> None:
        self.world.release(0)

    @rule(numbers=st.lists(numbers, min_size=3, max_size=6), durable=st.booleans())
    def press(self, numbers: list[int], durable: bool) -> None:
        """More than the store holds."""
        for number in numbers:
            self.world.put(number, durable=durable)

    @rule()
    def grow(self) -> None:
        self.world.grow()

    @precondition(lambda self: self.world.open)
    @rule(number=numbers, part=st.integers(0, 3))
    def write(self, number: int, part: int) -> None:
        self.world.write(0, number, 0, part)

    @precondition(lambda self: self.world.open)
    @rule(number=numbers, durable=st.booleans(), wait=st.booleans(), fault=faults)
    def seal(self, number: int, durable: bool, wait: bool, fault: str) -> None:
        self.harm_now(fault)
        self.world.seal(0, number, durable=durable, wait=wait)

    @precondition(lambda self: self.world.open)
    @rule()
    def drop(self) -> None:
        self.world.drop(0)

    @rule(milliseconds=st.sampled_from([1, 100, 700, 2500]))
    def pass_time(self, milliseconds: int) -> None:
        self.world.pass_time(milliseconds)

    @rule(kind=st.sampled_from(KINDS), ahead=st.integers(0, 4))
    def harm(self, kind: str, ahead: int) -> None:
        self.world.harm(kind, ahead)

    def harm_now(self, fault: str) -> None:
        if fault:
            self.world.harm(fault, 0)

    @precondition(lambda self: self.world.stripes > 1 and not self.world.device.broken)
    @rule(path=st.integers(0, 1))
    def fail_a_path(self, path: int) -> None:
        self.world.fail_path(path)

    @precondition(lambda self: self.world.device.broken)
    @rule()
    def bring_it_back(self) -> None:
        self.world.bring_back()

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(seed=st.integers(0, 2**16))
    def crash(self, seed: int) -> None:
        self.world.crash(seed)

    @rule()
    def reopen(self) -> None:
        self.world.close_and_reopen()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.finish()
            finally:
                self.world.end()


def profile(examples: int, *, derandomize: bool = True) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


TestConsistency = Consistency.TestCase
TestConsistency.settings = profile(40)


class Encrypted(Consistency):
    encrypted = True


TestEncrypted = Encrypted.TestCase
TestEncrypted.settings = profile(4)


def campaign(steps: int, seed: int) -> None:
    machine = hypothesis.seed(seed)(Consistency)
    run_state_machine_as_test(machine, settings=profile(max(1, steps // STEPS), derandomize=False))


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--seed"]
    campaign(int(arguments[0]) if arguments else 5000, int(arguments[1]) if arguments[1:] else 0)
    print("every demand gave what the model has, or a miss; nothing durable was lost, nothing left")
