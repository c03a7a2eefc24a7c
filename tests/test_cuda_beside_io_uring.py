"""One arena registered with io_uring and with CUDA, in both orders, and bytes through both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd.device import OP, READ, DeviceError, File
from prefetchd.devices.cuda import Cuda
from prefetchd.testing_gpu import SLOT_BYTES, aligned
from tests.fake_cupy import FakeGpu, faked
from tests.real_gpu import NO_GPU


@pytest.fixture
def staging() -> NDArray[np.uint8]:
    array = aligned(8, SLOT_BYTES)
    array[:] = np.random.default_rng(8).integers(0, 256, array.shape, np.uint8)
    return array


class TestRegistrationBesideIoUring:
    """One arena for both: read through the ring, pushed to the GPU, whichever registers first."""

    @pytest.mark.parametrize("ring_first", [True, False])
    def test_fake(self, staging: NDArray[np.uint8], ring_first: bool, tmp_path: Path) -> None:
        """Runs the test's own steps where there is no GPU; only test_real registers anything."""
        with faked(FakeGpu()):
            self.read_and_push(staging, ring_first, tmp_path / "pages")

    @pytest.mark.cuda
    @pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
    @pytest.mark.parametrize("ring_first", [True, False])
    def test_real(self, staging: NDArray[np.uint8], ring_first: bool, tmp_path: Path) -> None:
        self.read_and_push(staging, ring_first, tmp_path / "pages")

    def read_and_push(self, staging: NDArray[np.uint8], ring_first: bool, path: Path) -> None:
        content = staging.copy()
        path.write_bytes(content.tobytes())
        staging[:] = 0
        fd = os.open(path, os.O_RDONLY)
        try:
            files = [File(fd, str(path), content.nbytes)]
            alone = self.open_ring(files, aligned(*staging.shape))
            alone.close()
            if ring_first:
                ring, device = self.open_ring(files, staging), Cuda(staging, len(staging))
            else:
                device, ring = Cuda(staging, len(staging)), self.open_ring(files, staging)
            assert device.notes == ()
            assert (ring.engine, ring.notes) == (alone.engine, alone.notes)
            self.read_all(ring, staging)
            buffer = device.buffer(len(staging))
            device.push(np.arange(len(staging)), buffer).wait()
            np.testing.assert_array_equal(device.to_host(buffer), content)
            (ring if ring_first else device).close()
            (device if ring_first else ring).close()
        finally:
            os.close(fd)

    def open_ring(self, files: list[File], arena: NDArray[np.uint8]) -> Any:
        module = pytest.importorskip("prefetchd.devices.uring")
        try:
            return module.Uring(files, arena.reshape(-1), len(arena))
        except DeviceError as error:
            pytest.skip(str(error))

    def read_all(self, ring: Any, arena: NDArray[np.uint8]) -> None:
        ops = np.zeros(len(arena), OP)
        ops["tag"] = np.arange(len(arena))
        ops["offset"] = ops["memory"] = np.arange(len(arena)) * SLOT_BYTES
        ops["length"], ops["kind"] = SLOT_BYTES, READ
        assert ring.submit(ops) == len(ops)
        results: list[int] = []
        while ring.in_flight:
            ring.wait(10**9)
            results += ring.reap()["result"].tolist()
        assert results == [SLOT_BYTES] * len(arena)
