"""Between a driver and its device: whether what is queued may begin now.

Decides nothing here: everything may begin as soon as the device has room. Whoever serves several
stores on one drive puts a gate of its own in this place.
"""

from __future__ import annotations

from prefetchd.device import Completions, File, Ops, StorageDevice


class Gate:
    """All methods are called by who drives the device, under the engine's lock."""

    def submit(self, device: StorageDevice, ops: Ops, io_class: int, now_ns: int) -> int:
        """How many of `ops` have begun, from the first. The rest is offered again whenever the
        driver starts operations."""
        return device.submit(ops)

    def ended(self, completions: Completions, now_ns: int) -> None:
        """These have ended."""

    def change_file(self, number: int, file: File) -> None:
        """The device has another file in this place, or none (descriptor -1)."""

    def rest(self) -> None:
        """Nothing is left that has not begun."""
