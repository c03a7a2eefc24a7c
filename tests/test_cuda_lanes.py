"""Lanes, paths and errors of the `cuda` device, on a GPU that runs only as far as it is told."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefetchd.devices.cuda import LANES, Cuda, stream_pointer
from prefetchd.devices.host import Host
from prefetchd.gpu import GpuError
from prefetchd.testing_gpu import SLOT_BYTES, aligned
from tests.fake_cupy import FakeGpu, faked


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with faked(FakeGpu()) as fake:
        yield fake


@pytest.fixture
def staging() -> NDArray[np.uint8]:
    array = aligned(8, SLOT_BYTES)
    array[:] = np.random.default_rng(6).integers(0, 256, array.shape, np.uint8)
    return array


def one(slot: int) -> NDArray[np.int64]:
    return np.array([slot])


class TestPaths:
    def test_mapped_path_registers_once_and_unregisters(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 4)
        assert gpu.registered == {staging.ctypes.data: staging.nbytes}
        assert device.notes == ()
        assert "Fake GPU" in device.engine
        assert "mapped" in device.engine
        device.push(np.arange(4), device.buffer(4))
        assert gpu.launches == 1  # one gather a batch
        device.close()
        assert not gpu.registered

    @pytest.mark.parametrize(
        ("fault", "value", "note"),
        [
            ("register_status", 801, "cudaErrorNotSupported"),
            ("can_map", False, "cannot address"),
            ("compile_error", "no libnvrtc\nmore", "RuntimeError: no libnvrtc)"),
        ],
    )
    def test_without_mapping_it_says_so_and_bounces(
        self, gpu: FakeGpu, staging: NDArray[np.uint8], fault: str, value: Any, note: str
    ) -> None:
        setattr(gpu, fault, value)
        device = Cuda(staging, 4)
        assert note in device.notes[0]
        assert "mapped" not in device.engine
        assert not gpu.registered  # nothing is left half done
        buffer = device.buffer(2)
        expected = staging[[6, 1]].copy()
        push = device.push(np.array([6, 1]), buffer)
        assert push.sources_free()
        assert not push.done()
        staging[:] = 0
        np.testing.assert_array_equal(device.to_host(buffer), expected)
        assert gpu.launches == 0
        device.close()

    def test_unaligned_slots_bounce(self, gpu: FakeGpu) -> None:
        staging = np.arange(40, dtype=np.uint8).reshape(4, 10)
        device = Cuda(staging, 4)
        assert "10 bytes" in device.notes[0]
        buffer = device.buffer(1)
        device.push(one(2), buffer)
        np.testing.assert_array_equal(device.to_host(buffer), staging[[2]])
        device.close()
        assert not gpu.registered


class TestLanes:
    def test_a_push_waits_only_when_its_lane_is_busy(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 2)
        buffer = device.buffer(LANES + 1)
        pushes = [device.push(one(at), buffer, at) for at in range(LANES)]
        assert gpu.host_waits == 0
        assert not any(push.done() or push.sources_free() for push in pushes)
        last = device.push(one(LANES), buffer, LANES)
        assert gpu.host_waits == 1
        assert pushes[0].done()  # although its lane is busy again
        assert not last.done()
        device.close()
        assert last.done()

    def test_a_stream_ordered_behind_a_push_runs_behind_it(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 2)
        push = device.push(one(1), device.buffer(1))
        stream = gpu.cupy.cuda.Stream(non_blocking=True)
        push.order(stream)
        assert not gpu.advance(stream)
        assert not push.done()  # order did not wait
        gpu.drain(push.done)
        assert gpu.advance(stream)
        device.push(one(1), device.buffer(1)).wait()
        device.push(one(1), device.buffer(1))  # on the first push's lane again
        push.order(stream)
        assert not stream.queue  # a finished push holds nobody back
        device.close()

    def test_a_push_after_a_stream_runs_behind_its_work(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 2)
        buffer = device.buffer(1)
        stream = gpu.cupy.cuda.Stream(non_blocking=True)
        seen: list[NDArray[np.uint8]] = []
        stream.queue.append(lambda: seen.append(gpu.cupy.asnumpy(buffer)))
        push = device.push(one(3), buffer, after=stream)
        while gpu.advance(gpu.streams[0]):  # the push's, as far as it goes
            pass
        assert not push.done()
        push.wait()
        assert not seen[0].any()
        np.testing.assert_array_equal(device.to_host(buffer), staging[[3]])
        device.close()

    def test_a_destination_dropped_in_flight_is_not_freed(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 2)
        buffer = device.buffer(2)
        push = device.push(one(1), buffer)
        del buffer
        gc.collect()
        device.close()
        assert gpu.use_after_free == 0
        gc.collect()
        assert len(gpu.freed) == 1  # and not kept for as long as the push
        assert push.done()

    @given(data=st.data(), mapped=st.booleans())
    @settings(max_examples=150, deadline=None)
    def test_any_interleaving_gives_the_bytes_of_pushes_in_order(
        self, data: st.DataObject, mapped: bool
    ) -> None:
        gpu = FakeGpu()
        gpu.can_map = mapped
        staging, pages, stamp = np.zeros((6, 16), np.uint8), 6, 0
        with faked(gpu):
            device = Cuda(staging, 3)
            buffer, expected = device.buffer(pages), np.zeros((pages, 16), np.uint8)
            pins: list[tuple[Any, NDArray[np.int64]]] = []
            for step in data.draw(st.lists(st.sampled_from(["push", "run", "fill"]), max_size=40)):
                if step == "push":
                    slots = np.array(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
                    start = data.draw(st.integers(0, pages - slots.size))
                    pins.append((device.push(slots, buffer, start), slots))
                    expected[start : start + slots.size] = staging[slots]
                elif step == "run":
                    gpu.advance(data.draw(st.sampled_from(gpu.streams)))
                else:  # whatever no push still reads gets new bytes
                    pins = [(push, slots) for push, slots in pins if not push.sources_free()]
                    pinned = [slot for _, slots in pins for slot in slots]
                    stamp += 1
                    staging[np.setdiff1d(np.arange(6), pinned)] = stamp
            np.testing.assert_array_equal(device.to_host(buffer), expected)
            device.close()


class TestErrors:
    def test_no_cupy(self, monkeypatch: pytest.MonkeyPatch, staging: NDArray[np.uint8]) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)  # what makes an import fail
        with pytest.raises(GpuError, match=r"prefetchd\[cuda12\].*prefetchd\[cuda13\].*'host'"):
            Cuda(staging, 4)

    def test_no_gpu(self, gpu: FakeGpu, staging: NDArray[np.uint8]) -> None:
        gpu.cupy.cuda.runtime.getDeviceCount = lambda: 0
        with pytest.raises(GpuError, match=r"CUDA sees no device.*nvidia-smi"):
            Cuda(staging, 4)

    def test_out_of_memory_is_named(self, gpu: FakeGpu, staging: NDArray[np.uint8]) -> None:
        device = Cuda(staging, 4)
        gpu.allocation_status = 2
        with pytest.raises(GpuError, match=r"9 pages.*cudaErrorMemoryAllocation.*smaller"):
            device.buffer(9)
        device.close()

    def test_a_failed_push_is_never_taken_for_a_slow_one(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 4)
        push = device.push(one(1), device.buffer(1))
        gpu.event_status = 700
        for ask in (push.done, push.sources_free, push.wait):
            with pytest.raises(GpuError, match=r"cudaErrorIllegalAddress.*restart"):
                ask()

    def test_after_a_failed_launch_the_device_refuses(
        self, gpu: FakeGpu, staging: NDArray[np.uint8]
    ) -> None:
        device = Cuda(staging, 4)
        buffer = device.buffer(1)
        gpu.launch_error = "CUDA_ERROR_LAUNCH_FAILED: as told by the test"
        with pytest.raises(GpuError, match=r"pushing 1 pages failed: CUDA_ERROR_LAUNCH_FAILED"):
            device.push(one(1), buffer)
        gpu.launch_error = ""
        with pytest.raises(GpuError, match="an earlier push failed"):
            device.push(one(1), buffer)
        device.close()
        assert not gpu.registered

    @pytest.mark.parametrize("make", [Host, Cuda])
    @pytest.mark.parametrize("shape", [(16,), (4, 8, 8), (0, 16)])
    def test_staging_of_a_wrong_shape(self, make: type[Host | Cuda], shape: Any) -> None:
        with pytest.raises(ValueError, match="staging"):
            make(np.zeros(shape, np.uint8), 4)

    def test_streams_of_other_libraries(self) -> None:
        class Torch:
            cuda_stream = 11

        class Protocol:
            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, 12

        assert [stream_pointer(stream) for stream in (Torch(), Protocol(), 13)] == [11, 12, 13]
        with pytest.raises(TypeError, match="not a CUDA stream"):
            stream_pointer("default")
