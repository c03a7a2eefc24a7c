"""The node's memory that staging may take: one bound over all namespaces of a daemon.

Decides what fits, and how it is told when it does not. Takes no memory itself.
"""

from __future__ import annotations

import os
from threading import Lock

from prefetchd.store_place import StoreError

_SHARE = 0.8  # of the machine's


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Memory:
    """`most_bytes` None: 80 % of the machine's. Any thread may call."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = int(_SHARE * machine_bytes()) if most_bytes is None else most_bytes
        self._taken: dict[object, int] = {}
        self._lock = Lock()

    @property
    def taken_bytes(self) -> int:
        return sum(self._taken.values())

    def take(self, owner: object, namespace: str, size: int) -> None:
        """`owner` gives it back. Raises StoreError: what there is, who has it, and what to do."""
        with self._lock:
            others = self.taken_bytes
            if others + size > self.most_bytes:
                raise StoreError(
                    f"staging of namespace {namespace!r} takes {size} bytes with its write "
                    f"buffers; of the {self.most_bytes} bytes that this daemon may use, "
                    f"{others} are taken, by {len(self._taken)} namespaces: lower its `staging` "
                    "or theirs, or raise `memory` in [daemon]"
                )
            self._taken[owner] = size

    def give_back(self, owner: object) -> None:
        with self._lock:
            self._taken.pop(owner, None)
