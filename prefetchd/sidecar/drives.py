"""The drives under a daemon's stores, and the gate through which each namespace uses its own.

Decides which stores lie on one drive, and tells a namespace that waits when it may go on. Who may
begin how much is `shares`'. Gates are called under their engines' locks, so nothing here calls an
engine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from prefetchd.device import Completions, File, Ops, StorageDevice
from prefetchd.gate import Gate
from prefetchd.model import IoClass
from prefetchd.sidecar.shares import DriveShares

DriveId = tuple[int, int]
"""Of the whole drive, where the kernel tells what a partition is of."""


def drive_of(file: File) -> DriveId:
    status = os.fstat(file.fd)
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    drive = os.major(number), os.minor(number)
    place = Path(f"/sys/dev/block/{drive[0]}:{drive[1]}")
    try:
        if (place / "partition").exists():
            major, minor = (place.resolve().parent / "dev").read_text().split(":")
            return int(major), int(minor)
    except (OSError, ValueError):
        pass  # the partition stands for itself
    return drive


class Drive:
    """One drive; its members are gates. Any thread may call."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.shares = DriveShares()
        self.gates: list[DriveGate] = []


class DriveGate(Gate):
    """`wake` is called in any thread when something may begin: soon after, the driver is to start
    what it has queued."""

    def __init__(self, drives: Sequence[Drive], weight: int, wake: Callable[[], None]) -> None:
        self.drives = list(drives)
        """One a file of the device."""
        self._distinct = list(dict.fromkeys(drives))
        self._wake = wake
        self._woken = False
        self._flying: dict[int, tuple[Drive, int, int]] = {}  # tag: size, when it began alone
        for drive in self._distinct:
            with drive.lock:
                drive.shares.join(self, weight)
                drive.gates.append(self)

    def set_weight(self, weight: int) -> None:
        for drive in self._distinct:
            with drive.lock:
                drive.shares.join(self, weight)

    def attend(self, present: bool) -> None:
        """Whether there is a client that may ask for something at any time."""
        for drive in self._distinct:
            with drive.lock:
                drive.shares.attend(self, present)
            self._tell(drive)

    def submit(self, device: StorageDevice, ops: Ops, io_class: int, now_ns: int) -> int:
        self._woken = False
        begun = 0
        while begun < len(ops):
            drive = self.drives[int(ops["file"][begun])]
            rest = ops[begun:] if len(self._distinct) == 1 else self._run(ops[begun:], drive)
            taken = self._begin(drive, device, rest, io_class, now_ns)
            begun += taken
            if taken < len(rest):
                break
        return begun

    def _run(self, ops: Ops, drive: Drive) -> Ops:
        """Those from the first on that are for one drive."""
        same = np.array([self.drives[file] is drive for file in ops["file"].tolist()])
        run: Ops = ops[: int(np.argmin(same))] if not same.all() else ops
        return run

    def _begin(
        self, drive: Drive, device: StorageDevice, ops: Ops, io_class: int, now_ns: int
    ) -> int:
        if len(drive.gates) == 1 or self not in drive.gates:
            return device.submit(ops)  # alone, or closed
        ops = ops[: max(0, device.depth - device.in_flight)]
        lengths = ops["length"].astype(np.int64)
        with drive.lock:
            alone = now_ns if io_class < IoClass.WRITE_BACK and not drive.shares.in_flight else 0
            granted = drive.shares.grant(self, io_class, lengths)
        taken = device.submit(ops[:granted]) if granted else 0
        if taken < granted:
            with drive.lock:
                drive.shares.refuse(self, int(lengths[taken:granted].sum()))
        for tag, length in ops[["tag", "length"]][:taken].tolist():
            self._flying[tag] = drive, length, alone
            alone = 0
        self._tell(drive)
        return taken

    def ended(self, completions: Completions, now_ns: int) -> None:
        if not self._flying or not len(completions):
            return
        sizes: dict[Drive, int] = {}
        for tag, result in completions.tolist():
            drive, size, alone_ns = self._flying.pop(tag, (None, 0, 0))
            if drive is None:
                continue
            sizes[drive] = sizes.get(drive, 0) + size
            if alone_ns and result == size:
                with drive.lock:
                    drive.shares.window.alone(size, now_ns - alone_ns)
        for drive, size in sizes.items():
            with drive.lock:
                drive.shares.ended(self, size)
                busy = drive.shares.in_flight > 0
                drive.shares.window.moved(size, now_ns, busy=busy)
            self._tell(drive)

    def rest(self) -> None:
        self._woken = False
        for drive in self._distinct:
            if len(drive.gates) > 1:
                with drive.lock:
                    drive.shares.rest(self)
                self._tell(drive)

    def _tell(self, drive: Drive) -> None:
        """Wake who may go on, unless that is who calls: it goes on by itself."""
        with drive.lock:
            gate = drive.shares.next()
        if isinstance(gate, DriveGate) and gate is not self and not gate._woken:
            gate._woken = True
            gate._wake()

    def close(self) -> None:
        """It uses its drives no more; what it has in flight stands in nobody's way."""
        for drive in self._distinct:
            with drive.lock:
                drive.shares.leave(self)
                if self in drive.gates:
                    drive.gates.remove(self)
            self._tell(drive)
        self._distinct, self._flying = [], {}


class Drives:
    """All that the daemon's stores lie on."""

    def __init__(self) -> None:
        self._drives: dict[DriveId, Drive] = {}

    def gate(self, files: Sequence[File], weight: int, wake: Callable[[], None]) -> DriveGate:
        """For a store in these files."""
        found = [self._drives.setdefault(drive_of(file), Drive()) for file in files]
        return DriveGate(found, weight, wake)
