"""The contract of GPU devices as tests: subclass `GpuDeviceContract`, give it `make`, run pytest.

It decides what every GPU device must do for its callers. It knows no device, and times nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd.gpu import GpuDevice, GpuError, Push
from prefetchd.model import Slots

SLOTS = 24
SLOT_BYTES = 4096
BATCH_SLOTS = 16
PAGES = 40

Pages = NDArray[np.uint8]


def aligned(slots: int, slot_bytes: int) -> Pages:
    """A staging array (slots, slot_bytes) that begins on a page boundary, as a real one does."""
    size = slots * slot_bytes
    raw = np.zeros(size + 4096, np.uint8)
    begin = -raw.ctypes.data % 4096
    return raw[begin : begin + size].reshape(slots, slot_bytes)


def until_sources_free(push: Push) -> None:
    """Return when the slots of a push may be overwritten, without waiting for more if possible."""
    if not push.sources_free():
        push.wait()
    assert push.sources_free()


class GpuDeviceContract:
    """What holds for every GPU device. `make` opens one over the staging it is given."""

    def make(self, staging: Pages, batch_slots: int) -> GpuDevice:
        raise NotImplementedError

    @pytest.fixture
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(20)

    @pytest.fixture
    def staging(self, rng: np.random.Generator) -> Pages:
        array = aligned(SLOTS, SLOT_BYTES)
        array[:] = rng.integers(0, 256, array.shape, np.uint8)
        return array

    @pytest.fixture
    def device(self, staging: Pages) -> Iterator[GpuDevice]:
        device = self.make(staging, BATCH_SLOTS)
        yield device
        device.close()

    def filled(self, device: GpuDevice) -> tuple[Any, Pages]:
        """A buffer in which every page differs from zero, and what is in it."""
        buffer = device.buffer(PAGES)
        for start in range(0, PAGES, BATCH_SLOTS):
            device.push(np.arange(start, min(start + BATCH_SLOTS, PAGES)) % SLOTS, buffer, start)
        return buffer, device.to_host(buffer).copy()

    def test_says_what_it_is(self, device: GpuDevice) -> None:
        assert device.name
        assert device.engine

    def test_new_buffer_shows_nobody_elses_bytes(self, device: GpuDevice) -> None:
        content = device.to_host(device.buffer(3))
        assert content.shape == (3, SLOT_BYTES)
        assert content.dtype == np.uint8
        assert not content.any()

    def test_gathers_any_slots_anywhere_and_nothing_else(
        self, device: GpuDevice, staging: Pages, rng: np.random.Generator
    ) -> None:
        buffer, expected = self.filled(device)
        for count in (1, 2, 7, BATCH_SLOTS):
            slots = rng.integers(0, SLOTS, count)  # with repeats, as a rule
            start = int(rng.integers(0, PAGES - count + 1))
            push = device.push(slots, buffer, start)
            push.wait()
            assert push.done()
            assert push.sources_free()
            expected[start : start + count] = staging[slots]
            np.testing.assert_array_equal(device.to_host(buffer), expected)

    def test_edges_of_staging_and_buffer(self, device: GpuDevice, staging: Pages) -> None:
        buffer, expected = self.filled(device)
        slots = np.array([SLOTS - 1, 0, 0, SLOTS - 1])
        device.push(slots, buffer, PAGES - 4).wait()
        device.push(slots, buffer, 0).wait()
        expected[PAGES - 4 :] = expected[:4] = staging[slots]
        np.testing.assert_array_equal(device.to_host(buffer), expected)

    def test_slots_in_a_strided_array(self, device: GpuDevice, staging: Pages) -> None:
        buffer = device.buffer(4)
        slots: Slots = np.arange(SLOTS)[::-5][:4]
        device.push(slots, buffer).wait()
        np.testing.assert_array_equal(device.to_host(buffer), staging[slots])

    @pytest.mark.parametrize(
        ("slots", "start"),
        [
            ([0, SLOTS], 0),
            ([-1], 0),
            ([np.iinfo(np.int64).min], 0),
            ([np.iinfo(np.int64).max], 0),
            ([0, 1], PAGES - 1),
            ([0], PAGES),
            ([0], -1),
            ([], PAGES + 1),
            ([0] * (BATCH_SLOTS + 1), 0),
        ],
    )
    def test_out_of_range_moves_nothing(
        self, device: GpuDevice, slots: list[int], start: int
    ) -> None:
        buffer, expected = self.filled(device)
        with pytest.raises(ValueError, match=r"slot|page"):
            device.push(np.array(slots, np.int64), buffer, start)
        np.testing.assert_array_equal(device.to_host(buffer), expected)

    def test_wrong_kinds_of_arrays_are_refused(self, device: GpuDevice) -> None:
        buffer = device.buffer(2)
        with pytest.raises(ValueError, match="int64"):
            device.push(np.zeros(1, np.int32), buffer)
        with pytest.raises(ValueError, match="1-d"):
            device.push(np.zeros((1, 1), np.int64), buffer)
        with pytest.raises(ValueError, match="destination"):
            device.push(np.zeros(1, np.int64), bytearray(SLOT_BYTES))

    def test_no_slots_at_all(self, device: GpuDevice) -> None:
        buffer, expected = self.filled(device)
        push = device.push(np.empty(0, np.int64), buffer, PAGES)
        push.wait()
        assert push.done()
        assert push.sources_free()
        np.testing.assert_array_equal(device.to_host(buffer), expected)

    def test_many_in_flight_end_as_if_one_after_the_other(
        self, device: GpuDevice, staging: Pages, rng: np.random.Generator
    ) -> None:
        buffer, expected = self.filled(device)
        pushes = []
        for _ in range(60):
            slots = rng.integers(0, SLOTS, rng.integers(1, BATCH_SLOTS + 1))
            start = int(rng.integers(0, PAGES - slots.size + 1))
            pushes.append(device.push(slots, buffer, start))
            expected[start : start + slots.size] = staging[slots]
        for push in pushes[::-1]:
            push.wait()
        assert all(push.done() for push in pushes)
        np.testing.assert_array_equal(device.to_host(buffer), expected)

    def test_callers_slot_array_is_free_at_once(self, device: GpuDevice, staging: Pages) -> None:
        buffer = device.buffer(2)
        slots = np.array([3, 5])
        push = device.push(slots, buffer)
        slots[:] = 0
        push.wait()
        np.testing.assert_array_equal(device.to_host(buffer), staging[[3, 5]])

    def test_free_sources_may_be_overwritten(
        self, device: GpuDevice, staging: Pages, rng: np.random.Generator
    ) -> None:
        buffer = device.buffer(PAGES)
        expected = np.zeros((PAGES, SLOT_BYTES), np.uint8)
        for turn in range(20):
            slots = rng.permutation(SLOTS)[:BATCH_SLOTS]
            start = turn % (PAGES - BATCH_SLOTS)
            push = device.push(slots, buffer, start)
            expected[start : start + BATCH_SLOTS] = staging[slots]
            until_sources_free(push)
            staging[slots] = rng.integers(0, 256, (BATCH_SLOTS, SLOT_BYTES), np.uint8)
        np.testing.assert_array_equal(device.to_host(buffer), expected)

    def test_close_waits_and_then_refuses(self, staging: Pages) -> None:
        device = self.make(staging, BATCH_SLOTS)
        buffer = device.buffer(BATCH_SLOTS)
        expected = staging[:BATCH_SLOTS].copy()
        pushes = [device.push(np.arange(BATCH_SLOTS), buffer) for _ in range(5)]
        device.close()
        assert all(push.done() and push.sources_free() for push in pushes)
        staging[:] = 0
        np.testing.assert_array_equal(device.to_host(buffer), expected)
        with pytest.raises(GpuError, match="closed"):
            device.push(np.arange(1), buffer)
        device.close()
