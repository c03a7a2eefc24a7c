"""The drives under a daemon's stores, and the gate through which each namespace uses its own.

Decides which stores lie on one drive, and tells a namespace that waits when it may go on. Who may
begin how much is `shares`'. Gates are called under their engines' locks, so nothing here calls an
engine.
"""

from __future__ import annotations

import os
import stat
import time
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


_FEW = 4
"""Reads that begin together and still do not keep each other waiting."""
_Flight = tuple[Drive, int, int, int]
"""An operation: its bytes, when it began (a write: 0), and if it had nothing ahead of it, how many
began then."""


class DriveGate(Gate):
    """`wake` is called in any thread when something may begin: soon after, the driver is to start
    what it has queued."""

    def __init__(
        self,
        drives: Sequence[Drive],
        weight: int,
        wake: Callable[[], None],
        find: Callable[[File], Drive] = lambda file: Drive(),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock = clock
        self._find = find
        self.drives = list(drives)
        """One a file of the device."""
        self._weight, self._present = weight, False
        self._distinct = list(dict.fromkeys(drives))
        self._wake = wake
        self._woken = False
        self._flying: dict[int, _Flight] = {}  # by tag
        self._noticed_ns = 0  # 0: nobody knows
        for drive in self._distinct:
            self._join(drive)

    def _join(self, drive: Drive) -> None:
        with drive.lock:
            drive.shares.join(self, self._weight)
            drive.shares.attend(self, self._present)
            drive.gates.append(self)

    def _leave(self, drive: Drive) -> None:
        with drive.lock:
            drive.shares.leave(self)
            if self in drive.gates:
                drive.gates.remove(self)
        self._tell(drive)

    def change_file(self, number: int, file: File) -> None:
        before = self._distinct
        self.drives[number] = self._find(file)
        self._distinct = list(dict.fromkeys(self.drives))
        for drive in self._distinct:
            if drive not in before:
                self._join(drive)
        for drive in before:
            if drive not in self._distinct:
                self._leave(drive)

    def set_weight(self, weight: int) -> None:
        self._weight = weight
        for drive in self._distinct:
            with drive.lock:
                drive.shares.join(self, weight)

    def attend(self, present: bool) -> None:
        """Whether there is a client that may ask for something at any time."""
        self._present = present
        for drive in self._distinct:
            with drive.lock:
                drive.shares.attend(self, present)
            self._tell(drive)

    def submit(self, device: StorageDevice, ops: Ops, io_class: int, now_ns: int) -> int:
        self._woken = False
        if all(len(drive.gates) == 1 for drive in self._distinct):
            return device.submit(ops)  # nobody shares them, or closed
        begun = 0
        for run in self._runs(ops):
            drive = self.drives[int(run["file"][0])]
            taken = self._begin(drive, device, run, io_class, now_ns)
            begun += taken
            if taken < len(run):
                break
        return begun

    def _runs(self, ops: Ops) -> list[Ops]:
        """Cut where the drive changes."""
        if len(self._distinct) == 1 or len(ops) == 0:
            return [ops] if len(ops) else []
        numbers = np.array([self._distinct.index(drive) for drive in self.drives])
        (changes,) = np.diff(numbers[ops["file"]]).nonzero()
        return np.split(ops, changes + 1)

    def _begin(
        self, drive: Drive, device: StorageDevice, ops: Ops, io_class: int, now_ns: int
    ) -> int:
        if len(drive.gates) == 1 or self not in drive.gates:
            return device.submit(ops)  # alone, or closed
        lengths = ops["length"][: max(0, device.depth - device.in_flight)].astype(np.int64)
        with drive.lock:
            idle = not drive.shares.in_flight
            granted = drive.shares.grant(self, io_class, lengths, now_ns)
        begun_ns = self._clock()  # not `now_ns`: what was decided since has taken its time
        taken = device.submit(ops[:granted]) if granted else 0
        if taken < granted:
            with drive.lock:
                drive.shares.refuse(self, int(lengths[taken:granted].sum()))
        begun_ns = begun_ns if io_class < IoClass.WRITE_BACK else 0
        begun = zip(ops["tag"][:taken].tolist(), lengths[:taken].tolist(), strict=True)
        alone = taken if idle else 0
        for tag, length in begun:
            self._flying[tag] = drive, length, begun_ns, alone
            alone = 0
        self._tell(drive)
        return taken

    def noticed(self, now_ns: int) -> None:
        """Who slept until something ended was woken for it now; `ended` follows."""
        self._noticed_ns = now_ns

    def ended(self, completions: Completions, now_ns: int) -> None:
        noticed_ns, self._noticed_ns = self._noticed_ns, 0
        if not self._flying or not len(completions):
            return
        ended: dict[Drive, list[_Flight]] = {}
        for tag, result in zip(*(completions[n].tolist() for n in ("tag", "result")), strict=True):
            flight = self._flying.pop(tag, None)
            if flight is not None:
                drive, length, begun_ns, alone = flight
                # What fails may fail in no time.
                flight = drive, length, begun_ns, alone if result == length else 0
                ended.setdefault(drive, []).append(flight)
        for drive, flights in ended.items():
            with drive.lock:
                self._note(drive, flights, now_ns, noticed_ns)
            self._tell(drive)

    def _note(self, drive: Drive, flights: list[_Flight], now_ns: int, noticed_ns: int) -> None:
        shares, window = drive.shares, drive.shares.window
        size = sum(flight[1] for flight in flights)
        reads = [flight for flight in flights if flight[2]]
        for _, length, begun_ns, alone in reads:
            if alone:
                slept_for = alone <= _FEW and noticed_ns > begun_ns
                ended_ns = noticed_ns if slept_for else now_ns
                window.alone(length, ended_ns - begun_ns, slept_for=slept_for)
        brief = shares.brief(self)
        shares.ended(self, size)
        waits_ns = len(reads) * now_ns - sum(flight[2] for flight in reads)
        busy = shares.in_flight > 0
        limited = shares.limited
        window.moved(size, len(reads), waits_ns, now_ns, busy=busy, limited=limited, brief=brief)

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

    def counts(self) -> tuple[int, int]:
        """As `DriveShares.counts`, over all its drives."""
        each = [drive.shares.counts(self) for drive in self._distinct]
        return sum(one for one, _ in each), sum(one for _, one in each)

    def close(self) -> None:
        """It uses its drives no more; what it has in flight stands in nobody's way."""
        for drive in self._distinct:
            self._leave(drive)
        self._distinct, self._flying = [], {}


class Drives:
    """All that the daemon's stores lie on."""

    def __init__(self) -> None:
        self._drives: dict[DriveId, Drive] = {}

    def gate(
        self,
        files: Sequence[File],
        weight: int,
        wake: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> DriveGate:
        """For a store in these files."""
        return DriveGate([self._find(file) for file in files], weight, wake, self._find, clock)

    def _find(self, file: File) -> Drive:
        """That of a path that is away is nobody else's."""
        return self._drives.setdefault(drive_of(file), Drive()) if file.fd >= 0 else Drive()
