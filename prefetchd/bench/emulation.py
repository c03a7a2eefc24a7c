"""A replay on a drive that is not there: a real device held back by a drive profile.

Decides what runs below, and what is said where that was too slow to stand for the profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefetchd.assembly import open_device
from prefetchd.device import Arena, File, StorageDevice
from prefetchd.devices.emulated import Emulated
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.options import Options

_LATE_SHARE_MAX = 0.01


def limit_profile(bytes_s: float) -> DriveProfile:
    """Reads one after another at so many bytes a second; it says nothing of writes."""
    return DriveProfile(name="limited", read_gb_s=bytes_s / 1e9, write_gb_s=9e5, read_us=0.0)


class Emulation:
    """A device factory (see `prefetchd.Options.device`) that remembers what it has opened.
    `writes`: whether the profile is theirs too."""

    def __init__(
        self,
        profile: DriveProfile,
        *,
        inner: str = "uring",
        seed: int = 0,
        held: bool = True,
        writes: bool = True,
    ) -> None:
        self.profile = profile
        self._writes = writes
        self._inner = inner
        self._seed = seed
        self._held = held
        self._opened: list[Emulated] = []

    def __call__(self, files: Sequence[File], arena: Arena, depth: int) -> StorageDevice:
        inner, notes = open_device(Options(device=self._inner, depth=depth), files, arena)
        model = DriveModel(self.profile, self._seed)
        try:
            device = Emulated(inner, model, held=self._held, writes=self._writes)
        except BaseException:
            inner.close()
            raise
        device.notes = (*notes, *device.notes)
        self._opened.append(device)
        return device

    def hold(self) -> None:
        """From here on hold what was opened last; until now it was let pass."""
        self._opened[-1].held = True

    def notes(self) -> list[str]:
        """Where the profile's figures could not be kept to."""
        served = sum(device.served for device in self._opened)
        late = sum(device.late for device in self._opened)
        if late <= _LATE_SHARE_MAX * served:
            return []
        return [
            f"TOO-SLOW: {late / served:.0%} of operations were seen later than drive profile "
            f"{self.profile.name} says: the drive below, or this host, cannot stand for it"
        ]
