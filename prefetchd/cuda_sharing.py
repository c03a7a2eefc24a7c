"""Buffers that another process may write into, by CUDA's IPC handles: lent by one, borrowed by one.

Decides what is exported, how long its memory stays, and that a borrowed buffer is as large as was
said. Refuses to know who lends to whom, and when.

A handle stands for the whole allocation behind an address, and cudaMalloc cuts small allocations
out of blocks of 2 MiB: so a buffer that is lent has whole blocks of its own, and whoever opens its
handle sees nothing else (CUDA C Programming Guide, "Interprocess Communication").
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from prefetchd.gpu import Borrowed, GpuError, Lent

BLOCK_BYTES = 2 << 20
HANDLE_BYTES = 64


class CudaLent(Lent):
    """Holds the memory, beside whoever uses it: it outlives its users and its borrower."""

    def __init__(self, handle: bytes, pages: int, memory: Any, users: _Users) -> None:
        self.handle = handle
        self.pages = pages
        self.address = int(memory.ptr)
        self._memory = memory
        self._users = weakref.ref(users)

    @property
    def is_used(self) -> bool:
        return self._users() is not None


class _Users:
    """Kept alive by every array over the memory, also by those of other libraries."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory: Any) -> None:
        self._memory = memory


class CudaBorrowed(Borrowed):
    """May be closed in another thread than it was opened in."""

    def __init__(self, cupy: Any, buffer: Any, address: int, end: int) -> None:
        self.buffer = buffer
        self.address, self.end = address, end
        self._cupy = cupy
        self._ordinal = cupy.cuda.runtime.getDevice()

    def close(self) -> None:
        address, self.address, self.end = self.address, 0, 0
        if not address:
            return
        runtime = self._cupy.cuda.runtime
        try:
            with self._cupy.cuda.Device(self._ordinal):
                runtime.ipcCloseMemHandle(address)
        except runtime.CUDARuntimeError as error:
            raise GpuError(f"a borrowed buffer could not be given back: {error}") from error


def lend(cupy: Any, pages: int, slot_bytes: int) -> tuple[Any, CudaLent]:
    """A buffer on the current GPU, not cleared, and what another process needs of it. Raises what
    CuPy raises."""
    size = pages * slot_bytes
    memory = cupy.cuda.Memory(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
    handle = cupy.cuda.runtime.ipcGetMemHandle(memory.ptr)
    users = _Users(memory)
    array = _array(cupy, memory.ptr, pages, slot_bytes, users)
    return array, CudaLent(handle, pages, memory, users)


def borrow(cupy: Any, handle: bytes, pages: int, slot_bytes: int) -> CudaBorrowed:
    """Another process's buffer, as an array. Raises GpuError if it cannot be had, ValueError if it
    is smaller than it was said to be."""
    runtime = cupy.cuda.runtime
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    try:
        address = int(runtime.ipcOpenMemHandle(handle))
    except runtime.CUDARuntimeError as error:
        raise GpuError(
            f"the buffer's handle cannot be opened: {error}. Its process must be alive and see the "
            "same GPU; containers have to share IPC and PID namespaces"
        ) from error
    try:
        base, size = allocation(address)
        if address + pages * slot_bytes > base + size:
            raise ValueError(
                f"{pages} pages of {slot_bytes} bytes do not fit the buffer of {size} bytes"
            )
        buffer = _array(cupy, address, pages, slot_bytes, None)
        return CudaBorrowed(cupy, buffer, base, base + size)
    except BaseException:
        runtime.ipcCloseMemHandle(address)
        raise


def _array(cupy: Any, address: int, pages: int, slot_bytes: int, owner: Any) -> Any:
    memory = cupy.cuda.UnownedMemory(
        address, pages * slot_bytes, owner, cupy.cuda.runtime.getDevice()
    )
    return cupy.ndarray((pages, slot_bytes), "u1", memptr=cupy.cuda.MemoryPointer(memory, 0))


def gpu_identity(runtime: Any, ordinal: int) -> str:
    """What one GPU, or one MIG instance of it, is called in every process. Ordinals are not: they
    depend on CUDA_VISIBLE_DEVICES."""
    uuid = runtime.getDeviceProperties(ordinal).get("uuid", b"")
    uuid = uuid.get("bytes", b"") if isinstance(uuid, dict) else uuid
    return f"{runtime.deviceGetPCIBusId(ordinal)} {bytes(uuid).hex()}"


def allocation(address: int) -> tuple[int, int]:
    """Base and size of the allocation at an address, from the driver; CuPy has no call for it.
    Raises GpuError."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    except (OSError, AttributeError) as error:
        raise GpuError(f"the size of a buffer cannot be told: {error}") from error
    status = ask(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if status:
        raise GpuError(f"the size of a buffer cannot be told: CUDA's driver says {status}")
    return base.value, size.value
