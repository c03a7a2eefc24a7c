"""A stand-in for the part of CuPy that the `cuda` device calls: a double of control flow only.

Work is queued and runs when `advance` or `drain` says so, or when something synchronises; copies
read their source at that moment, so memory that is reused too early shows as wrong bytes. It says
nothing about CUDA itself: no caches, no alignment, no speed.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ERRORS = {
    2: "cudaErrorMemoryAllocation",
    700: "cudaErrorIllegalAddress",
    801: "cudaErrorNotSupported",
}


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
        self.gpu.drain(lambda: not self.queue)
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
        self.gpu.drain(lambda: ticket.done)
        if self.gpu.event_status:
            raise CUDARuntimeError(self.gpu.event_status)
        assert ticket.done, "this synchronize would never return"


class Memory:
    def __init__(self, gpu: FakeGpu, size: int) -> None:
        self.gpu, self.ptr, self.size = gpu, 0, size
        if gpu.allocation_status:
            raise CUDARuntimeError(gpu.allocation_status)
        array = np.full(size, 0xA5, np.uint8)  # what the last owner left
        gpu.allocations.append(array)  # kept, so that a late write harms nobody
        self.ptr = array.ctypes.data

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
    flags = SimpleNamespace(c_contiguous=True)

    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: MemoryPointer) -> None:
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), memptr
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize


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
    id = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def asnumpy(array: Array) -> Any:
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.data.ptr)
    return np.frombuffer(raw, array.dtype).reshape(array.shape).copy()


class FakeGpu:
    """The state behind one `cupy` stand-in; `cupy` is what goes into sys.modules."""

    def __init__(self) -> None:
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

    def _runtime(self) -> Any:
        def host_register(address: int, size: int, flags: int) -> None:
            assert flags == 3  # portable and mapped
            if self.register_status:
                raise CUDARuntimeError(self.register_status)
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
            getDeviceProperties=lambda _: {"name": b"Fake GPU"},
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
        yield gpu
