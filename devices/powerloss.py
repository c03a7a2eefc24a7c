"""The storage device `powerloss`: memory that shows what a medium could hold if power failed now.

Decides from a seed what becomes of every write that no flush has covered: gone, whole, or torn
between sectors, in any order. Only for tests; decides nothing else.

A flush covers what had been reaped when it was submitted, and nothing more: that is the least that
a device may do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import SYNC, WRITE, Arena, Completions, File, Ops
from prefetchd.device import StorageDevice as _StorageDevice
from prefetchd.devices.memory import Memory

SECTOR_BYTES = 512

Image = list[NDArray[np.uint8]]
_Write = tuple[int, int, NDArray[np.uint8]]  # file, offset, bytes


class PowerLoss(Memory, _StorageDevice):
    """See `Memory`; `contents` are what was there at the start, and durable."""

    name = "powerloss"
    engine = "arrays in process memory that forget"

    def __init__(
        self,
        files: Sequence[File],
        arena: Arena,
        depth: int,
        *,
        contents: Image | None = None,
    ) -> None:
        super().__init__(files, arena, depth, contents=contents)
        self.durable: Image = [file.copy() for file in self.contents]
        self._unreaped: dict[int, _Write] = {}
        self._unflushed: list[_Write] = []
        self._covering: dict[int, list[_Write]] = {}  # by the tag of the flush

    def change_file(self, number: int, file: File) -> None:
        super().change_file(number, file)
        self.durable[number] = self.contents[number].copy()

    def submit(self, ops: Ops) -> int:
        taken = super().submit(ops)
        for op in ops[:taken]:
            tag, file = int(op["tag"]), int(op["file"])
            if op["kind"] == WRITE:
                start, memory, length = int(op["offset"]), int(op["memory"]), int(op["length"])
                data = self.arena[memory : memory + length].copy()
                self._unreaped[tag] = file, start, data
            elif op["kind"] == SYNC:
                self._covering[tag] = [write for write in self._unflushed if write[0] == file]
        return taken

    def reap(self) -> Completions:
        done = super().reap()
        for tag in done["tag"].tolist():
            if tag in self._unreaped:
                self._unflushed.append(self._unreaped.pop(tag))
            elif tag in self._covering:
                self._flush(self._covering.pop(tag))
        return done

    def _flush(self, covered: list[_Write]) -> None:
        known = {id(write) for write in covered}
        for file, start, data in (write for write in self._unflushed if id(write) in known):
            self.durable[file][start : start + len(data)] = data
        self._unflushed = [write for write in self._unflushed if id(write) not in known]

    def crash(self, seed: int) -> Image:
        """What the files hold after a power failure at this moment; the device goes on."""
        random = np.random.default_rng(seed)
        image = [file.copy() for file in self.durable]
        left = [*self._unflushed, *self._unreaped.values()]
        keep = random.choice([0.1, 0.5, 0.9])
        for place in random.permutation(len(left)):
            file, start, data = left[place]
            fate = random.random()
            if fate < keep:
                image[file][start : start + len(data)] = data
            elif fate < keep + (1 - keep) / 2:
                _tear(image[file], start, data, random)
        return image


def _tear(medium: NDArray[np.uint8], start: int, data: NDArray[np.uint8], random: Any) -> None:
    for first in range(0, len(data), SECTOR_BYTES):
        if random.random() < 0.5:
            sector = data[first : first + SECTOR_BYTES]
            medium[start + first : start + first + len(sector)] = sector
