"""Every storage device under the contract's tests, on O_DIRECT files and in memory."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import liburing
import numpy as np
import pytest

from prefetchd.bench.emulation import Emulation, limit_profile
from prefetchd.device import READ, WRITE, DeviceError, File, StorageDevice
from prefetchd.devices.emulated import Emulated
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.liburing import Liburing
from prefetchd.devices.memory import Mailbox, Memory
from prefetchd.devices.threads import Threads
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DriveProfile
from prefetchd.testing import PAGE, StorageDeviceContract, aligned_arena, batch, run
from tests.forbidden import FORBID_URING


def uring_refusal() -> str:
    """Why this machine has no io_uring, or nothing. Asked of the kernel, not of our devices."""
    ring = liburing.Ring()
    try:
        liburing.io_uring_queue_init(1, ring)
    except OSError as error:
        return f"io_uring is refused here: {error}"
    liburing.io_uring_queue_exit(ring)
    return ""


needs_uring = pytest.mark.skipif(bool(uring_refusal()), reason=uring_refusal() or "never")


def open_file(path: Path, size_bytes: int, flags: int = os.O_RDWR) -> File:
    path.write_bytes(bytes(size_bytes))
    return File(os.open(path, flags | os.O_DIRECT), str(path), size_bytes)


class OnFiles(StorageDeviceContract):
    module: ClassVar[str] = ""
    name: ClassVar[str] = ""

    def open(self, files: list[File], depth: int, arena_bytes: int) -> StorageDevice:
        module = pytest.importorskip(f"prefetchd.devices.{self.module}", reason="not there yet")
        device: StorageDevice = getattr(module, self.name)(files, aligned_arena(arena_bytes), depth)
        return device

    def make(self, tmp_path: Path, file_bytes: int, depth: int, arena_bytes: int) -> StorageDevice:
        files = [open_file(tmp_path / name, file_bytes) for name in ("a", "b")]
        return self.open(files, depth, arena_bytes)

    def raw_read(self, device: StorageDevice, file: int, offset: int, length: int) -> bytes:
        with open(device.files[file].path, "rb") as medium:
            medium.seek(offset)
            return medium.read(length)

    def raw_write(self, device: StorageDevice, file: int, offset: int, data: bytes) -> None:
        with open(device.files[file].path, "r+b") as medium:
            medium.seek(offset)
            medium.write(data)
            medium.flush()
            os.fsync(medium.fileno())

    def unaligned_result(self, device: StorageDevice) -> int | None:
        try:
            return os.preadv(device.files[0].fd, [aligned_arena(PAGE).data], 1)
        except OSError as error:
            return -(error.errno or 0)

    def test_a_descriptor_that_may_not_be_written_answers_ebadf(self, tmp_path: Path) -> None:
        file = open_file(tmp_path / "read_only", PAGE, os.O_RDONLY)
        device = self.open([file], 2, PAGE)
        try:
            assert run(device, batch(WRITE, 0, 0, PAGE)).tolist() == [-errno.EBADF]
            assert run(device, batch(READ, 0, 0, PAGE)).tolist() == [PAGE]
        finally:
            device.close()
            os.close(file.fd)


class TestThreads(OnFiles):
    module, name = "threads", "Threads"


@needs_uring
class TestLiburing(OnFiles):
    module, name = "liburing", "Liburing"


@needs_uring
class TestUring(OnFiles):
    module, name = "uring", "Uring"


class TestUringSqpoll(OnFiles):
    module, name = "uring_sqpoll", "UringSqpoll"


class TestMemory(StorageDeviceContract):
    def make(self, tmp_path: Path, file_bytes: int, depth: int, arena_bytes: int) -> StorageDevice:
        files = [File(-1, name, file_bytes) for name in ("a", "b")]
        self.memory = Memory(files, aligned_arena(arena_bytes), depth)
        return self.memory

    def raw_read(self, device: StorageDevice, file: int, offset: int, length: int) -> bytes:
        return self.memory.contents[file][offset : offset + length].tobytes()

    def raw_write(self, device: StorageDevice, file: int, offset: int, data: bytes) -> None:
        self.memory.contents[file][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def test_another_device_opens_the_same_bytes(self, device: StorageDevice) -> None:
        content = self.fill(device)
        again = Memory(device.files, aligned_arena(PAGE), 1, contents=self.memory.contents)
        assert run(again, batch(READ, PAGE, 0, PAGE)).tolist() == [PAGE]
        assert np.array_equal(again.arena, content[PAGE : 2 * PAGE])
        again.close()

    def test_a_write_past_the_end_finds_no_space(self, device: StorageDevice) -> None:
        size = device.files[0].size_bytes
        ops = batch(WRITE, [size - PAGE, size], 0, 2 * PAGE)
        assert run(device, ops).tolist() == [PAGE, -errno.ENOSPC]


class TestFaultyWithoutFaults(TestMemory):
    def make(self, tmp_path: Path, file_bytes: int, depth: int, arena_bytes: int) -> StorageDevice:
        return Faulty(super().make(tmp_path, file_bytes, depth, arena_bytes), Faults())


class TestEmulated(TestMemory):
    def make(self, tmp_path: Path, file_bytes: int, depth: int, arena_bytes: int) -> StorageDevice:
        inner = super().make(tmp_path, file_bytes, depth, arena_bytes)
        drive = DriveProfile(name="test", read_gb_s=50.0, write_gb_s=50.0, read_us=50, write_us=20)
        return Emulated(inner, DriveModel(drive))


def test_threads_say_when_the_depth_is_more_than_they_run(tmp_path: Path) -> None:
    file = open_file(tmp_path / "a", PAGE)
    for depth, notes in ((32, 0), (33, 1)):
        device = Threads([file], aligned_arena(PAGE), depth)
        assert len(device.notes) == notes
        assert device.submit(batch(READ, 0, np.zeros(40, int), 0)) == depth
        device.close()
    os.close(file.fd)


FORGETFUL = """
import sys
import numpy as np
from prefetchd.devices.threads import Threads
from prefetchd.testing import PAGE, aligned_arena, batch, run
from tests.test_storage_devices import Path, open_file
file = open_file(Path(sys.argv[1]), PAGE)
device = Threads([file], aligned_arena(PAGE), 40)
if sys.argv[2] == "used":
    run(device, batch(0, 0, 0, PAGE))
elif sys.argv[2] == "busy":
    device.submit(batch(0, np.zeros(40, int), 0, PAGE))
"""


@pytest.mark.parametrize("when", ["at once", "used", "busy"])
def test_a_process_that_forgets_to_close_threads_still_ends(when: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path / "a"), when]
    ran = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert ran.stderr == ""


@pytest.mark.parametrize(("name", "refused"), [("worker", 3), ("loop", 0)])
def test_threads_that_cannot_be_had_are_a_device_error(
    name: str, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"prefetchd-{name}" and next(numbers) == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    numbers = itertools.count()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = threading.active_count()
    with pytest.raises(DeviceError, match="8 threads cannot be had: can't start new thread"):
        Threads([], aligned_arena(PAGE), 8)
    assert threading.active_count() == before


def test_threads_without_descriptors_for_their_loop_are_a_device_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio.events, "new_event_loop", refuse)
    with pytest.raises(DeviceError, match=r"Too many open files.*ulimit -n"):
        Threads([], aligned_arena(PAGE), 8)


@needs_uring
@pytest.mark.parametrize(
    ("make", "call"),
    [(Liburing, "os.eventfd"), (Emulation(limit_profile(1e9)), "select.epoll")],
    ids=["liburing", "emulated"],
)
def test_a_device_that_gets_no_descriptor_leaves_none_behind(
    make: Callable[..., StorageDevice], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(call, refuse)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((DeviceError, OSError), match="Too many open files"):
        make([], aligned_arena(PAGE), 4)
    assert len(os.listdir("/proc/self/fd")) == open_before


@needs_uring
def test_a_depth_that_the_kernel_refuses_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match=r"1048576.*EINVAL"):
        Liburing([], aligned_arena(PAGE), 1 << 20)


OPEN_LIBURING = """
import numpy as np
from prefetchd.device import DeviceError
from prefetchd.devices.liburing import Liburing
try:
    Liburing([], np.zeros(4096, np.uint8), 4)
except DeviceError as error:
    print(error)
"""


def test_io_uring_forbidden_by_seccomp_is_named_as_the_cause() -> None:
    command = [sys.executable, "-c", FORBID_URING + OPEN_LIBURING]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if child.returncode == 77:
        pytest.skip("no seccomp filter can be set here")
    assert child.returncode == 0, child.stderr
    assert "EPERM" in child.stdout
    assert "seccomp" in child.stdout


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "late"), RuntimeError("late")])
def test_what_breaks_a_worker_after_the_start_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        failing.set()
        raise error

    failing, told = threading.Event(), list[BaseException | None]()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    monkeypatch.setattr(Mailbox, "post", fail)
    device = Threads([], aligned_arena(PAGE), 2)
    device.submit(batch(READ, 0, 0, PAGE))
    assert failing.wait(30)
    device.close()
    assert told == [error]
