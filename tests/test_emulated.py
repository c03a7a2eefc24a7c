"""A real device held back by a drive profile: order, what passes freely, what is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefetchd.bench.emulation import Emulation, limit_profile
from prefetchd.device import OP, READ, SYNC, WRITE, Arena, File, Ops, StorageDevice
from prefetchd.devices.emulated import Emulated
from prefetchd.devices.memory import Memory
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from tests.replays import replay_words, run_here, write_trace

PAGE = 4096
SLOW = DriveProfile(name="slow", read_gb_s=1.0, write_gb_s=1.0, read_us=3_000, write_us=20_000)


def memory(arena: Arena | None = None) -> Memory:
    arena = np.zeros(8 * PAGE, np.uint8) if arena is None else arena
    return Memory([File(-1, "memory", 1 << 20)], arena, 8)


def batch(*kinds: int) -> Ops:
    ops = np.zeros(len(kinds), OP)
    ops["tag"] = np.arange(len(kinds))
    ops["memory"] = np.arange(len(kinds)) * PAGE
    ops["length"] = PAGE
    ops["kind"] = kinds
    return ops


def seen(device: StorageDevice, ops: Ops) -> list[int]:
    """Tags in the order in which they are seen to end."""
    assert device.submit(ops) == len(ops)
    tags: list[int] = []
    while len(tags) < len(ops):
        device.wait(1_000_000_000)
        tags += device.reap()["tag"].tolist()
    assert device.in_flight == 0
    return tags


def test_a_limit_serves_reads_one_after_another_and_writes_at_once() -> None:
    device = Emulated(memory(), DriveModel(limit_profile(PAGE * 1000)))  # a page a millisecond
    tags = seen(device, batch(READ, READ, READ, WRITE, READ))
    assert tags == [3, 0, 1, 2, 4]
    device.close()
    device.close()


def test_what_is_said_of_reads_only_holds_no_write_and_judges_none() -> None:
    device = Emulated(memory(), DriveModel(limit_profile(PAGE * 1000)), writes=False)
    assert seen(device, batch(READ, WRITE, READ, WRITE)) == [1, 3, 0, 2]
    assert device.served == 2
    device.close()


def test_reads_and_writes_end_when_the_model_says_and_flushes_at_once() -> None:
    device = Emulated(memory(), DriveModel(SLOW))
    assert seen(device, batch(WRITE, READ, SYNC, READ)) == [2, 1, 3, 0]
    assert device.served == 3
    device.held = False
    assert seen(device, batch(WRITE, READ)) == [0, 1]
    assert device.served == 3
    device.close()


def test_what_the_drive_below_is_too_slow_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr("prefetchd.devices.emulated.time.monotonic_ns", lambda: clock[0])
    emulation = Emulation(SLOW, inner="memory")
    arena = np.zeros(8 * PAGE, np.uint8)
    device = emulation([File(-1, "memory", 1 << 20)], arena, 8)
    assert device.submit(batch(READ)) == 1
    clock[0] = 3_004_096
    assert len(device.reap()) == 1
    assert emulation.notes() == []
    assert device.submit(batch(READ, READ)) == 2
    clock[0] += 100_000_000
    assert len(device.reap()) == 2
    [note] = emulation.notes()
    assert note.startswith("TOO-SLOW: 67% of operations")
    device.close()


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="read_gb_s is 0"):
        limit_profile(0)


# --- the command ---


def test_a_replay_on_an_emulated_drive_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.npz")
    more = ("--device", "emulated", "--device-profile", "micron-9550-max", "--controls", "none")
    result = run_here(capsys, *replay_words(trace, tmp_path / "store", *more)).result()
    assert (result.device.kind, result.device.name) == ("EMULATED", "emulated")
    assert "micron-9550-max" in result.device.engine
    assert [note for note in result.device.notes if "EMULATED" in note]
    assert all(run.verified_pages >= run.outcomes.total > 0 for run in result.runs)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--device-profile", "micron-9550-max"], ["--device emulated"]),
        (["--device", "emulated", "--device-profile", "nosuch"], ["no drive profile", "nosuch"]),
        (["--device", "emulated", "--device-profile", "kioxia-cm9"], ["template", "fill in"]),
    ],
)
def test_profiles_that_make_no_sense(
    more: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.npz")
    run_here(capsys, *replay_words(trace, tmp_path / "store", *more)).failed(2, *said)
