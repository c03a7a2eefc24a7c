"""What every storage device must do, as a pytest class to subclass; `check_predictor` beside it.

    class TestMine(StorageDeviceContract):
        def make(self, tmp_path, file_bytes, depth, arena_bytes): ...
        def raw_read(self, device, file, offset, length): ...
        def raw_write(self, device, file, offset, data): ...

Decides what a device may and may not do, by bytes, counts and order, never by time. Knows nothing
of how a device works. Offsets and lengths are multiples of 4096 wherever bytes are to be moved.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd.device import DONE, OP, READ, SYNC, WRITE, Arena, Completions, Ops, StorageDevice
from prefetchd.testing_predictor import PredictorFaults, check_predictor, examine_predictor

__all__ = ["PredictorFaults", "StorageDeviceContract", "check_predictor", "examine_predictor"]
KIB, PAGE = 1024, 4096
FILE_BYTES, DEPTH, ARENA_BYTES = 1024 * KIB, 16, 2048 * KIB
PAGES = FILE_BYTES // PAGE
_PATIENCE_NS = 20_000_000_000  # for a device that has stopped; nothing waits so long when well


def aligned_arena(size_bytes: int) -> Arena:
    """Zeroed memory that starts on a page, as O_DIRECT and registration want it."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


def batch(
    kind: int, offsets: Any, memories: Any, lengths: Any, *, file: Any = 0, first_tag: int = 0
) -> Ops:
    """Operations from arrays or scalars; tags count up from `first_tag`."""
    fields = np.broadcast_arrays(offsets, memories, lengths, file, kind)
    ops = np.zeros(fields[0].size, OP)
    for name, values in zip(("offset", "memory", "length", "file", "kind"), fields, strict=True):
        ops[name] = values.ravel()
    ops["tag"] = np.arange(len(ops)).astype(np.uint64) + np.uint64(first_tag)
    return ops


def drain(device: StorageDevice, count: int) -> Completions:
    """Reap until `count` completions have come; fails when the device has stopped."""
    parts = [device.reap()]
    while sum(map(len, parts)) < count:
        device.wait(_PATIENCE_NS, device.in_flight)
        parts.append(device.reap())
        assert len(parts[-1]) or readable(device, _PATIENCE_NS), "completions are missing"
    done: Completions = np.concatenate(parts)
    assert len(done) == count, f"{len(done)} completions of {count} operations"
    return done


def run(device: StorageDevice, ops: Ops) -> NDArray[np.int64]:
    """Submit all of `ops` and return their results in the order of `ops`."""
    assert device.submit(ops) == len(ops)
    done = np.sort(drain(device, len(ops)), order="tag")
    assert np.array_equal(done["tag"], np.sort(ops["tag"]))
    results: NDArray[np.int64] = done["result"][np.searchsorted(done["tag"], ops["tag"])]
    return results


def readable(device: StorageDevice, timeout_ns: int = 0) -> bool:
    poller = select.poll()
    poller.register(device.fileno(), select.POLLIN)
    return bool(poller.poll(timeout_ns // 1_000_000))


def noise(seed: int, size_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


class StorageDeviceContract:
    """Two files of FILE_BYTES each, an arena of ARENA_BYTES, at most DEPTH operations at once."""

    def make(self, tmp_path: Path, file_bytes: int, depth: int, arena_bytes: int) -> StorageDevice:
        """A device over two files of `file_bytes`; their descriptors are closed by the suite."""
        raise NotImplementedError

    def raw_read(self, device: StorageDevice, file: int, offset: int, length: int) -> bytes:
        """Bytes of the medium, past the device where that is possible."""
        raise NotImplementedError

    def raw_write(self, device: StorageDevice, file: int, offset: int, data: bytes) -> None:
        raise NotImplementedError

    def unaligned_result(self, device: StorageDevice) -> int | None:
        """What the medium itself answers to a read at offset 1; None if it has no alignment."""
        return None

    @pytest.fixture
    def device(self, tmp_path: Path) -> Iterator[StorageDevice]:
        device = self.make(tmp_path, FILE_BYTES, DEPTH, ARENA_BYTES)
        yield device
        device.close()
        for descriptor in {file.fd for file in device.files} - {-1}:
            os.close(descriptor)

    def fill(self, device: StorageDevice, file: int = 0) -> NDArray[np.uint8]:
        content = noise(file + 1, FILE_BYTES)
        self.raw_write(device, file, 0, content.tobytes())
        return content

    @pytest.mark.parametrize("length", [PAGE, 64 * KIB, FILE_BYTES])
    def test_bytes_written_are_on_the_medium_and_bytes_on_it_are_read(
        self, device: StorageDevice, length: int
    ) -> None:
        offset = FILE_BYTES - length
        device.arena[:length] = noise(7, length)
        assert run(device, batch(WRITE, offset, 0, length, file=1)).tolist() == [length]
        assert run(device, batch(SYNC, 0, 0, 0, file=1, first_tag=2)).tolist() == [0]
        assert self.raw_read(device, 1, offset, length) == device.arena[:length].tobytes()

        content = self.fill(device)
        read = batch(READ, offset, ARENA_BYTES - length, length, first_tag=3)
        assert run(device, read).tolist() == [length]
        assert np.array_equal(device.arena[-length:], content[offset:])

    @pytest.mark.parametrize("first_tag", [0, 2**63 - 3, 2**64 - 1 - DEPTH])
    def test_each_operation_completes_once_with_its_tag(
        self, device: StorageDevice, first_tag: int
    ) -> None:
        slots = np.arange(DEPTH) * PAGE
        ops = batch(READ, slots[::-1], slots, PAGE, file=slots % 2, first_tag=first_tag)
        assert device.submit(ops) == DEPTH == device.in_flight
        done = drain(device, DEPTH)
        assert np.array_equal(np.sort(done["tag"]), ops["tag"])
        assert (done["result"] == PAGE).all()
        assert ((nothing := device.reap()).dtype, nothing.shape) == (DONE, (0,))
        assert device.in_flight == 0

    def test_a_prefix_is_accepted_when_there_are_too_many(self, device: StorageDevice) -> None:
        ops = batch(READ, 0, np.arange(DEPTH + 5) * PAGE, PAGE)
        assert device.submit(ops) == DEPTH == device.in_flight
        assert device.submit(ops[DEPTH:]) == 0
        assert np.array_equal(np.sort(drain(device, DEPTH)["tag"]), ops["tag"][:DEPTH])
        assert run(device, ops[DEPTH:]).tolist() == [PAGE] * 5
        assert device.submit(ops[:0]) == 0 == device.in_flight

    def test_results_are_the_bytes_moved_and_a_read_past_the_end_is_short(
        self, device: StorageDevice
    ) -> None:
        content = self.fill(device)
        offsets = np.array([0, 64 * KIB, FILE_BYTES - PAGE, FILE_BYTES, FILE_BYTES + 4 * PAGE])
        lengths = np.array([PAGE, 32 * KIB, 64 * KIB, PAGE, PAGE])
        memories = np.arange(5) * 128 * KIB
        results = run(device, batch(READ, offsets, memories, lengths))
        assert results.tolist() == [PAGE, 32 * KIB, PAGE, 0, 0]
        for offset, memory, got in zip(offsets, memories, results, strict=True):
            assert np.array_equal(device.arena[memory:][:got], content[offset:][:got])

    def test_what_cannot_be_started_completes_with_an_error(self, device: StorageDevice) -> None:
        device.arena[:] = 0xA5
        ops = batch(READ, 0, np.arange(8) * PAGE, PAGE)
        ops["offset"][0], ops["offset"][1] = -1, -PAGE
        ops["file"][2], ops["file"][3] = 2, -1
        ops["memory"][4], ops["memory"][5] = -PAGE, ARENA_BYTES - PAGE + 1
        ops["kind"][6] = 99
        results = run(device, ops)
        assert results[:2].tolist() == [-errno.EINVAL] * 2
        assert results[2:4].tolist() == [-errno.EBADF] * 2
        assert (results[4:7] < 0).all()
        assert results[7] == PAGE
        assert (np.delete(device.arena, slice(7 * PAGE, 8 * PAGE)) == 0xA5).all()

    def test_an_unaligned_read_gets_the_answer_of_the_medium(self, device: StorageDevice) -> None:
        expected = self.unaligned_result(device)
        if expected is None:
            pytest.skip("this medium has no alignment")
        assert run(device, batch(READ, 1, 0, PAGE)).tolist() == [expected]

    def test_the_descriptor_is_readable_while_there_is_something_to_reap(
        self, device: StorageDevice
    ) -> None:
        assert not readable(device)
        for offset in (0, -1):  # one that is read and one that is refused
            device.submit(batch(READ, offset, 0, PAGE))
            assert readable(device, _PATIENCE_NS)
            assert readable(device), "readable until reaped, not once"
            drain(device, 1)
            device.reap()
            assert not readable(device)

    def test_another_thread_may_wait(self, device: StorageDevice) -> None:
        waiter = threading.Thread(target=device.wait, args=(_PATIENCE_NS,))
        waiter.start()
        device.submit(batch(READ, 0, 0, PAGE))
        # The completion stays unreaped until the waiter has seen it.
        waiter.join(_PATIENCE_NS / 2e9)
        assert not waiter.is_alive()
        drain(device, 1)

    def test_bytes_outside_the_ranges_asked_for_stay(self, device: StorageDevice) -> None:
        content = self.fill(device)
        device.arena[:] = 0xA5
        memories = np.arange(DEPTH) * 2 * PAGE + PAGE
        assert (run(device, batch(READ, memories, memories, PAGE)) == PAGE).all()
        pages = device.arena[: 2 * PAGE * DEPTH].reshape(DEPTH, 2, PAGE)
        expected = content[: 2 * PAGE * DEPTH].reshape(DEPTH, 2, PAGE)
        assert np.array_equal(pages[:, 1], expected[:, 1])
        assert (pages[:, 0] == 0xA5).all()
        assert (device.arena[2 * PAGE * DEPTH :] == 0xA5).all()

    def test_cancelling_loses_no_completion(self, device: StorageDevice) -> None:
        content = self.fill(device)
        slots = np.arange(DEPTH) * 32 * KIB
        ops = batch(READ, slots, slots, 32 * KIB, first_tag=5)
        device.submit(ops)
        device.cancel(np.array([*range(5, 5 + DEPTH, 2), 10**6], np.uint64))
        device.cancel(ops["tag"])
        done = np.sort(drain(device, DEPTH), order="tag")
        assert np.array_equal(done["tag"], ops["tag"])
        assert set(done["result"].tolist()) <= {32 * KIB, -errno.ECANCELED, -errno.EINTR}
        for slot in slots[done["result"] > 0]:
            assert np.array_equal(device.arena[slot:][: 32 * KIB], content[slot:][: 32 * KIB])
        assert run(device, ops).tolist() == [32 * KIB] * DEPTH, "a cancellation outlived its target"

    def test_nothing_is_written_to_the_arena_after_close(self, device: StorageDevice) -> None:
        self.fill(device)
        slots = np.arange(DEPTH) * 128 * KIB
        device.submit(batch(READ, slots % FILE_BYTES, slots, 128 * KIB))
        device.close()
        marks = device.arena[::PAGE]  # few, so that they are set before a late byte could come
        marks[:] = 0xA5
        for file in (0, 1):  # which takes longer than anything that might still be on its way
            self.raw_read(device, file, 0, FILE_BYTES)
        assert (marks == 0xA5).all()
        device.close()

    @pytest.mark.parametrize("seed", range(4))
    def test_random_batches_agree_with_a_model(self, device: StorageDevice, seed: int) -> None:
        model = np.stack([self.fill(device, 0), self.fill(device, 1)]).reshape(-1, PAGE)
        walk = Walk(device, model, np.random.default_rng(seed))
        for _ in range(150):
            walk.start()
            walk.finish()
        while walk.running:
            walk.finish()
        for file in (0, 1):
            content = self.raw_read(device, file, 0, FILE_BYTES)
            assert content == model[file * PAGES : (file + 1) * PAGES].tobytes()


class Walk:
    """Random operations of one page each, checked against a model of both files.

    A page of a file and one of the arena take part in one operation at a time, so that every
    answer is certain. `model`: uint8, shape (2 x PAGES, PAGE).
    """

    def __init__(
        self, device: StorageDevice, model: NDArray[np.uint8], random: np.random.Generator
    ) -> None:
        self.device, self.model, self.random = device, model, random
        self.arena = device.arena.reshape(-1, PAGE)
        self.running: dict[int, tuple[int, int, int]] = {}  # tag: kind, page, cell
        self.next_tag = 0

    def start(self) -> None:
        count = int(self.random.integers(1, DEPTH + 4))
        busy = np.array([op[1:] for op in self.running.values()], int).reshape(-1, 2)
        # Few pages, so that most of them are written and read many times.
        pages = self.random.permutation(np.setdiff1d(np.arange(0, 2 * PAGES, 8), busy[:, 0]))
        cells = self.random.permutation(np.setdiff1d(np.arange(len(self.arena)), busy[:, 1]))
        pages, cells = pages[:count], cells[:count]
        kinds = self.random.choice([READ, WRITE, SYNC], count, p=[0.5, 0.45, 0.05])
        writes = cells[kinds == WRITE]
        self.arena[writes] = self.random.integers(0, 256, (len(writes), PAGE), np.uint8)
        ops = batch(READ, pages % PAGES * PAGE, cells * PAGE, PAGE, file=pages // PAGES)
        ops["kind"] = kinds
        ops["tag"] += np.uint64(self.next_tag)
        accepted = self.device.submit(ops)
        assert accepted == min(count, DEPTH - len(self.running))
        started = np.stack([kinds, pages, cells], axis=1)[:accepted].tolist()
        for kind, page, cell in started:
            self.running[self.next_tag] = kind, page, cell
            self.next_tag += 1
            if kind == WRITE:
                self.model[page] = self.arena[cell]

    def finish(self) -> None:
        assert self.device.in_flight == len(self.running)
        self.device.wait(_PATIENCE_NS)
        for tag, result in self.device.reap().tolist():
            kind, page, cell = self.running.pop(tag)
            assert result == (0 if kind == SYNC else PAGE)
            assert kind != READ or np.array_equal(self.arena[cell], self.model[page])
        assert self.device.in_flight == len(self.running)
