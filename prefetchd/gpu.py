"""The contract of a GPU device: staged pages in, pages in a buffer of the GPU's out.

A GPU device gathers slots of the staging arena into a destination buffer in one batch and tells
when they have arrived. It decides nothing and keeps no page: the caller pins the slots until the
push says that they were read. `host` keeps the same contract in ordinary memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Slots


class GpuError(Exception):
    """A GPU cannot be had as asked: what, why and what to do, in one message."""


class Push:
    """One batch on its way to the GPU."""

    def sources_free(self) -> bool:
        """Whether the slots have been read, so that their pins may go."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether the pages are in the destination."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block the calling thread until `done`."""
        raise NotImplementedError

    def order(self, stream: Any) -> None:
        """Make a stream of the caller's wait for this push, without blocking the thread."""
        raise NotImplementedError


class Lent:
    """A buffer of this process that another one may write into. Keep it until the other has given
    the buffer back: its memory is freed with it."""

    handle: bytes
    """By which the other process opens it."""
    pages: int
    address: int
    """Where it begins, in this process."""

    @property
    def is_used(self) -> bool:
        """Whether anybody in this process still has the buffer."""
        raise NotImplementedError


class Borrowed:
    """A buffer of another process, in this one's address space."""

    buffer: Any
    """A destination for `push`."""
    address: int
    end: int
    """Of the memory as it is mapped here; `end` is the first address behind it."""
    owner: object = None
    """For whom it was opened."""

    def close(self) -> None:
        """Give it back; no push into it may be under way. Harmless when repeated. Raises
        GpuError."""
        raise NotImplementedError


class GpuDevice:
    """Base class of GPU devices, over one staging array of shape (slots, slot_bytes), uint8."""

    name: ClassVar[str] = ""
    engine: str = ""
    notes: tuple[str, ...] = ()
    identity: str = ""
    """Which GPU it is, in every process the same; empty: buffers cannot be lent."""

    def __init__(self, staging: NDArray[np.uint8], batch_slots: int) -> None:
        """Prepare pushes of at most `batch_slots` pages each. Raises GpuError."""
        self.staging = staging
        self.batch_slots = batch_slots

    def buffer(self, pages: int) -> Any:
        """A destination of shape (pages, slot_bytes), uint8, in the GPU's memory."""
        raise NotImplementedError

    def push(self, slots: Slots, buffer: Any, start: int = 0, *, after: Any = None) -> Push:
        """Gather `slots` into `buffer[start : start + len(slots)]`. Does not wait for arrival.

        `after`: a stream of the caller's whose work so far may still read the buffer. One thread
        pushes at a time; a push may block while all lanes are busy. Raises ValueError for slots
        or rows out of range, or more than `batch_slots` pages, before a byte moves.
        """
        raise NotImplementedError

    def current(self) -> AbstractContextManager[Any]:
        """While it lasts, a device that this thread opens is on the same GPU."""
        return nullcontext()

    def lend(self, pages: int) -> tuple[Any, Lent]:
        """As `buffer`, for another process to push into. Raises GpuError."""
        raise GpuError(f"the device {self.name!r} has no buffers that another process can write")

    def place_in(self, lent: Lent, buffer: Any) -> int | None:
        """At which row of a buffer that was lent this one begins; None if it is none of it, or lies
        across rows. Raises ValueError for what is no destination."""
        raise NotImplementedError

    def borrow(self, handle: bytes, pages: int) -> Borrowed:
        """Another process's buffer. Raises GpuError, and ValueError if it is not that large."""
        raise GpuError(f"the device {self.name!r} cannot write buffers of other processes")

    def to_host(self, buffer: Any) -> NDArray[np.uint8]:
        """The buffer's bytes as a numpy array (for checks; waits for all pushes)."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for all pushes and let go of everything."""
        raise NotImplementedError
