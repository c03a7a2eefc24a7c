"""`uring`: the engine, an io_uring with fixed buffers and files, filled and reaped in batches.

Decides only how operations become submission entries and what to do without when the machine
forbids it (registration), saying so in `notes`. Everything else is its caller's.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from prefetchd import ring as io_uring
from prefetchd.device import DONE, SYNC, WRITE, Arena, Completions, DeviceError, File, Ops, refusal
from prefetchd.device import StorageDevice as _StorageDevice
from prefetchd.hostinfo import may_lock_memory, uring_forbidden_because
from prefetchd.model import Mask

BUFFER_BYTES_MAX = 1 << 30  # the kernel's limit for one registered buffer
_CANCEL_TAG = np.uint64(2**64 - 1)
# IOSQE_FIXED_FILE, IORING_FSYNC_DATASYNC, IORING_ASYNC_CANCEL_ANY of linux/io_uring.h
_FIXED_FILE, _DATASYNC, _CANCEL_ANY = 1, 1, 4


class Uring(_StorageDevice):
    """See the contract. `single_issuer`: one thread makes all calls (benchmarks)."""

    name: ClassVar[str] = "uring"

    def __init__(
        self, files: Sequence[File], arena: Arena, depth: int, *, single_issuer: bool = False
    ) -> None:
        super().__init__(files, arena, depth)
        try:
            # Twice the depth leaves room for cancellations beside a full load.
            self._ring = io_uring.Ring(2 * depth, single_issuer=single_issuer)
        except OSError as error:
            raise DeviceError(uring_forbidden_because(error)) from error
        if self._ring.entries < 2 * depth:
            most = self._ring.entries // 2
            self._note(f"depth {depth} is more than the kernel's rings hold; going on with {most}")
            self.depth = most
        self._in_flight = 0
        self._refused: list[Completions] = []
        self._address = arena.ctypes.data
        self._fixed_buffers = self._register_arena()
        self._fixed_files = self._register_files()
        self._descriptors = np.arange(len(files)) if self._fixed_files else self._raw_descriptors()
        self._sqe_flags = _FIXED_FILE if self._fixed_files else 0
        parts = ["io_uring"]
        parts.append("fixed buffers" if self._fixed_buffers else "unregistered buffers")
        parts.append("fixed files" if self._fixed_files else "plain files")
        self.engine = ", ".join(parts)

    def _raw_descriptors(self) -> NDArray[np.int64]:
        return np.array([file.fd for file in self.files], np.int64)

    def _register_arena(self) -> bool:
        size = self.arena.nbytes
        sizes = [min(BUFFER_BYTES_MAX, size - at) for at in range(0, size, BUFFER_BYTES_MAX)]
        if (limit := may_lock_memory(size)) is not None:
            self._note(
                f"staging is not registered: it needs {size} bytes of locked memory, the limit "
                f"(RLIMIT_MEMLOCK) is {limit}; raise it with `ulimit -l` or LimitMEMLOCK="
            )
            return False
        try:
            self._ring.register_buffers(self._address, sizes)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "?")
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            self._note(f"staging is not registered: {code} for {size} bytes (memlock {limit})")
            return False
        return True

    def _register_files(self) -> bool:
        try:
            self._ring.register_files([file.fd for file in self.files])
        except OSError as error:
            self._note(f"files are not registered: {errno.errorcode.get(error.errno or 0, '?')}")
            return False
        return True

    def _note(self, words: str) -> None:
        self.notes = (*self.notes, words)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def submit(self, ops: Ops) -> int:
        count = min(len(ops), self.depth - self._in_flight)
        if count <= 0:
            return 0
        self._in_flight += count
        accepted = ops[:count]
        if not self._startable(accepted).all():
            accepted = self._refuse(accepted)
        done = 0
        for place in self._ring.claim(len(accepted)):
            end = done + place.stop - place.start
            self._fill(self._ring.sqes[place], accepted[done:end])
            done = end
        self._ring.submit(len(accepted))
        return count

    def _startable(self, ops: Ops) -> Mask:
        """What the kernel may be given: it would take -1 for "where the file stands", and reach
        outside the arena where buffers are not registered."""
        file, kind, memory = ops["file"], ops["kind"], ops["memory"]
        end = memory + ops["length"]
        lowest = np.minimum(np.minimum(ops["offset"], ops["length"]), np.minimum(memory, kind))
        known = (file >= 0) & (file < len(self.files)) & (kind <= SYNC)
        startable: Mask = known & (lowest >= 0) & (end <= self.arena.nbytes)
        return startable

    def _refuse(self, ops: Ops) -> Ops:
        """Complete what cannot be started, with a NOP as a bell; return the rest."""
        codes = [refusal(op, len(self.files), self.arena.nbytes) for op in ops.tolist()]
        results = np.array(codes, np.int64)
        refused = np.zeros(np.count_nonzero(results), DONE)
        refused["tag"], refused["result"] = ops["tag"][results != 0], results[results != 0]
        self._refused.append(refused)
        bell = self._ring.sqes[self._ring.claim(1)[0]]
        bell[:] = 0
        bell["user_data"] = _CANCEL_TAG
        self._ring.submit(1)
        rest: Ops = ops[results == 0]
        return rest

    def _fill(self, entries: NDArray[Any], ops: Ops) -> None:
        memory, kind = ops["memory"], ops["kind"]
        writing = kind == WRITE
        if self._fixed_buffers:
            first = memory // BUFFER_BYTES_MAX
            fixed = first == (memory + ops["length"] - 1) // BUFFER_BYTES_MAX
            entries["buffer"] = np.where(fixed, first, 0)
            plain = np.where(fixed, io_uring.OP_READ_FIXED, io_uring.OP_READ)
            entries["opcode"] = plain + writing  # each write opcode follows its read
        else:
            entries["buffer"] = 0
            entries["opcode"] = io_uring.OP_READ + writing
        entries["flags"] = self._sqe_flags
        entries["ioprio"] = 0
        entries["fd"] = self._descriptors[ops["file"]]
        entries["offset"] = ops["offset"]
        entries["address"] = memory + self._address
        entries["length"] = ops["length"]
        entries["op_flags"] = 0
        entries["user_data"] = ops["tag"]
        entries["personality"] = 0
        entries["splice_fd"] = 0
        entries["rest"] = 0
        if (sync := kind == SYNC).any():
            for name in ("address", "length", "offset", "buffer"):
                entries[name][sync] = 0
            entries["opcode"][sync] = io_uring.OP_FSYNC
            entries["op_flags"][sync] = _DATASYNC

    def reap(self) -> Completions:
        entries = self._ring.reap()
        mine = entries["user_data"] != _CANCEL_TAG
        if not mine.all():
            entries = entries[mine]
        done = np.empty(len(entries), DONE)
        done["tag"] = entries["user_data"]
        done["result"] = entries["result"]
        if self._refused:
            done = np.concatenate([done, *self._refused])
            self._refused = []
        self._in_flight -= len(done)
        return done

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        self._cancel(tags[: self._ring.room()], 0)

    def _cancel(self, tags: NDArray[np.uint64], flags: int) -> None:
        done = 0
        for place in self._ring.claim(len(tags)):
            end = done + place.stop - place.start
            entries = self._ring.sqes[place]
            entries[:] = 0
            entries["opcode"] = io_uring.OP_ASYNC_CANCEL
            entries["fd"] = -1
            entries["address"] = tags[done:end]
            entries["op_flags"] = flags
            entries["user_data"] = _CANCEL_TAG
            done = end
        self._ring.submit(len(tags))

    def fileno(self) -> int:
        return self._ring.fd

    def wait(self, timeout_ns: int) -> None:
        if not self._ring.ready():
            self._ring.wait(1, timeout_ns)

    def close(self) -> None:
        if self._ring.fd < 0:
            return
        # The arena belongs to the device until every operation has ended.
        self._cancel(np.zeros(1, np.uint64), _CANCEL_ANY)
        while self._in_flight:
            self._ring.wait(1, 1_000_000_000)
            self.reap()
        self._ring.close()
