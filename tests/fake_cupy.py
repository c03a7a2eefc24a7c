"""A stand-in for the part of CuPy that the `cuda` device calls: a double of control flow only.

Work is queued and runs when `advance` or `drain` says so, or when something synchronises; copies
read their source at that moment, so memory that is reused too early shows as wrong bytes. It says
nothing about CUDA itself: no caches, no alignment, no speed.

GPU memory is a memfd, so that an IPC handle maps it once more, at another address, in this process
or in another one. Mappings stay when they are closed, so that a late write harms nobody; it is
counted in `use_after_free`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ERRORS = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    700: "cudaErrorIllegalAddress",
    801: "cudaErrorNotSupported",
}


SIZES: dict[int, int] = {}
"""Of all that was ever allocated or mapped, by address."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{ERRORS[status]}: as told by the test")


class CUDADriverError(RuntimeError):
    pass


class Stream:
    def __init__(self, gpu: FakeGpu, *, non_blocking: bool = False) -> None:
        assert non_blocking, "a blocking stream would wait for the default stream"
        gpu.streams.append(self)
        self.gpu = gpu
        self.ptr = len(gpu.streams)
        self.queue: deque[Any] = deque()

    def __enter__(self) -> None:
        self.gpu.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.gpu.current.pop()

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.ticket)

    def synchronize(self) -> None:
        self.gpu.wait(lambda: not self.queue)
        assert not self.queue, "this synchronize would never return"


class Ticket:
    """One recording of an event: done when its stream has come to it."""

    done = False

    def run(self) -> None:
        self.done = True


class Event:
    def __init__(self, gpu: FakeGpu, *, block: bool = False, disable_timing: bool = False) -> None:
        self.gpu = gpu
        self.ptr = 1000 + len(gpu.events)
        gpu.events[self.ptr] = self
        self.ticket = Ticket()
        self.ticket.done = True  # an event never recorded has nothing to wait for

    def record(self, stream: Stream) -> None:
        self.ticket = Ticket()
        stream.queue.append(self.ticket.run)

    def synchronize(self) -> None:
        ticket = self.ticket
        self.gpu.host_waits += not ticket.done
        self.gpu.wait(lambda: ticket.done)
        if self.gpu.event_status:
            raise CUDARuntimeError(self.gpu.event_status)
        assert ticket.done, "this synchronize would never return"


class Memory:
    def __init__(self, gpu: FakeGpu, size: int) -> None:
        self.gpu, self.ptr, self.size = gpu, 0, size
        if gpu.allocation_status:
            raise CUDARuntimeError(gpu.allocation_status)
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, size)
        self.ptr = gpu.map(fd, size)
        ctypes.memset(self.ptr, 0xA5, size)  # what the last owner left
        gpu.descriptors[self.ptr] = fd
        weakref.finalize(self, os.close, fd)

    def __del__(self) -> None:
        if self.ptr:
            self.gpu.freed.append((self.ptr, self.size))


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class MemoryPointer:
    device_id = 0

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


class Array:
    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer) -> None:
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), memptr
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.strides: tuple[int, ...] | None = None

    def numpy(self) -> Any:
        """Its bytes in place."""
        rows = self.strides[0] * self.shape[0] if self.strides else self.nbytes
        raw = (ctypes.c_uint8 * max(rows, self.nbytes)).from_address(self.data.ptr)
        return np.ndarray(self.shape, self.dtype, raw, 0, self.strides)

    @property
    def flags(self) -> Any:
        return SimpleNamespace(c_contiguous=self.numpy().flags.c_contiguous)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        part = self.numpy()[index]
        found = Array(part.shape, self.dtype, self.data + (part.ctypes.data - self.data.ptr))
        found.strides = part.strides
        return found


class RawKernel:
    """Gathers as the real kernel is meant to, whatever its source says."""

    def __init__(self, gpu: FakeGpu, code: str, name: str) -> None:
        assert f"void {name}(" in code
        self.gpu = gpu

    def compile(self) -> None:
        if self.gpu.compile_error:
            raise RuntimeError(self.gpu.compile_error)

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        if self.gpu.launch_error:
            raise CUDADriverError(self.gpu.launch_error)
        staging, slots, target, words = arguments
        assert words.dtype == np.int64
        size = int(words) * 16
        # Plain addresses, as in a real launch: the queue keeps no memory alive.
        source, numbers, begin = staging.ptr, slots.data.ptr, target.ptr

        def run() -> None:
            for page in range(grid[0]):
                slot = ctypes.c_int64.from_address(numbers + 8 * page).value
                self.gpu.copy(begin + page * size, source + slot * size, size)

        self.gpu.launches += 1
        self.gpu.current[-1].queue.append(run)


class Device:
    def __init__(self, ordinal: int = 0) -> None:
        self.id = ordinal

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def asnumpy(array: Array) -> Any:
    return array.numpy().copy()


class FakeGpu:
    """The state behind one `cupy` stand-in; `cupy` is what goes into sys.modules.

    While `may_finish` is not set, nothing that is waited for ends.
    """

    def __init__(self, uuid: bytes = b"one") -> None:
        self.uuid = uuid
        self.lock = threading.RLock()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.waited_for = threading.Event()
        """Set when something is waited for."""
        self.descriptors: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.borrowed: list[int] = []
        self.flags: list[int] = []
        self.read_only_status = self.handle_status = 0
        self.streams: list[Any] = []
        self.events: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.register_status = self.event_status = self.allocation_status = 0
        self.launch_error = self.compile_error = ""
        self.can_map = True
        self.host_waits = 0
        self.launches = 0
        self.allocations: list[Any] = []
        self.freed: list[tuple[int, int]] = []
        self.use_after_free = 0
        self.current: list[Any] = []
        self.cupy = self._module()

    def map(self, fd: int, size: int) -> int:
        if not size:
            return 0
        array = np.frombuffer(mmap.mmap(fd, size), np.uint8)
        self.allocations.append(array)  # kept, so that a late write harms nobody
        address = int(array.ctypes.data)
        self.mapped[address] = SIZES[address] = size
        return address

    def wait(self, done: Callable[[], bool]) -> None:
        if not done():
            self.waited_for.set()
            assert self.may_finish.wait(30)
        with self.lock:
            self.drain(done)

    @staticmethod
    def allocation(address: int) -> tuple[int, int]:
        """Base and size, of whichever GPU."""
        return address, SIZES[address]

    def advance(self, stream: Any) -> bool:
        """Run one operation of a stream; false if there is none, or it waits for an event."""
        if not stream.queue:
            return False
        head = stream.queue[0]
        if isinstance(head, Ticket):  # the stream waits for it
            if not head.done:
                return False
        else:
            head()
        stream.queue.popleft()
        return True

    def drain(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run streams, the last one first, until nothing can run or `until` holds."""
        while not until() and any(self.advance(stream) for stream in self.streams[::-1]):
            pass

    def copy(self, target: int, source: int, size: int) -> None:
        for begin, length in self.freed:
            self.use_after_free += begin < target + size and target < begin + length
        ctypes.memmove(target, source, size)

    def _module(self) -> Any:
        cuda = SimpleNamespace(
            Stream=partial(Stream, self),
            Event=partial(Event, self),
            Memory=partial(Memory, self),
            UnownedMemory=UnownedMemory,
            MemoryPointer=MemoryPointer,
            Device=Device,
            alloc_pinned_memory=bytearray,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            runtime=self._runtime(),
        )
        kernel = partial(RawKernel, self)
        return SimpleNamespace(cuda=cuda, ndarray=Array, RawKernel=kernel, asnumpy=asnumpy)

    def _handle(self, address: int) -> bytes:
        if self.handle_status:
            raise CUDARuntimeError(self.handle_status)
        fd, size = self.descriptors[address], self.mapped[address]
        assert size % (2 << 20) == 0, "others' allocations would be exported, too"
        return struct.pack("<8sqqq32x", b"fake-gpu", os.getpid(), fd, size)

    def _open(self, handle: bytes) -> int:
        name, pid, fd, size = struct.unpack("<8sqqq32x", handle)
        if name != b"fake-gpu":
            raise CUDARuntimeError(1)
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            address = self.map(opened, size)
        finally:
            os.close(opened)
        self.borrowed.append(address)
        return address

    def _close(self, address: int) -> None:
        self.borrowed.remove(address)
        self.freed.append((address, self.mapped[address]))

    def _runtime(self) -> Any:
        def host_register(address: int, size: int, flags: int) -> None:
            assert flags & ~8 == 3  # portable and mapped, maybe read-only
            self.flags.append(flags)
            if status := self.register_status or (flags & 8 and self.read_only_status):
                raise CUDARuntimeError(status)
            assert address not in self.registered
            self.registered[address] = size

        def stream(pointer: int) -> Any:
            return self.streams[pointer - 1]

        def memcpy_async(target: int, source: int, size: int, kind: int, pointer: int) -> None:
            assert kind == 1  # host to device
            stream(pointer).queue.append(lambda: self.copy(target, source, size))

        def memset_async(target: int, value: int, size: int, pointer: int) -> None:
            stream(pointer).queue.append(lambda: ctypes.memset(target, value, size))

        def event_query(pointer: int) -> int:
            return self.event_status or (0 if self.events[pointer].ticket.done else 600)

        return SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            memcpyHostToDevice=1,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda _: {"name": b"Fake GPU", "uuid": self.uuid},
            getDevice=lambda: 0,
            deviceGetPCIBusId=lambda _: "0000:65:00.0",
            ipcGetMemHandle=self._handle,
            ipcOpenMemHandle=self._open,
            ipcCloseMemHandle=self._close,
            hostRegister=host_register,
            hostUnregister=self.registered.pop,
            pointerGetAttributes=lambda address: SimpleNamespace(
                devicePointer=address if self.can_map else 0
            ),
            memcpyAsync=memcpy_async,
            memsetAsync=memset_async,
            eventQuery=event_query,
            eventRecord=lambda event, pointer: self.events[event].record(stream(pointer)),
            streamWaitEvent=lambda pointer, event: stream(pointer).wait_event(self.events[event]),
        )


@contextmanager
def faked(gpu: FakeGpu) -> Iterator[FakeGpu]:
    """`import cupy` gives this GPU's stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", gpu.cupy)
        patch.setattr("prefetchd.cuda_sharing.allocation", gpu.allocation)
        yield gpu
