"""What this machine is and allows: file systems, alignment, locked memory, io_uring.

Decides how the kernel's answers are put into words. Opens no store and runs no I/O of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_libc = ctypes.CDLL(None, use_errno=True)
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_CAP_IPC_LOCK = 14
_AND = " + "


def errno_name(code: int) -> str:
    """`EIO (Input/output error)` for 5 or -5."""
    code = abs(code)
    return f"{errno.errorcode.get(code, f'errno {code}')} ({os.strerror(code)})"


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """What fails in here and names no file is about this one, as a full file system is."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            error.filename = str(path)
        raise


def why_not(result: int, short: str = "short write") -> str:
    """An operation's result in words, where it is not what it should be."""
    return errno_name(result) if result < 0 else short


def may_lock_memory(need_bytes: int) -> int | None:
    """None if `need_bytes` can be locked, else the limit (RLIMIT_MEMLOCK) that forbids it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or need_bytes <= soft or _has_capability(_CAP_IPC_LOCK):
        return None
    return soft


def _has_capability(number: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), ":0")
    return bool(int(effective.split(":")[1], 16) >> number & 1)


def uring_forbidden_because(error: OSError) -> str:
    """In words: why io_uring_setup failed, and what to do about it."""
    name = errno_name(error.errno or 0)
    try:
        disabled = int(Path("/proc/sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        disabled = 0
    if error.errno == errno.ENOSYS:
        return f"io_uring is not there: {name}; kernel {platform.release()} is too old or cut down"
    if error.errno in (errno.EPERM, errno.EACCES) and disabled:
        return (
            f"io_uring is forbidden: {name}; kernel.io_uring_disabled is {disabled}; "
            "set it to 0 with sysctl"
        )
    if error.errno in (errno.EPERM, errno.EACCES):
        return (
            f"io_uring is forbidden: {name}; a seccomp filter, as containers set by default, "
            "blocks it; allow io_uring_setup, io_uring_enter and io_uring_register"
        )
    if error.errno == errno.ENOMEM:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return (
            f"io_uring got no memory: {name}; the locked-memory limit (ulimit -l) is {limit} bytes"
        )
    return f"io_uring cannot be set up: {name}"


@dataclass(frozen=True, slots=True)
class Medium:
    """What lies under a path: file system, device, alignment for O_DIRECT (0: none known). Of
    several paths: all their names, and what suits them all."""

    file_system: str
    device: str
    memory_alignment_bytes: int
    offset_alignment_bytes: int

    @classmethod
    def together(cls, media: Sequence[Medium]) -> Medium:
        """What lies under a store of several paths."""
        return cls(
            _AND.join(dict.fromkeys(one.file_system for one in media)),
            _AND.join(dict.fromkeys(one.device for one in media)),
            max(one.memory_alignment_bytes for one in media),
            max(one.offset_alignment_bytes for one in media),
        )

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.device.split(_AND))

    @property
    def is_ram(self) -> bool:
        """Whether any of it is."""
        return not {"tmpfs", "ramfs"}.isdisjoint(self.file_system.split(_AND))

    @property
    def alignment_bytes(self) -> int:
        """What both offsets and memory keep to; at least a memory page, so that slots are whole."""
        return max(4096, self.memory_alignment_bytes, self.offset_alignment_bytes)


def medium_of(fd: int, path: str) -> Medium:
    """Describe the file behind an open descriptor; `path` is used to find its mount."""
    status = os.fstat(fd)
    is_device = stat.S_ISBLK(status.st_mode)
    mount = ("raw device", os.path.realpath(path)) if is_device else _mount_of(path)
    memory, offset = _dio_alignment(fd)
    if not offset and (is_device or stat.S_ISREG(status.st_mode)):
        offset = _logical_block_bytes(status.st_rdev if is_device else status.st_dev)
    return Medium(mount[0], mount[1], memory, offset)


def _mount_of(path: str) -> tuple[str, str]:
    """(file system type, device) of the deepest mount that holds `path`."""
    real = os.path.realpath(path)
    best, found = -1, ("unknown", "unknown")
    for partition in psutil.disk_partitions(all=True):
        point = partition.mountpoint.rstrip("/") + "/"
        if (real + "/").startswith(point) and len(point) >= best:
            best, found = len(point), (partition.fstype, partition.device)
    return found


def _dio_alignment(fd: int) -> tuple[int, int]:
    """(memory, offset) alignment in bytes for O_DIRECT, from statx(2); (0, 0) if not told."""
    buffer = (ctypes.c_uint32 * 64)()
    result = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    if result != 0 or not buffer[0] & _STATX_DIOALIGN:
        return 0, 0
    # struct statx: stx_dio_mem_align and stx_dio_offset_align stand at bytes 152 and 156.
    return int(buffer[38]), int(buffer[39])


def _logical_block_bytes(device: int) -> int:
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (base / "queue", base / ".." / "queue"):
        try:
            return int((queue / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return 0
