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
from prefetchd.device import DONE, SYNC, Arena, Completions, DeviceError, File, Ops, refusal
from prefetchd.device import StorageDevice as _StorageDevice
from prefetchd.hostinfo import may_lock_memory, uring_forbidden_because

BUFFER_BYTES_MAX = 1 << 30  # the kernel's limit for one registered buffer
_CANCEL_TAG = np.uint64(2**64 - 1)
# IOSQE_FIXED_FILE, IORING_FSYNC_DATASYNC, IORING_ASYNC_CANCEL_ANY of linux/io_uring.h
_FIXED_OPCODES = np.array(
    [io_uring.OP_READ_FIXED, io_uring.OP_WRITE_FIXED, io_uring.OP_FSYNC], np.uint8
)
_PLAIN_OPCODES = np.array([io_uring.OP_READ, io_uring.OP_WRITE, io_uring.OP_FSYNC], np.uint8)
_FIXED_FILE, _DATASYNC, _CANCEL_ANY = 1, 1, 4


class Uring(_StorageDevice):
    """See the contract. `single_issuer`: one thread makes all calls (benchmarks)."""

    name: ClassVar[str] = "uring"

    def __init__(
        self,
        files: Sequence[File],
        arena: Arena,
        depth: int,
        *,
        single_issuer: bool = False,
        poll_idle_ms: int = 0,
    ) -> None:
        super().__init__(files, arena, depth)
        try:
            # Twice the depth leaves room for cancellations beside a full load.
            self._ring = io_uring.Ring(
                2 * depth, single_issuer=single_issuer, poll_idle_ms=poll_idle_ms
            )
        except OSError as error:
            raise DeviceError(uring_forbidden_because(error)) from error
        if self._ring.entries < 2 * depth:
            most = self._ring.entries // 2
            self._note(f"depth {depth} is more than the kernel's rings hold; going on with {most}")
            self.depth = most
        self._in_flight = 0
        self._bells = 0  # completions to come that are nobody's
        self._refused: list[Completions] = []
        self._address = arena.ctypes.data
        self._fixed_buffers = self._register_arena()
        self._fixed_files = self._register_files()
        descriptors = range(len(files)) if self._fixed_files else [file.fd for file in files]
        self._descriptors = np.array(descriptors, np.int32)
        self._many_buffers = self._fixed_buffers and arena.nbytes > BUFFER_BYTES_MAX
        self._opcodes = _FIXED_OPCODES if self._fixed_buffers else _PLAIN_OPCODES
        template = np.zeros(self.depth, io_uring.SQE)
        template["flags"] = _FIXED_FILE if self._fixed_files else 0
        template["fd"] = self._descriptors[0] if files else -1
        self._template = template.view(io_uring.WHOLE_SQE)
        parts = ["io_uring"]
        parts.append("fixed buffers" if self._fixed_buffers else "unregistered buffers")
        parts.append("fixed files" if self._fixed_files else "plain files")
        self.engine = ", ".join(parts)

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

    def change_file(self, number: int, file: File) -> None:
        if self._fixed_files:
            try:
                self._ring.change_file(number, file.fd)
            except OSError as error:
                reason = errno.errorcode.get(error.errno or 0, "?")
                raise DeviceError(
                    f"{self.name} cannot change a registered file: {reason}; close the store and "
                    "use `prefetchd store replace`"
                ) from error
        else:
            self._descriptors[number] = file.fd
            self._template.view(io_uring.SQE)["fd"] = self._descriptors[0]
        self._put_file(number, file)

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
        # Read as unsigned, a negative kind is a huge one.
        highest = int(accepted["kind"].view(np.uint32).max())
        if highest > SYNC or not self._all_startable(accepted):
            accepted = self._refuse(accepted)
        if len(accepted):
            self._ring.push(self._entries(accepted, syncs=highest >= SYNC))
        return count

    def _all_startable(self, ops: Ops) -> bool:
        """Whether the kernel may be given all of these, whose kinds are right.

        It refuses a wrong file or range by itself where both are registered, but would take
        offset -1 for "where the file stands".
        """
        if ops["offset"].min() < 0:
            return False
        if self._fixed_buffers and self._fixed_files and not self._many_buffers:
            return True
        memory, length, file = ops["memory"], ops["length"], ops["file"]
        end = int((memory + length).max())
        inside = min(memory.min(), length.min(), file.min()) >= 0 and end <= self.arena.nbytes
        return bool(inside and file.max() < len(self.files))

    def _refuse(self, ops: Ops) -> Ops:
        """Complete what cannot be started, with a NOP as a bell; return the rest."""
        codes = [refusal(op, len(self.files), self.arena.nbytes) for op in ops.tolist()]
        results = np.array(codes, np.int64)
        refused = np.zeros(np.count_nonzero(results), DONE)
        refused["tag"], refused["result"] = ops["tag"][results != 0], results[results != 0]
        self._refused.append(refused)
        bell = np.zeros(1, io_uring.SQE)
        bell["user_data"] = _CANCEL_TAG
        self._bells += 1
        self._ring.push(bell)
        rest: Ops = ops[results == 0]
        return rest

    def _entries(self, ops: Ops, *, syncs: bool) -> NDArray[Any]:
        entries = self._template[: len(ops)].copy().view(io_uring.SQE)
        kind, memory = ops["kind"], ops["memory"]
        entries["opcode"] = self._opcodes.take(kind)
        entries["offset"] = ops["offset"]
        entries["address"] = memory + self._address
        entries["length"] = ops["length"]
        entries["user_data"] = ops["tag"]
        if len(self.files) > 1:
            entries["fd"] = self._descriptors[ops["file"]]
        if self._many_buffers:
            first = memory // BUFFER_BYTES_MAX
            across = first != (memory + ops["length"] - 1) // BUFFER_BYTES_MAX
            entries["buffer"] = np.where(across, 0, first)
            entries["opcode"][across] = _PLAIN_OPCODES[kind[across]]
        if syncs:
            sync = kind == SYNC
            for name in ("address", "length", "offset", "buffer"):
                entries[name][sync] = 0
            entries["op_flags"][sync] = _DATASYNC
        return entries

    def reap(self) -> Completions:
        if self._in_flight:
            self._ring.nudge()
        entries = self._ring.reap()
        if self._bells:
            mine = entries["user_data"] != _CANCEL_TAG
            self._bells -= len(entries) - int(np.count_nonzero(mine))
            entries = entries[mine]
        done = np.empty(len(entries), DONE)
        done["tag"] = entries["user_data"]
        done["result"] = entries["result"]
        if self._refused:
            done = np.concatenate([done, *self._refused])
            self._refused = []
        self._in_flight -= len(done)
        return done

    def reap_some(self, count: int) -> Completions:
        # One call waits for many: a wake-up for each would cost more than the read.
        if self._ring.waiting() < count:
            self._ring.wait(count, 1_000_000_000)
        return self.reap()

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        self._cancel(tags[: self._ring.room()], 0)

    def _cancel(self, tags: NDArray[np.uint64], flags: int) -> None:
        entries = np.zeros(len(tags), io_uring.SQE)
        entries["opcode"] = io_uring.OP_ASYNC_CANCEL
        entries["fd"] = -1
        entries["address"] = tags
        entries["op_flags"] = flags
        entries["user_data"] = _CANCEL_TAG
        self._bells += len(tags)
        self._ring.push(entries)

    def fileno(self) -> int:
        return self._ring.fd

    def wait(self, timeout_ns: int, count: int = 1) -> None:
        if self._ring.waiting() < count:
            self._ring.wait(count, timeout_ns)

    def close(self) -> None:
        if self._ring.fd < 0:
            return
        # The arena belongs to the device until every operation has ended.
        self._cancel(np.zeros(1, np.uint64), _CANCEL_ANY)
        while self._in_flight:
            self._ring.wait(1, 1_000_000_000)
            self.reap()
        self._ring.close()
