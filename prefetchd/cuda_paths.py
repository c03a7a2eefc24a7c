"""The two ways in which the `cuda` device moves one batch, and the lanes that batches occupy.

Decides how bytes get from staging slots into GPU memory on a given stream. Refuses to know when a
batch may start, who waits for it, and which way is taken: that is the device's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Slots

THREADS = 256
# Four words a thread: 25 pages of 64 KiB become 100 blocks, so that reads of 64 KiB and more are in
# flight without taking every multiprocessor from the decode. Reckoned, not yet measured on a GPU.
WORDS_PER_THREAD = 4
WORD_BYTES = 16
GRID_Y_MAX = 65535
# cudaHostRegisterPortable | cudaHostRegisterMapped; CuPy has no names for them.
REGISTER_FLAGS = 1 | 2
REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly: what this process has mapped without writing

KERNEL = r"""
extern "C" __global__ void prefetchd_gather(const uint4* __restrict__ staging,
                                            const long long* __restrict__ slots,
                                            uint4* __restrict__ target, long long words)
{
    // One page a blockIdx.x; the blocks along y share its words.
    const uint4* from = staging + slots[blockIdx.x] * words;
    uint4* to = target + (long long)blockIdx.x * words;
    const long long stride = (long long)gridDim.y * blockDim.x;
    #pragma unroll 4
    for (long long word = (long long)blockIdx.y * blockDim.x + threadIdx.x; word < words;
         word += stride)
        to[word] = from[word];
}
"""


class PathError(Exception):
    """This path cannot be had here, and why."""


class Lane:
    """What one batch in flight occupies. `number` is the push that has it, or had it last."""

    __slots__ = ("event", "first", "holds", "index", "last", "number", "stream")

    def __init__(self, cupy: Any, index: int) -> None:
        self.index = index
        self.stream = cupy.cuda.Stream(non_blocking=True)
        # A waiting thread sleeps instead of spinning on a core that the decode could use.
        self.event = cupy.cuda.Event(block=True, disable_timing=True)
        self.number = -1
        self.first = self.last = 0  # the destination's addresses, end excluded
        self.holds: Any = None  # the destination, so that it is not freed under the copy


class Path:
    """`prepare` needs no order among batches, `send` does; both leave their work on the lane.

    The caller guarantees: slots in bounds, at most `batch_slots` of them, and a lane whose last
    batch is done.
    """

    words = ""
    reads_at_once = False
    """Whether the slots have been read when `prepare` returns."""

    def prepare(self, lane: Lane, slots: Slots) -> None:
        raise NotImplementedError

    def send(self, lane: Lane, count: int, target: Any) -> None:
        """Move the batch to `target`, a cupy.cuda.MemoryPointer."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the staging; every batch is done."""


class Mapped(Path):
    """One kernel a batch reads the registered staging in place, by slot numbers on the GPU."""

    words = "one gather kernel a batch over mapped staging"

    def __init__(self, cupy: Any, staging: NDArray[np.uint8], batch_slots: int, lanes: int) -> None:
        """Raises PathError, and whatever CuPy raises for lack of memory."""
        self._runtime = cupy.cuda.runtime
        self._address = staging.ctypes.data
        slot_bytes = staging.shape[1]
        if slot_bytes % WORD_BYTES or self._address % WORD_BYTES:
            raise PathError(f"slots of {slot_bytes} bytes are not all aligned to {WORD_BYTES}")
        self._words = np.int64(slot_bytes // WORD_BYTES)
        self._parts = min(GRID_Y_MAX, -(-int(self._words) // (THREADS * WORDS_PER_THREAD)))
        self._slots = [pinned(cupy, batch_slots * 8).view(np.int64) for _ in range(lanes)]
        self._sources = [array.ctypes.data for array in self._slots]
        self._indices = [device_array(cupy, (batch_slots,), np.int64) for _ in range(lanes)]
        self._kernel = _compiled(cupy)
        self._staging = self._register(cupy, staging)

    def _register(self, cupy: Any, staging: NDArray[np.uint8]) -> Any:
        """The staging as the GPU addresses it."""
        flags = REGISTER_FLAGS | (0 if staging.flags.writeable else REGISTER_READ_ONLY)
        try:
            self._runtime.hostRegister(self._address, staging.nbytes, flags)
        except self._runtime.CUDARuntimeError as error:
            raise PathError(f"CUDA did not register the staging ({error})") from error
        attributes = self._runtime.pointerGetAttributes(self._address)
        if not attributes.devicePointer:
            self._runtime.hostUnregister(self._address)
            raise PathError("the GPU cannot address registered host memory")
        memory = cupy.cuda.UnownedMemory(
            attributes.devicePointer, staging.nbytes, staging, cupy.cuda.Device().id
        )
        return cupy.cuda.MemoryPointer(memory, 0)

    def prepare(self, lane: Lane, slots: Slots) -> None:
        self._slots[lane.index][: slots.size] = slots
        self._runtime.memcpyAsync(
            self._indices[lane.index].data.ptr,
            self._sources[lane.index],
            slots.size * 8,
            self._runtime.memcpyHostToDevice,
            lane.stream.ptr,
        )

    def send(self, lane: Lane, count: int, target: Any) -> None:
        arguments = (self._staging, self._indices[lane.index], target, self._words)
        with lane.stream:
            self._kernel((count, self._parts), (THREADS,), arguments)

    def close(self) -> None:
        self._runtime.hostUnregister(self._address)


class Bounced(Path):
    """The host gathers a batch into pinned memory of the lane's; one copy takes it from there."""

    words = "one host gather and one copy a batch"
    reads_at_once = True

    def __init__(self, cupy: Any, staging: NDArray[np.uint8], batch_slots: int, lanes: int) -> None:
        self._runtime = cupy.cuda.runtime
        self._staging = staging
        slot_bytes = staging.shape[1]
        self._pages = [
            pinned(cupy, batch_slots * slot_bytes).reshape(batch_slots, slot_bytes)
            for _ in range(lanes)
        ]
        self._sources = [array.ctypes.data for array in self._pages]

    def prepare(self, lane: Lane, slots: Slots) -> None:
        self._staging.take(slots, 0, self._pages[lane.index][: slots.size], "clip")

    def send(self, lane: Lane, count: int, target: Any) -> None:
        self._runtime.memcpyAsync(
            target.ptr,
            self._sources[lane.index],
            count * self._staging.shape[1],
            self._runtime.memcpyHostToDevice,
            lane.stream.ptr,
        )


def pinned(cupy: Any, size: int) -> NDArray[np.uint8]:
    """`size` bytes of page-locked host memory."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)


def device_array(cupy: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A cupy.ndarray over memory straight from cudaMalloc, not cleared.

    CuPy's pool hands out memory that work queued on the caller's stream may still use, which is
    safe on that stream only; the device's are others.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
    return cupy.ndarray(shape, dtype, memptr=memory)


def _compiled(cupy: Any) -> Any:
    """The kernel, compiled now so that a missing compiler shows at open."""
    kernel = cupy.RawKernel(KERNEL, "prefetchd_gather")
    try:
        kernel.compile()
    except Exception as error:  # without NVRTC the class differs between versions of CuPy
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}"
        raise PathError(f"the gather kernel did not compile ({reason})") from error
    return kernel
