"""The storage device `faulty`: any other device, with faults put in on purpose.

Decides from a seed, or from a script, which operations go wrong and how; the operations are
numbered from 0 in the order in which they are accepted, and the same numbers, kinds and seed give
the same faults however the wrapped device is timed. It has no clock. Knows nothing of what runs
below: it is given an open device and closes it.

The faults, and the operations they apply to (others of that number run unharmed):

    eio     any     ends with -EIO; no byte moves
    enospc  write   ends with -ENOSPC; no byte moves
    short   read    moves fewer whole alignment units than asked, perhaps none, and says so
    flip    read    succeeds with one bit of what was read inverted in the arena
    stall   any     waits; its bytes move only when it is let go, so that whoever used its arena
                    range in the meantime finds it overwritten
    lose    any     its bytes move but it never completes, and it takes up depth until the close
"""

from __future__ import annotations

import errno
import os
import select
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd.device import DONE, OP, READ, WRITE, Completions, File, Ops, StorageDevice

KINDS = ("eio", "enospc", "short", "flip", "stall", "lose")
_ONLY = {"enospc": WRITE, "short": READ, "flip": READ}


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. Each of the six is the probability of that fault, and they exclude each
    other, so their sum is at most 1.

    `script` names faults by operation number: `((3, "eio"), (7, "flip"))`; it goes before chance.
    `broken`: files on which every operation ends with -EIO; `Faulty.broken` can be changed later.
    `stall_reaps`: calls of `reap` that a stalled operation waits for; 0 for ever, or until
    `Faulty.release_stalled`.
    """

    seed: int = 0
    eio: float = 0.0
    enospc: float = 0.0
    short: float = 0.0
    flip: float = 0.0
    stall: float = 0.0
    lose: float = 0.0
    stall_reaps: int = 0
    script: tuple[tuple[int, str], ...] = ()
    broken: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        chances = [getattr(self, kind) for kind in KINDS]
        if min(chances) < 0 or sum(chances) > 1 + 1e-9 or self.stall_reaps < 0:
            raise ValueError(f"probabilities are at least 0 and add up to at most 1: {self}")
        unknown = [kind for _, kind in self.script if kind not in KINDS]
        if unknown:
            raise ValueError(f"unknown faults in the script: {unknown}; there are {KINDS}")


class Faulty(StorageDevice):
    """`inner` with `faults`. Tags must be unique among the operations in flight.

    `injected` counts, by kind, the faults that were really put in.
    """

    name = "faulty"
    on_files = False

    def __init__(self, inner: StorageDevice, faults: Faults) -> None:
        super().__init__(inner.files, inner.arena, inner.depth)
        self.inner = inner
        self.faults = faults
        self.engine = f"{inner.engine}, with faults"
        self.notes = (*inner.notes, "faults are injected on purpose")
        self.injected = dict.fromkeys(KINDS, 0)
        self._bounds = np.cumsum([getattr(faults, kind) for kind in KINDS])
        self._random = np.random.default_rng(faults.seed)
        self._script = dict(faults.script)
        self.broken = set(faults.broken)
        self._accepted = 0
        self._waiting: Ops = np.empty(0, OP)  # for room below
        self._ended: list[tuple[int, int]] = []  # without ever reaching `inner`
        self._stalled: list[tuple[int, Ops]] = []  # reaps left, and the operation
        self._losing: set[int] = set()  # tags whose completion is still to be swallowed
        self._lost = 0  # completions swallowed
        self._flipping: dict[int, tuple[int, float]] = {}  # tag: where in the arena, and which bit
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()  # readable when either of the two is
        self._epoll.register(self._event, select.EPOLLIN)
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._closed = False

    @property
    def in_flight(self) -> int:
        held = len(self._waiting) + len(self._ended) + len(self._stalled) + self._lost
        return 0 if self._closed else self.inner.in_flight + held

    def submit(self, ops: Ops) -> int:
        ops = ops[: self.depth - self.in_flight].copy()  # a short read changes its length
        passed: NDArray[np.bool_] = np.ones(len(ops), np.bool_)
        for index, kind, chance in self._choose(ops):
            passed[index] = self._inject(kind, chance, ops[index])
        if self._ended:
            os.eventfd_write(self._event, 1)
        self._accepted += len(ops)
        self._forward(ops[passed])
        return len(ops)

    def _choose(self, ops: Ops) -> list[tuple[int, str, float]]:
        """Which of the next operations are harmed: index, fault, a number in [0, 1) for details."""
        count = len(ops)
        # Two draws an operation, whatever comes of them: batch borders must not shift the rest.
        draws = self._random.random((count, 2))
        kinds = np.searchsorted(self._bounds, draws[:, 0], side="right")
        for number, kind in self._script.items():
            if self._accepted <= number < self._accepted + count:
                kinds[number - self._accepted] = KINDS.index(kind)
        if self.broken:
            kinds[np.isin(ops["file"], sorted(self.broken))] = KINDS.index("eio")
        harmed = np.flatnonzero(kinds < len(KINDS))
        return [(int(i), KINDS[kinds[i]], float(draws[i, 1])) for i in harmed]

    def _inject(self, kind: str, chance: float, op: Any) -> bool:
        """Prepare one fault, perhaps changing `op` in place; whether `inner` is to see it now."""
        tag = int(op["tag"])
        if _ONLY.get(kind, op["kind"]) != op["kind"]:
            return True
        if kind == "flip":
            self._flipping[tag] = int(op["memory"]), chance
            return True
        self.injected[kind] += 1
        if kind == "stall":
            self._stalled.append((self.faults.stall_reaps, op.reshape(1).copy()))
        elif kind == "lose":
            self._losing.add(tag)
        elif kind == "short":
            op["length"] = self._shortened(int(op["length"]), int(op["file"]), chance)
            if op["length"] == 0:
                self._ended.append((tag, 0))
        else:
            self._ended.append((tag, -errno.EIO if kind == "eio" else -errno.ENOSPC))
        return kind == "lose" or (kind == "short" and op["length"] > 0)

    def _shortened(self, length: int, file: int, chance: float) -> int:
        known = 0 <= file < len(self.files)
        unit = self.files[file].alignment_bytes if known else 1
        return int(chance * (length // unit)) * unit

    def _forward(self, ops: Ops) -> None:
        if len(self._waiting):
            ops = np.concatenate([self._waiting, ops])
        self._waiting = ops[self.inner.submit(ops) :] if len(ops) else ops

    def reap(self) -> Completions:
        # The event is cleared before looking, so that a completion in between sets it again.
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        done = self.inner.reap()
        if self._losing or self._flipping:
            done = done[[self._harm(int(one["tag"]), int(one["result"])) for one in done]]
        if self._ended:
            done = np.concatenate([done, np.array(self._ended, DONE)])
            self._ended = []
        self._age_stalled()
        return done

    def _harm(self, tag: int, result: int) -> bool:
        """Do to a completion of `inner` what was decided; whether it is delivered."""
        if tag in self._losing:
            self._losing.remove(tag)
            self._lost += 1
            return False
        flip = self._flipping.pop(tag, None)
        if flip and result > 0:
            memory, chance = flip
            bit = int(chance * result * 8)
            self.arena[memory + bit // 8] ^= np.uint8(1 << bit % 8)
            self.injected["flip"] += 1
        return True

    def _age_stalled(self) -> None:
        aged = [(left - 1, op) for left, op in self._stalled]
        # Without a number of reaps the count starts at 0 and never comes by it again.
        self._stalled = [(left, op) for left, op in aged if left != 0]
        self._forward_all([op for left, op in aged if left == 0])

    def release_stalled(self) -> None:
        """Let every stalled operation go on: it moves its bytes now and completes after that."""
        released, self._stalled = self._stalled, []
        self._forward_all([op for _, op in released])

    def _forward_all(self, ops: list[Ops]) -> None:
        self._forward(np.concatenate([np.empty(0, OP), *ops]))

    def change_file(self, number: int, file: File) -> None:
        self.inner.change_file(number, file)
        self.files = self.inner.files

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Passed on. What is stalled or lost does not listen, as a drive that hangs would not."""
        self.inner.cancel(tags)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.inner.close()
        self._epoll.close()
        os.close(self._event)
