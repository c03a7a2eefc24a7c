"""The `host` device: the contract of a GPU device in ordinary memory, for CPU inference and tests.

Decides nothing; a push is one gather, finished when the call returns. The bounds of a push are
checked here for every GPU device, before a byte moves.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd.gpu import GpuDevice, GpuError, Push
from prefetchd.model import Slots


class Done(Push):
    """A push with nothing left to do."""

    def sources_free(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def order(self, stream: Any) -> None:
        return


DONE = Done()


def check_staging(staging: NDArray[np.uint8], batch_slots: int) -> None:
    """Raises ValueError unless `staging` is (slots, slot_bytes), uint8, C order, and not empty."""
    if staging.ndim != 2 or staging.dtype != np.uint8 or not staging.flags.c_contiguous:
        raise ValueError(
            "the staging must be a C-contiguous uint8 array of shape (slots, slot_bytes); "
            f"this one has shape {staging.shape}, dtype {staging.dtype}"
        )
    if not staging.size or batch_slots < 1:
        raise ValueError(
            f"a staging of shape {staging.shape} with batches of {batch_slots} slots moves nothing"
        )


def check_push(
    slots: Slots, start: int, pages: int, *, staging_slots: int, batch_slots: int
) -> int:
    """Check one push into a destination of `pages` pages and return its number of slots.

    Raises ValueError for a slot outside the staging, a batch that is too large, or a destination
    range that is not wholly inside the buffer.
    """
    if slots.dtype != np.int64 or slots.ndim != 1:
        raise ValueError(f"slots must be 1-d int64, not {slots.ndim}-d {slots.dtype}")
    count = slots.size
    if count > batch_slots:
        raise ValueError(f"{count} slots in one push; this device was opened for {batch_slots}")
    if start < 0 or start + count > pages:
        raise ValueError(
            f"pages {start} to {start + count} are not inside a destination of {pages} pages"
        )
    # Read as unsigned, a negative slot is a huge one: one reduction checks both ends.
    if count and slots.view(np.uint64).max() >= staging_slots:
        outside = slots[(slots < 0) | (slots >= staging_slots)]
        raise ValueError(f"slot {outside[0]} is outside the staging of {staging_slots} slots")
    return count


class Host(GpuDevice):
    """Gathers into numpy arrays. Any thread may push; a push is done when it returns."""

    name: ClassVar[str] = "host"
    engine = "host memory, one gather a batch"

    def __init__(self, staging: NDArray[np.uint8], batch_slots: int) -> None:
        check_staging(staging, batch_slots)
        super().__init__(staging, batch_slots)
        self._closed = False

    def buffer(self, pages: int) -> NDArray[np.uint8]:
        """A destination of shape (pages, slot_bytes), uint8, zeroed."""
        return np.zeros((pages, self.staging.shape[1]), np.uint8)

    def push(self, slots: Slots, buffer: Any, start: int = 0, *, after: Any = None) -> Push:
        """Gather at once. Memory has no streams, so `after` asks for nothing here.

        Raises ValueError before anything is written, GpuError after `close`.
        """
        if self._closed:
            raise GpuError("the host device is closed; open another one to push")
        staging_slots, slot_bytes = self.staging.shape
        if (
            not isinstance(buffer, np.ndarray)
            or buffer.shape[1:] != (slot_bytes,)
            or buffer.dtype != np.uint8
            or not buffer.flags.c_contiguous
        ):
            raise ValueError(
                f"the destination must be a C-contiguous uint8 numpy array of shape (pages, "
                f"{slot_bytes}), as from buffer(); np.asarray(tensor) shares a CPU tensor's memory"
            )
        count = check_push(
            slots,
            start,
            len(buffer),
            staging_slots=staging_slots,
            batch_slots=self.batch_slots,
        )
        if count:
            # mode="raise" would gather into a temporary and copy it: three times the time. The
            # bounds are checked above, so clipping never changes a slot.
            self.staging.take(slots, 0, buffer[start : start + count], "clip")
        return DONE

    def to_host(self, buffer: Any) -> NDArray[np.uint8]:
        """A copy of the buffer."""
        return np.array(buffer, np.uint8)

    def close(self) -> None:
        """Refuse further pushes; all earlier ones are done."""
        self._closed = True
