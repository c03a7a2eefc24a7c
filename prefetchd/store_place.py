"""Where a part of a store lies: a file in a folder, or a whole block device; and who owns it.

Decides the lock, what may be opened how, and the words for what a file system refuses. Refuses to
know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from prefetchd.hostinfo import errno_name

EXTENTS_NAME = "extents.dat"
LOCK_NAME = "owner.lock"
_MAKING_SUFFIX = ".making"


class StoreError(Exception):
    """A store cannot be had as asked: what, where, why and what to do, in one message."""


class MisfitError(StoreError):
    """The store is well, but it is not what was asked for: another try changes nothing."""


class InUseError(StoreError):
    """Another process has it open."""


def is_raw(place: Path) -> bool:
    """Whether a store there lies on the path itself (a device, or a file in its stead)."""
    return place.exists() and not place.is_dir()


def making_path(folder: Path) -> Path:
    """The file of a part that is not whole yet."""
    return folder / f"{EXTENTS_NAME}{_MAKING_SUFFIX}"


def is_device(place: Path) -> bool:
    return place.exists() and stat.S_ISBLK(place.stat().st_mode)


def there(path: Path) -> bool:
    """Whether a file is there. Raises OSError where that cannot be known, whatever Python's."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def data_path(place: Path, *, raw: bool) -> Path:
    """The file or device that holds the bytes. Raises StoreError for a device nobody asked for."""
    if not is_raw(place):
        return place / EXTENTS_NAME
    if not raw:
        what = "a block device" if is_device(place) else "a file"
        raise StoreError(
            f"{place} is {what} and no folder; say raw=True (--raw) if the store is to lie "
            "directly on it"
        )
    return place


def open_data(place: Path, *, raw: bool, read_only: bool) -> int:
    """A descriptor with O_DIRECT."""
    flags = os.O_RDONLY if read_only else os.O_RDWR
    return os.open(data_path(place, raw=raw), flags | os.O_DIRECT)


def take_lock(place: Path, *, shared: bool = False) -> int:
    """One owner, or any number of readers; its process is named to the next who comes.

    A folder has a file for it; a raw device is locked itself, and claimed if it is to be written,
    so that nobody mounts it. The descriptor returned holds the lock: one of its own, since io_uring
    keeps those it knows for a while after its ring is closed.
    """
    fd = _open_lock(place, shared=shared)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if not shared and not is_raw(place):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owners = _holders(fd, place)
        os.close(fd)
        raise InUseError(
            f"store {place} is in use by process {owners}; stop it, or use another folder"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    if is_raw(place) or os.fstat(fd).st_nlink:
        return fd
    os.close(fd)  # whoever had it removed it: it keeps nobody else out
    return take_lock(place, shared=shared)


def _open_lock(place: Path, *, shared: bool) -> int:
    if is_raw(place):
        claim = os.O_EXCL if is_device(place) and not shared else 0
        return os.open(place, (os.O_RDONLY if shared else os.O_RDWR) | claim)
    if shared:
        if not (place / LOCK_NAME).exists():
            raise StoreError(
                f"{place} has no {LOCK_NAME}: it is no store, or was copied in part; if it is one, "
                "open it once to be written"
            )
        return os.open(place / LOCK_NAME, os.O_RDONLY)
    return os.open(place / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)


def _holders(fd: int, place: Path) -> str:
    """Who holds a lock on this file: as the kernel says and, if it is sure, its owner wrote."""
    inode = os.fstat(fd).st_ino
    pids = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and words[5].endswith(f":{inode}") and words[4].isdigit():
                pids.append(words[4])
    if not is_raw(place):
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        # Readers write nothing there; and from inside a container the kernel's numbers are 0.
        if owner in pids or not any(pid != "0" for pid in pids):
            pids = [owner]
    return ", ".join(map(_described, pids)) or "unknown"


def _described(pid: str) -> str:
    try:
        return f"{pid} ({psutil.Process(int(pid)).name()})"
    except (ValueError, psutil.Error):
        return pid or "unknown"


def sync_names(folder: Path) -> None:
    """A power failure leaves the files of this folder under the names they have now."""
    for named in (folder, folder.absolute().parent):
        try:
            fd = os.open(named, os.O_RDONLY | os.O_DIRECTORY)
        except (PermissionError, FileNotFoundError):
            continue  # a folder may be searched and not read, and one that is gone has no names
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems refuse it
                raise
        finally:
            os.close(fd)


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def told(place: Path, *, opening: bool = False) -> Iterator[None]:
    """Turn an OSError into words: path, errno by name, and what to do. `opening`: what is there
    could also be opened for reading only."""
    reading = ", or open it with read_only=True" if opening else ""
    remedies = {
        "ENOENT": "create its parent folder first",
        "EACCES": f"give this user read and write permission{reading}",
        "EPERM": f"give this user read and write permission{reading}",
        "EROFS": f"the file system is mounted read-only; remount it or use another path{reading}",
        "ENOSPC": "the file system is full; free space or ask for a smaller store",
        "EFBIG": "no file of this size is allowed (by the file system, or `ulimit -f`); ask for a "
        "smaller store",
        "EMFILE": "raise the limit of open files (ulimit -n)",
        "EDQUOT": "the disk quota is used up; ask for a smaller store",
        "EINVAL": "this file system does not offer O_DIRECT; use a local disk file system",
        "EIO": "the device reports an error; see the kernel log",
        "EBUSY": "it is mounted, or another program has claimed it (LVM, RAID, swap); use another",
    }
    try:
        yield
    except OSError as error:
        name = errno_name(error.errno or 0)
        remedy = remedies.get(name.split(" ", 1)[0], "check the path")
        raise StoreError(f"store {place}: {name}; {remedy}") from error
