"""The contract of a GPU device: staged pages in, pages in a buffer of the GPU's out.

A GPU device gathers slots of the staging arena into a destination buffer in one batch and tells
when they have arrived. It decides nothing and keeps no page: the caller pins the slots until the
push says that they were read. `host` keeps the same contract in ordinary memory.
"""

from __future__ import annotations

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


class GpuDevice:
    """Base class of GPU devices, over one staging array of shape (slots, slot_bytes), uint8."""

    name: ClassVar[str] = ""
    engine: str = ""
    notes: tuple[str, ...] = ()

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

    def to_host(self, buffer: Any) -> NDArray[np.uint8]:
        """The buffer's bytes as a numpy array (for checks; waits for all pushes)."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for all pushes and let go of everything."""
        raise NotImplementedError
