"""The contract of GPU devices over each of them, and what only a real GPU can show.

The runs with `FakeGpu` test control flow; what CUDA itself does is tested where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd.cuda_paths import Mapped, PathError
from prefetchd.devices.cuda import Cuda
from prefetchd.devices.host import Host
from prefetchd.gpu import GpuDevice
from prefetchd.testing_gpu import SLOT_BYTES, GpuDeviceContract, aligned
from tests.fake_cupy import FakeGpu, faked
from tests.real_gpu import needs_gpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with faked(FakeGpu()) as fake:
        yield fake


class TestHost(GpuDeviceContract):
    def make(self, staging: NDArray[np.uint8], batch_slots: int) -> GpuDevice:
        return Host(staging, batch_slots)

    def test_strided_destination_is_refused(self, staging: NDArray[np.uint8]) -> None:
        destination = np.zeros((4, 2 * SLOT_BYTES), np.uint8)[:, :SLOT_BYTES]
        with pytest.raises(ValueError, match="C-contiguous"):
            Host(staging, 4).push(np.zeros(1, np.int64), destination)


@pytest.mark.usefixtures("gpu")
class TestFakeCudaMapped(GpuDeviceContract):
    def make(self, staging: NDArray[np.uint8], batch_slots: int) -> GpuDevice:
        return Cuda(staging, batch_slots)


class TestFakeCudaBounced(GpuDeviceContract):
    @pytest.fixture(autouse=True)
    def _no_mapping(self, gpu: FakeGpu) -> None:
        gpu.register_status = 801

    def make(self, staging: NDArray[np.uint8], batch_slots: int) -> GpuDevice:
        return Cuda(staging, batch_slots)


class TestCudaMapped(GpuDeviceContract):
    pytestmark = needs_gpu

    def make(self, staging: NDArray[np.uint8], batch_slots: int) -> GpuDevice:
        device = Cuda(staging, batch_slots)
        assert device.notes == ()
        return device


class TestCudaBounced(GpuDeviceContract):
    pytestmark = needs_gpu

    @pytest.fixture(autouse=True)
    def _no_mapping(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise PathError("the test wants the other path")

        monkeypatch.setattr(Mapped, "__init__", refuse)

    def make(self, staging: NDArray[np.uint8], batch_slots: int) -> GpuDevice:
        device = Cuda(staging, batch_slots)
        assert "the test wants the other path" in device.notes[0]
        return device


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_streams_order_reads_and_writes(self) -> None:
        """A stream of the caller's copies the buffer between pushes; nobody waits on the host."""
        import cupy

        staging = aligned(64, 1 << 16)
        staging[:] = np.arange(64, dtype=np.uint8)[:, None]
        device = Cuda(staging, 64)
        buffer = device.buffer(64)
        stream = cupy.cuda.Stream(non_blocking=True)
        copies = []
        for turn in range(20):
            device.push(np.roll(np.arange(64), turn), buffer, after=stream).order(stream)
            with stream:
                copies.append(buffer.copy())
        stream.synchronize()
        for turn, copy in enumerate(copies):
            np.testing.assert_array_equal(cupy.asnumpy(copy), staging[np.roll(np.arange(64), turn)])
        device.close()

    def test_pages_of_every_size_the_kernel_splits_differently(self) -> None:
        for slot_bytes in (16, 48, 4096, 18432, 1 << 16, (1 << 20) + 16):
            staging = aligned(5, slot_bytes)
            staging[:] = np.random.default_rng(slot_bytes).integers(0, 256, staging.shape, np.uint8)
            device = Cuda(staging, 5)
            assert device.notes == ()
            buffer = device.buffer(5)
            device.push(np.array([4, 0, 2, 2]), buffer, 1).wait()
            np.testing.assert_array_equal(device.to_host(buffer)[1:], staging[[4, 0, 2, 2]])
            device.close()
