"""A store's folder: who owns it, and what its file system's errors mean to people.

Decides the lock and the words. Refuses to know what the files hold and how they are read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from prefetchd.hostinfo import errno_name

_LOCK_NAME = "owner.lock"


class StoreError(Exception):
    """A store cannot be had as asked: what, where, why and what to do, in one message."""


def take_lock(directory: Path) -> int:
    """One owner by lock; the file names its process for the next who comes."""
    fd = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise StoreError(
            f"store {directory} is in use by process {_described(owner)}; stop it, or use "
            "another folder"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _described(pid: str) -> str:
    try:
        return f"{pid} ({psutil.Process(int(pid)).name()})"
    except (ValueError, psutil.Error):
        return pid or "unknown"


def close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def told(directory: Path) -> Iterator[None]:
    """Turn an OSError into words: path, errno by name, and what to do."""
    remedies = {
        "ENOENT": "create its parent folder first",
        "EACCES": "give this user read and write permission",
        "EPERM": "give this user read and write permission",
        "EROFS": "the file system is mounted read-only; remount it or use another path",
        "ENOSPC": "the file system is full; free space or ask for a smaller store",
        "EDQUOT": "the disk quota is used up; ask for a smaller store",
        "EINVAL": "this file system does not offer O_DIRECT; use a local disk file system",
        "EIO": "the device reports an error; see the kernel log",
    }
    try:
        yield
    except OSError as error:
        name = errno_name(error.errno or 0)
        remedy = remedies.get(name.split(" ", 1)[0], "check the path")
        raise StoreError(f"store {directory}: {name}; {remedy}") from error
