"""Each fault of the device `faulty` does what it says, and nothing else; a seed repeats them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd.device import READ, SYNC, WRITE, File
from prefetchd.devices.faulty import KINDS, Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.devices.threads import Threads
from prefetchd.testing import PAGE, aligned_arena, batch, drain, noise, readable, run

UNITS = 16
SIZE = UNITS * PAGE
DEPTH = 8


class Setup:
    """A faulty memory device whose one file is noise, and whose arena is 0xA5."""

    def __init__(self, faults: Faults, depth: int = DEPTH, size: int = SIZE) -> None:
        self.content = noise(1, size)
        arena = aligned_arena(size)
        arena[:] = 0xA5
        contents = [self.content.copy()]
        self.memory = Memory([File(-1, "noise", size)], arena, depth, contents=contents)
        self.device = Faulty(self.memory, faults)

    @property
    def medium(self) -> NDArray[np.uint8]:
        return self.memory.contents[0]

    @property
    def arena(self) -> NDArray[np.uint8]:
        return self.device.arena

    def injected(self) -> dict[str, int]:
        return {kind: count for kind, count in self.device.injected.items() if count}


def second(kind: str, **settings: Any) -> Setup:
    """Only the second operation is harmed."""
    return Setup(Faults(script=((1, kind),), **settings))


def pages(kind: int, count: int, first_tag: int = 0) -> Any:
    places = np.arange(first_tag, first_tag + count) % UNITS * PAGE
    return batch(kind, places, places, PAGE, first_tag=first_tag)


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [("eio", READ, errno.EIO), ("eio", WRITE, errno.EIO), ("enospc", WRITE, errno.ENOSPC)],
)
def test_an_error_is_reported_and_moves_nothing(fault: str, kind: int, code: int) -> None:
    setup = second(fault)
    assert run(setup.device, pages(kind, 3)).tolist() == [PAGE, -code, PAGE]
    assert setup.injected() == {fault: 1}
    moved, source = (setup.arena, setup.content) if kind == READ else (setup.medium, setup.arena)
    assert np.array_equal(moved[:PAGE], source[:PAGE])
    assert np.array_equal(moved[2 * PAGE : 3 * PAGE], source[2 * PAGE : 3 * PAGE])
    untouched = np.full(SIZE, 0xA5) if kind == READ else setup.content
    assert np.array_equal(moved[PAGE : 2 * PAGE], untouched[PAGE : 2 * PAGE])


@pytest.mark.parametrize(
    ("fault", "kind"), [("enospc", READ), ("short", WRITE), ("flip", WRITE), ("flip", SYNC)]
)
def test_a_fault_that_does_not_fit_the_operation_is_not_injected(fault: str, kind: int) -> None:
    setup = second(fault)
    expected = 0 if kind == SYNC else PAGE
    assert run(setup.device, pages(kind, 3)).tolist() == [expected] * 3
    assert setup.injected() == {}


@pytest.mark.parametrize("seed", range(8))
def test_a_short_read_leaves_the_rest_of_its_range_stale(seed: int) -> None:
    setup = Setup(Faults(seed=seed, short=1.0))
    [result] = run(setup.device, batch(READ, 0, 0, SIZE))
    assert 0 <= result < SIZE
    assert result % PAGE == 0
    assert np.array_equal(setup.arena[:result], setup.content[:result])
    assert (setup.arena[result:] == 0xA5).all()
    assert setup.injected() == {"short": 1}


@pytest.mark.parametrize("seed", range(8))
def test_a_flip_inverts_one_bit_of_what_was_read(seed: int) -> None:
    setup = Setup(Faults(seed=seed, flip=1.0))
    # Two of the four pages lie past the end of the file, and what was not read is not flipped.
    assert run(setup.device, batch(READ, SIZE - 2 * PAGE, 0, 4 * PAGE)).tolist() == [2 * PAGE]
    difference = setup.arena[: 2 * PAGE] ^ setup.content[-2 * PAGE :]
    assert np.bitwise_count(difference).sum() == 1
    assert (setup.arena[2 * PAGE :] == 0xA5).all()
    assert np.array_equal(setup.medium, setup.content)
    assert setup.injected() == {"flip": 1}


def test_a_failed_read_is_not_flipped() -> None:
    setup = Setup(Faults(flip=1.0))
    assert run(setup.device, batch(READ, [-1, SIZE], 0, PAGE)).tolist() == [-errno.EINVAL, 0]
    assert setup.injected() == {}


def test_a_stall_holds_its_bytes_and_its_completion_until_released() -> None:
    setup = second("stall")
    assert setup.device.submit(pages(READ, 3)) == 3
    assert np.sort(drain(setup.device, 2)["tag"]).tolist() == [0, 2]
    for _ in range(5):
        assert len(setup.device.reap()) == 0
        setup.device.cancel(np.array([1], np.uint64))
    assert setup.device.in_flight == 1
    assert not readable(setup.device)
    # A caller who uses the range before the completion finds it overwritten.
    setup.arena[PAGE : 2 * PAGE] = 0x11
    setup.device.release_stalled()
    assert readable(setup.device)
    assert setup.device.reap().tolist() == [(1, PAGE)]
    assert np.array_equal(setup.arena[PAGE : 2 * PAGE], setup.content[PAGE : 2 * PAGE])
    assert setup.device.in_flight == 0
    assert setup.injected() == {"stall": 1}


def test_a_stall_may_end_after_a_number_of_reaps() -> None:
    setup = second("stall", stall_reaps=3)
    setup.device.submit(pages(READ, 2))
    reaped = [setup.device.reap().tolist() for _ in range(5)]
    assert reaped == [[(0, PAGE)], [], [], [(1, PAGE)], []]


def test_a_stalled_operation_never_moves_a_byte_after_close() -> None:
    setup = second("stall")
    setup.device.submit(pages(READ, 2))
    setup.device.close()
    setup.device.close()
    assert (setup.arena[PAGE:] == 0xA5).all()
    assert setup.device.in_flight == 0


def test_a_lost_completion_never_comes_and_keeps_its_place() -> None:
    setup = second("lose")
    assert setup.device.submit(pages(READ, DEPTH)) == DEPTH
    done = drain(setup.device, DEPTH - 1)
    assert np.sort(done["tag"]).tolist() == [0, *range(2, DEPTH)]
    assert len(setup.device.reap()) == 0
    assert setup.device.in_flight == 1
    assert setup.device.submit(pages(READ, DEPTH, 20)) == DEPTH - 1
    assert len(drain(setup.device, DEPTH - 1)) == DEPTH - 1
    assert setup.injected() == {"lose": 1}


CHANCES = Faults(
    seed=5, eio=0.1, enospc=0.1, short=0.1, flip=0.1, stall=0.1, lose=0.02, stall_reaps=2
)


OPERATIONS = 200


def history(device: Faulty, batches: list[int]) -> dict[int, int]:
    """Results by tag of mixed operations of 2 pages, in batches of these sizes in turn."""
    places = np.arange(OPERATIONS) * 2 * PAGE
    ops = batch(READ, places, places, 2 * PAGE)
    ops["kind"] = np.random.default_rng(9).choice([READ, WRITE, SYNC], OPERATIONS)
    results: dict[int, int] = {}
    sent = turn = 0
    while sent < len(ops):
        sent += device.submit(ops[sent : sent + batches[turn % len(batches)]])
        turn += 1
        results.update(device.reap().tolist())
    while device.in_flight > device.injected["lose"]:
        results.update(device.reap().tolist())
    return results


def test_the_same_seed_gives_the_same_faults_however_they_are_batched(tmp_path: Path) -> None:
    size = OPERATIONS * 2 * PAGE
    first, again, other = (Setup(faults, 64, size) for faults in (CHANCES, CHANCES, Faults(6, 0.3)))
    results = history(first.device, [1])
    injected = first.device.injected
    assert all(injected[kind] for kind in KINDS)
    assert len(results) == OPERATIONS - injected["lose"]
    assert results != history(other.device, [1])

    assert history(again.device, [7, 1, 30]) == results
    assert again.device.injected == injected
    assert np.array_equal(again.arena, first.arena)
    assert np.array_equal(again.medium, first.medium)

    path = tmp_path / "noise"
    path.write_bytes(first.content.tobytes())
    with path.open("r+b") as medium:
        arena = aligned_arena(size)
        arena[:] = 0xA5
        inner = Threads([File(medium.fileno(), str(path), size)], arena, 64)
        threads = Faulty(inner, CHANCES)
        assert history(threads, [11]) == results
        assert threads.injected == injected
        threads.close()
    assert np.array_equal(arena, first.arena)
    assert path.read_bytes() == first.medium.tobytes()


@pytest.mark.parametrize(
    "settings", [{"eio": 0.6, "flip": 0.5}, {"eio": -0.1}, {"script": ((0, "fire"),)}]
)
def test_impossible_faults_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"faults|probabilities"):
        Faults(**settings)


def test_it_says_that_faults_are_injected() -> None:
    setup = Setup(Faults())
    assert "faults" in setup.device.engine
    assert setup.device.notes
