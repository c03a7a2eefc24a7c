"""Taking a path of a store out of use, and putting another drive in its place, while it serves.

Decides the order. An empty path is shut, and what is in flight on it ends; the device gets another
file, or none; then one writing of the first superblock makes it so for every later opening; only
then may blocks go there. A crash leaves the store with the old paths or the new ones, and both hold
all its blocks. Emptying a path is `draining`'s; making the new part is `store_making`'s.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np

from prefetchd.device import DeviceError, File
from prefetchd.engine import EngineError
from prefetchd.erasing import erase
from prefetchd.format import Superblock
from prefetchd.model import Slots
from prefetchd.reconfiguring import Reconfiguring
from prefetchd.staging import ABANDONED, READING
from prefetchd.store import StoreError
from prefetchd.store_making import Progress, create_part
from prefetchd.store_opening import exists, open_part, peek
from prefetchd.store_place import close_all
from prefetchd.write_hints import hint_lifetime

log = logging.getLogger("prefetchd")

_PATIENCE_NS = 10_000_000_000


class Attaching(Reconfiguring):
    def begin(self) -> None:
        self._one_at_a_time = Lock()
        super().begin()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The paths of the store, in order, those that are away or detached included."""
        return self._parts.store.directories

    def detach(self, path: str | Path) -> bool:
        """Use this path, which is empty, no more: its drive may be taken away. Every later opening
        does without it, until another takes its place. Returns whether it was not detached before.

        Raises StoreError: not of this store, the first one, not empty, still in use by operations
        that do not end, or the store cannot be told; DeviceError, if files cannot be changed on
        this device; EngineError when stopped. Nothing has changed then, but where the store could
        not be told the path is out of use until the next opening.
        """
        with self._one_at_a_time:
            number = self._number(path)
            store = self._parts.store
            if number in store.superblock.detached:
                return False
            self._shut(number)
            none = File(-1, str(store.directories[number]), store.superblocks[number].file_bytes)
            old = self._change_file(number, none, used=number not in store.missing)
            detached = tuple(sorted({*store.superblock.detached, number}))
            with store.guard:
                try:
                    store.restate(detached=detached)
                except StoreError:  # whatever the medium says now, nothing lies there
                    self._change_back(number, old)
                    raise
                self._hold(number, none, -1)
                store.missing |= {number}
            self._parts.driver.paths.detached.add(number)
        log.info("%s: this path is detached, its drive may go", path)
        return True

    def attach(
        self,
        path: str | Path,
        new: str | Path | None = None,
        *,
        fill: bool = True,
        raw: bool = False,
        force: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Make a part of the store in `new`, and have it take the place of `path`, which is empty,
        detached or away. From then on blocks go there. `new` None: the same place, which is
        detached. `fill`, `raw`, `force`, `progress`: as for a store that is made.

        Raises what `detach` does, and StoreError if the part cannot be made there.
        """
        with self._one_at_a_time:
            number = self._number(path)
            place = Path(path if new is None else new)
            store = self._parts.store
            used = number not in store.missing
            if new is None and used:
                raise StoreError(f"store {store.where}: {path} is in use; detach it first")
            if new is not None and place.absolute() == self._places()[number]:
                raise StoreError(f"store {store.where} has the path {new} already")
            store.named(number, place)
            self._shut(number)
            try:
                shape = store.superblock.of_stripe(number)
                if new is None:
                    self._clear(place, shape, raw=raw)
                create_part(place, shape, fill=fill, raw=raw, force=force, progress=progress)
            except BaseException:
                self._open_again(number, used=used)
                raise
            file = self._swap(number, place, raw=raw, used=used)
            with self.engine.lock:
                self._serve(number, file, str(path))
        log.info("%s: this path is in the place of %s, blocks go there", place, path)

    # --- steps ---

    def _number(self, path: str | Path) -> int:
        store = self._parts.store
        if store.read_only:
            raise StoreError(f"store {store.where} is open for reading only")
        places = self._places()
        wanted = Path(path).absolute()
        if wanted in places[:1]:
            raise StoreError(
                f"store {store.where}: its first path cannot go: it holds the journal, and names "
                "the others"
            )
        if wanted not in places:
            there = ", ".join(map(str, places)) or "none"
            raise StoreError(f"store {store.where} has no path {path}; it has {there}")
        return places.index(wanted)

    def _places(self) -> list[Path]:
        return [place.absolute() for place in self._parts.store.directories]

    def _shut(self, number: int) -> None:
        """No operation is for this path from here on, and none is in flight. Raises StoreError."""
        parts, engine = self._parts, self.engine
        where = parts.store.directories[number]
        used = number not in parts.store.missing
        with engine.lock:
            engine.check()
            self._puts.room.tidy()
            if count := parts.catalog.taken_on(number):
                raise StoreError(
                    f"store {parts.store.where}: {count} blocks lie on {where}; drain it first, "
                    "and wait until it is empty (a block that was looked up stays for its lease)"
                )
            parts.driver.paths.lose(number)
        if not engine.wait(lambda: not self._in_use(number), engine.clock() + _PATIENCE_NS):
            self._open_again(number, used=used)
            raise StoreError(
                f"store {parts.store.where}: operations on {where} have not ended for 10 s; see "
                "the kernel log, and try again"
            )

    def _in_use(self, number: int) -> bool:
        with self.engine.lock:
            state = self._parts.core.staging.state
            reading: Slots = np.flatnonzero((state == READING) | (state == ABANDONED))
            return self._parts.driver.uses(number, reading)

    def _open_again(self, number: int, *, used: bool) -> None:
        if used:
            with self.engine.lock:
                paths = self._parts.driver.paths
                paths.found(number, paths.names[number])

    def _clear(self, place: Path, shape: Superblock, *, raw: bool) -> None:
        """Remove the part that was detached there, if it is this one."""
        if not exists(place, raw=raw):
            return
        found = peek(place, raw=raw)
        if (found.store_id, found.stripe) == (shape.store_id, shape.stripe):
            erase([place], raw=raw)

    def _swap(self, number: int, place: Path, *, raw: bool, used: bool) -> File:
        """A part that has just been made takes the place of another, for the device and for every
        later opening."""
        store = self._parts.store
        file, shape, lock = open_part(place, raw=raw)
        try:
            old = self._change_file(number, file, used=used)
        except BaseException:
            close_all([file.fd, lock])
            erase([place], raw=raw)
            raise
        folders = list(store.directories)
        folders[number] = place
        with store.guard:
            try:
                store.restate(**store.named(number, place))
            except StoreError:  # whichever paths the medium names now, both parts are there
                self._change_back(number, old)
                close_all([file.fd, lock])
                if not store.files:  # closed, and so nothing was written
                    erase([place], raw=raw)
                raise
            self._hold(number, file, lock)
            store.missing -= {number}
            store.directories = tuple(folders)
            store.superblocks[number] = shape
            store.proofs[file.path] = "written and flushed when it was attached"
        return file

    def _change_file(self, number: int, file: File, *, used: bool) -> File:
        """The old one. Raises DeviceError, EngineError: then nothing has changed."""
        with self.engine.lock:
            try:
                self.engine.check()
                self._parts.device.change_file(number, file)
            except (DeviceError, EngineError):
                self._open_again(number, used=used)
                raise
            self.engine.driver.gate.change_file(number, file)
            return self._parts.store.files[number]

    def _change_back(self, number: int, file: File) -> None:
        with self.engine.lock, suppress(DeviceError, OSError):  # it may be closed
            self._parts.device.change_file(number, file)
            self.engine.driver.gate.change_file(number, file)

    def _hold(self, number: int, file: File, lock: int) -> None:
        """The store's descriptors are these; the old ones are closed."""
        store = self._parts.store
        close_all([store.files[number].fd, store.locks[number]])
        store.files[number], store.locks[number] = file, lock

    def _serve(self, number: int, file: File, old: str) -> None:
        """Blocks go there. The lock is held."""
        store, paths = self._parts.store, self._parts.driver.paths
        hint_lifetime([file], self.options.ttl_s)
        gone = Path(old).absolute()
        left = tuple(path for path in self.options.drain if Path(path).absolute() != gone)
        self.options = replace(self.options, drain=left)
        self._drains.go(sorted(paths.draining - {number}))
        paths.found(number, file.path)
        self._puts.room.folders = store.folders
