"""Where a new part of a store goes: taken, and left as it was if nothing comes of it.

Decides under which names a part lies while it is made and once it is whole, and what of an earlier
try may be cleared away. Refuses to know what is written.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from prefetchd.raw import check_free
from prefetchd.store_opening import exists, is_foreign, peek
from prefetchd.store_place import (
    LOCK_NAME,
    StoreError,
    close_all,
    is_raw,
    making_path,
    open_data,
    sync_names,
    take_lock,
)


@dataclass(slots=True)
class NewPart:
    """Where a part goes: `fd` is -1 until there is a file. `made`, `named`, `folder_made`,
    `lock_made`: the file, its final name, folder and lock are ours to remove."""

    path: Path
    data: Path
    fd: int = -1
    lock: int = -1
    made: bool = False
    named: bool = False
    folder_made: bool = False
    lock_made: bool = False

    def claim(self, *, force: bool, begun: bytes = b"") -> None:
        """Nobody else has anything there, but for what is left of the store `begun`."""
        if is_raw(self.path):
            check_free(self.path, force=force)
            self._take()
            self.fd = open_data(self.path, raw=True, read_only=False)
            return
        self._make_folder()
        self._refuse_others(begun)
        self._take()
        self._refuse_others(begun)  # somebody may have made one meanwhile
        self.data.unlink(missing_ok=True)

    @property
    def file(self) -> Path:
        """Of what is being made."""
        return making_path(self.path) if self.made else self.data

    def create(self) -> None:
        making = making_path(self.path)
        making.unlink(missing_ok=True)  # whoever began it is gone: the lock is ours
        self.made = True
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        self.fd = os.open(making, flags, 0o600)

    def name(self) -> None:
        """What was made and flushed is a part of a store from here on, whatever fails."""
        if self.made:
            self.named = True
            os.rename(making_path(self.path), self.data)
            sync_names(self.path)

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()
            self.folder_made = True

    def _refuse_others(self, begun: bytes) -> None:
        """Raises StoreError if anything is there, unless it is a part of the store `begun`, whose
        first part never came to be."""
        if not exists(self.path):
            return
        locks: list[int] = []
        try:
            if is_foreign(self.path, self.data, locks):
                raise StoreError(
                    f"{self.data} is in the way and is not a prefetchd store; use another folder"
                )
        finally:
            close_all(locks)
        if not begun or peek(self.path, raw=False).store_id != begun:
            raise StoreError(f"store {self.path} exists already; open it, or erase the folder")

    def _take(self) -> None:
        """Own the place, and know whether its lock was there before."""
        there = is_raw(self.path) or (self.path / LOCK_NAME).exists()
        self.lock = take_lock(self.path)
        self.lock_made = not there

    def undo(self) -> None:
        """Remove what was made here, and nothing else; its lock is still held."""
        if self.made:
            making_path(self.path).unlink(missing_ok=True)
        if self.named:
            self.data.unlink(missing_ok=True)
        if self.lock_made:
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self.folder_made:
            with contextlib.suppress(OSError):  # somebody put something there meanwhile
                self.path.rmdir()
