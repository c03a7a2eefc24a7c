"""The `cuda` device: staged pages gathered into GPU memory with CuPy, on streams of its own.

Decides when a batch may start and what it holds until it is done, and which path batches take; the
paths are in `cuda_paths`. It knows nothing of pages and pins, and of the caller's streams only what
`order` and `after` name.

Two *lanes* take turns, so that the host prepares one batch while the other moves. A lane is reused
only when its event is done. Batches whose destinations overlap run in the order of their pushes;
others may run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.cuda_paths import WORD_BYTES, Bounced, Lane, Mapped, Path, PathError, device_array
from prefetchd.cuda_sharing import borrow, gpu_identity, lend
from prefetchd.devices.host import DONE, check_push, check_staging
from prefetchd.gpu import Borrowed, GpuDevice, GpuError, Lent, Push
from prefetchd.model import Slots

LANES = 2
NOT_READY = 600  # cudaErrorNotReady

NO_CUPY = (
    "The device 'cuda' needs CuPy, which cannot be imported ({error}). Install it for the CUDA "
    "version that nvidia-smi shows: pip install 'prefetchd[cuda12]' or 'prefetchd[cuda13]'; "
    "or use the device 'host'."
)
NO_GPU = (
    "The device 'cuda' needs an NVIDIA GPU and its driver: {error}. If nvidia-smi lists a GPU, "
    "take the CuPy of its CUDA version (prefetchd[cuda12] or prefetchd[cuda13]), and in a "
    "container pass the GPU in; or use the device 'host'."
)


class CudaPush(Push):
    """A batch on a lane. Its methods may be called from any thread and raise GpuError."""

    __slots__ = ("_device", "_lane", "_number")

    def __init__(self, device: Cuda, lane: Lane) -> None:
        self._device = device
        self._lane = lane
        self._number = lane.number

    def sources_free(self) -> bool:
        """Whether the slots have been read; on the mapped path that is when the pages arrive."""
        return self._device.path.reads_at_once or self.done()

    def done(self) -> bool:
        # A lane goes to a later push only when its event is done.
        return self._lane.number != self._number or self._device.event_done(self._lane.event)

    def wait(self) -> None:
        with self._device.errors("waiting for a push"):
            if self._lane.number == self._number:
                self._lane.event.synchronize()

    def order(self, stream: Any) -> None:
        """Make `stream` wait: a CuPy or PyTorch stream, or a cudaStream_t as an integer."""
        pointer = stream_pointer(stream)
        with self._device.errors("ordering a stream behind a push"):
            if self._lane.number == self._number:
                self._device.runtime.streamWaitEvent(pointer, self._lane.event.ptr)


class Cuda(GpuDevice):
    """Pushes to the GPU that is current when the device is opened.

    One thread at a time may push. The staging must stay allocated until `close`, and must not be
    CUDA's own memory: allocate it first, register it with io_uring before or after, as you like.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, staging: NDArray[np.uint8], batch_slots: int) -> None:
        check_staging(staging, batch_slots)
        super().__init__(staging, batch_slots)
        self._cupy = _import_cupy()
        self.runtime = self._cupy.cuda.runtime
        self._gpu = self._cupy.cuda.Device()
        self._slot_bytes = staging.shape[1]
        self._pushes = 0
        self._refusal = ""
        with self.errors("opening the device 'cuda'"), self._gpu:
            name = self.runtime.getDeviceProperties(self._gpu.id)["name"].decode()
            self._lanes = [Lane(self._cupy, index) for index in range(LANES)]
            self._after = self._cupy.cuda.Event(disable_timing=True)
            self.path = self._choose_path()
            self.identity = gpu_identity(self.runtime, self._gpu.id)
            self.engine = f"{name}, {self.path.words}, {LANES} streams"

    def _choose_path(self) -> Path:
        try:
            return Mapped(self._cupy, self.staging, self.batch_slots, LANES)
        except PathError as error:
            self.notes = (f"{error}: the host gathers each batch into pinned memory first",)
            return Bounced(self._cupy, self.staging, self.batch_slots, LANES)

    def buffer(self, pages: int) -> Any:
        """A zeroed cupy.ndarray; torch.from_dlpack(buffer) shares it with PyTorch."""
        with self.errors(f"allocating {pages} pages of {self._slot_bytes} bytes"), self._gpu:
            return self._zeroed(device_array(self._cupy, (pages, self._slot_bytes), np.uint8))

    def _zeroed(self, array: Any) -> Any:
        if array.nbytes:  # the memory may hold what another tenant left
            stream = self._lanes[0].stream
            self.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, stream.ptr)
            stream.synchronize()
        return array

    def current(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self._gpu.id)
        return device

    def lend(self, pages: int) -> tuple[Any, Lent]:
        with self.errors(f"allocating {pages} pages of {self._slot_bytes} bytes"), self._gpu:
            array, lent = lend(self._cupy, pages, self._slot_bytes)
            return self._zeroed(array), lent

    def place_in(self, lent: Lent, buffer: Any) -> int | None:
        rows = self._check_buffer(buffer)
        row, rest = divmod(buffer.data.ptr - lent.address, self._slot_bytes)
        inside = not rest and row >= 0 and row + rows <= lent.pages
        return int(row) if inside else None

    def borrow(self, handle: bytes, pages: int) -> Borrowed:
        with self.errors("borrowing a buffer"), self._gpu:
            return borrow(self._cupy, handle, pages, self._slot_bytes)

    def push(self, slots: Slots, buffer: Any, start: int = 0, *, after: Any = None) -> Push:
        """Start one gather; blocks only while the lane it needs is busy.

        Nothing in CUDA holds the gather back while kernels of the caller's still read what was in
        the destination before. Where they may, name their stream as `after`: the gather starts
        behind the work that is on it now. Raises ValueError before anything is written, GpuError
        when CUDA fails or the device is closed.
        """
        if self._refusal:
            raise GpuError(self._refusal)
        count = check_push(
            slots,
            start,
            self._check_buffer(buffer),
            staging_slots=len(self.staging),
            batch_slots=self.batch_slots,
        )
        if not count:
            return DONE
        pointer = None if after is None else stream_pointer(after)
        # A failure in between leaves work on the lane that no event covers.
        self._refusal = "an earlier push failed on the device 'cuda': close it and open another one"
        with self.errors(f"pushing {count} pages"), self._gpu:
            target = buffer.data + start * self._slot_bytes
            lane = self._take_lane(buffer, target.ptr, count)
            self.path.prepare(lane, slots)
            self._hold_back(lane, pointer)
            self.path.send(lane, count, target)
            lane.event.record(lane.stream)
        self._refusal = ""
        return CudaPush(self, lane)

    def _check_buffer(self, buffer: Any) -> int:
        """The number of pages in a destination. Raises ValueError if it is none for this device."""
        if (
            not isinstance(buffer, self._cupy.ndarray)
            or buffer.shape[1:] != (self._slot_bytes,)
            or buffer.dtype != np.uint8
            or not buffer.flags.c_contiguous
            or (not self.path.reads_at_once and buffer.data.ptr % WORD_BYTES)
        ):
            raise ValueError(
                f"the destination must be a C-contiguous uint8 cupy.ndarray of shape (pages, "
                f"{self._slot_bytes}), aligned to {WORD_BYTES} bytes, as from buffer(); "
                "cupy.from_dlpack(tensor), called once, shares a tensor's memory"
            )
        if buffer.data.device_id != self._gpu.id:
            raise ValueError(
                f"the destination is on GPU {buffer.data.device_id}, this device on GPU "
                f"{self._gpu.id}"
            )
        return int(buffer.shape[0])

    def _take_lane(self, buffer: Any, address: int, count: int) -> Lane:
        lane = self._lanes[self._pushes % LANES]
        lane.event.synchronize()
        lane.number = self._pushes
        self._pushes += 1
        lane.holds = buffer
        lane.first = address
        lane.last = address + count * self._slot_bytes
        return lane

    def _hold_back(self, lane: Lane, after: int | None) -> None:
        """Order the batch behind the other lane's, if it writes there too, and behind `after`."""
        for other in self._lanes:
            if other is not lane and other.first < lane.last and lane.first < other.last:
                lane.stream.wait_event(other.event)
        if after is not None:
            self.runtime.eventRecord(self._after.ptr, after)
            lane.stream.wait_event(self._after)

    def to_host(self, buffer: Any) -> NDArray[np.uint8]:
        with self.errors("copying a buffer to the host"), self._gpu:
            for lane in self._lanes:
                lane.stream.synchronize()
            array: NDArray[np.uint8] = self._cupy.asnumpy(buffer)
            return array

    def close(self) -> None:
        """Wait for all pushes and unregister the staging. Raises GpuError if one has failed."""
        if not self._lanes:
            return
        self._refusal = "the device 'cuda' is closed: open another one"
        lanes, self._lanes = self._lanes, []
        with self.errors("closing the device 'cuda'"), self._gpu:
            try:
                for lane in lanes:
                    lane.stream.synchronize()
                    lane.holds = None
            finally:
                self.path.close()

    def event_done(self, event: Any) -> bool:
        """Whether the work before the event is done. Raises GpuError if that work failed."""
        # CuPy's Event.done takes a failed event for one that is not ready, for ever.
        status = self.runtime.eventQuery(event.ptr)
        if status in (0, NOT_READY):
            return bool(status == 0)
        with self.errors("asking for a push"):
            raise self.runtime.CUDARuntimeError(status)

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turn CuPy's errors into GpuError; kernel launches raise the driver's, all else not."""
        kinds = (self.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        try:
            yield
        except kinds as error:
            raise GpuError(f"{doing} failed: {error}. {_remedy(str(error))}") from error


def stream_pointer(stream: Any) -> int:
    """The cudaStream_t behind a stream of CuPy's, PyTorch's or another library's."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):  # the protocol of CUDA's Python packages
        return int(stream.__cuda_stream__()[1])
    for attribute in ("ptr", "cuda_stream"):  # CuPy, PyTorch
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(
        f"{type(stream).__name__} is not a CUDA stream: pass a CuPy or PyTorch stream, or a "
        "cudaStream_t as an integer"
    )


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise GpuError(NO_CUPY.format(error=error)) from error
    try:
        gpus = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise GpuError(NO_GPU.format(error=error)) from error
    if not gpus:
        raise GpuError(NO_GPU.format(error="CUDA sees no device"))
    return cupy


def _remedy(error: str) -> str:
    if "MEMORY" in error.upper():
        return "Take smaller buffers or batches, or free memory on the GPU or the host."
    return "After most errors CUDA refuses all work: close the device and restart the process."
