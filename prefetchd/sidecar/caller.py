"""What every client knows of its namespace, whatever way it waits.

Decides what makes no sense and is refused before it is sent, what is remembered from one attachment
to the next, and that another store than before is not used. Refuses to know how bytes travel.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefetchd import registry
from prefetchd.gpu import GpuDevice
from prefetchd.holds import check_demand
from prefetchd.hostinfo import Medium
from prefetchd.lookups import Keys, Stamps, as_keys
from prefetchd.model import Geometry, Ids, Scores
from prefetchd.options import GpuFactory
from prefetchd.sidecar.conversation import Attachment, stats_of
from prefetchd.sidecar.handshake import AwayError, SidecarError
from prefetchd.sidecar.remote import HeldTicket
from prefetchd.sidecar.replies import Limits, Reply
from prefetchd.sidecar.wire import ProtocolError
from prefetchd.sidecar.writes import Writes
from prefetchd.stats import Stats
from prefetchd.terms import as_pages, check_terms
from prefetchd.tickets import Driven, Ticket

log = logging.getLogger("prefetchd")

ANSWER_NS = 5_000_000_000
"""Within this the daemon answers what it need not wait for, and beyond a demand's own deadline."""


class Caller:
    """`lock` is held by whoever takes answers in."""

    geometry: Geometry
    slots: int
    slot_bytes: int
    page_bytes: int
    fingerprint: bytes
    medium: Medium
    notes: tuple[str, ...]
    timeout_ns: int
    daemon_pid: int
    _limits: Limits
    _stamps: NDArray[np.int64]
    _gpu: GpuDevice

    def __init__(self, gpu: str | GpuFactory) -> None:
        self._make_gpu = registry.gpu_device_class(gpu) if isinstance(gpu, str) else gpu
        self._attachment: Attachment | None = None
        self._writes: Writes | None = None
        self._open: set[int] = set()
        self.hints_dropped = 0
        """While the daemon was away."""

    def _attached(self, attachment: Attachment) -> None:
        """A daemon is there, maybe another one: its pages must mean what they meant before. Raises
        SidecarError, GpuError."""
        new, before = attachment.welcome, self._attachment
        if before is not None:
            for name in ("fingerprint", "layers", "blocks", "slots", "slot_bytes"):
                if getattr(new, name) != getattr(before.welcome, name):
                    raise SidecarError(f"the daemon is back with another {name}; connect anew")
        # A thread of the line's attaches again, and CUDA's current GPU is a thread's own.
        with nullcontext() if before is None else self._gpu.current():
            gpu = self._make_gpu(attachment.staging, new.slots)
        if before is not None:
            self._gpu.close()
        else:
            self._learn(attachment)
        for note in gpu.notes:
            self._note(note)
        self._attachment, self._gpu, self._writes = attachment, gpu, None
        self.daemon_pid = new.pid
        self._open = set()

    def _note(self, words: str) -> None:
        """Something is done another way than was to be expected: told once."""
        if words not in self.notes:
            self.notes = (*self.notes, words)
            log.warning("%s", words)

    def _learn(self, attachment: Attachment) -> None:
        welcome = attachment.welcome
        self.geometry = attachment.geometry
        self.slots, self.slot_bytes = welcome.slots, welcome.slot_bytes
        self.page_bytes = welcome.page_bytes
        self.fingerprint = welcome.fingerprint
        self.notes = tuple(welcome.notes)
        self.medium = Medium(*welcome.medium)
        self.timeout_ns = welcome.demand_timeout_ns
        self._limits = welcome.limits
        self._stamps = np.zeros(self.geometry.blocks, np.int64)  # as last told, 0: never

    def pages(self, blocks: Ids, layer: int) -> Ids:
        """Page ids (int64) of one layer of these blocks."""
        return self.geometry.checked_page_ids(np.asarray(blocks, np.int64), layer)

    def buffer(self, pages: int) -> Any:
        """A destination for `Ticket.push`: (pages, slot_bytes) bytes in the GPU's memory."""
        return self._gpu.buffer(pages)

    def peek(self, buffer: Any, pages: int, length: int) -> NDArray[np.uint8]:
        """The first `length` bytes of a buffer's first rows in ordinary memory, for checks."""
        return self._gpu.to_host(buffer[:pages, :length])

    # --- before anything is sent ---

    def _demanded(
        self, pages: Ids, stamps: Stamps | None, scores: Scores | None, *, broken: bool
    ) -> tuple[Ids, Stamps | None]:
        """The pages as they are now, and their stamps. `broken`: indices may be of another daemon's
        time, so those that this client was told of are asked for by their stamps. Raises
        ValueError."""
        pages = np.array(pages, np.int64)
        check_demand(pages, self.slots, self.geometry)
        for name, array in (("stamps", stamps), ("scores", scores)):
            if array is not None and array.shape != pages.shape:
                words = f"{pages.shape} pages with {array.shape} {name}; give one a page"
                raise ValueError(words)
        if stamps is None and broken:
            stamps = self._stamps[pages // self.geometry.layers]
        return pages, stamps

    def _to_put(
        self, keys: Keys, pages: NDArray[np.generic], durability: str, ttl_s: float | None
    ) -> tuple[list[bytes], NDArray[np.uint8]]:
        """Raises ValueError."""
        names = as_keys(keys)
        check_terms(durability, ttl_s)
        return names, as_pages(pages, len(names), self.geometry.layers, self.page_bytes)

    def _held_ticket(
        self,
        line: Driven,
        attachment: Attachment,
        number: int,
        pages: Ids,
        stamps: Stamps | None,
    ) -> HeldTicket | None:
        """A ticket of pages that are all staged and may be read without asking; None if not."""
        in_place = attachment.in_place
        if in_place is None or not 0 < len(pages) <= self._limits.ids:
            return None
        if (held := in_place.hold(pages, stamps)) is None:
            return None
        ticket = HeldTicket(line, self._gpu, attachment, number, pages, self._given_back)
        ticket.hold(in_place, *held)
        return ticket

    def _open_ticket(self, number: int) -> None:
        """Raises ValueError for one too many."""
        if len(self._open) >= self._limits.tickets:
            raise ValueError(f"{len(self._open)} demands are open, the most allowed: release some")
        self._open.add(number)

    def _given_back(self, ticket: Ticket) -> None:
        self._open.discard(ticket.number)

    def _writes_of(self, attachment: Attachment, lock: AbstractContextManager[Any]) -> Writes:
        if self._writes is None:
            self._writes = Writes(attachment, self._stamps, lock)
        return self._writes

    # --- after something has come ---

    @staticmethod
    def _stats_of(reply: Reply, gpu: str) -> Stats:
        """Raises AwayError where there are no figures."""
        try:
            return stats_of(reply, gpu)
        except ProtocolError as error:
            raise AwayError(str(error)) from error
