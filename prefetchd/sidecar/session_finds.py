"""One client's lookups: a few keys at a time, so that a long chain does not hold the loop.

Decides how many keys are looked up before it is somebody else's turn. A find is answered once, for
all its keys; a block that goes in between is told by its stamp, as ever.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefetchd.lookups import Found as FoundBlocks
from prefetchd.sidecar import replies
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import Find, Message
from prefetchd.sidecar.replies import Limits
from prefetchd.sidecar.session_puts import keys_of
from prefetchd.sidecar.wire import raw_of

_SLICE_KEYS = 1024
"""About 0.3 ms."""


class Finds:
    def __init__(
        self, namespace: Namespace, limits: Limits, reply: Callable[[Message], None]
    ) -> None:
        self._namespace = namespace
        self._limits = limits
        self._reply = reply
        self.under_way: Find | None = None
        """What is not answered yet, and of which more is to be looked up."""
        self._left: NDArray[np.uint8] = np.empty((0, 16), np.uint8)
        self._found: list[FoundBlocks] = []

    def take(self, message: Find) -> None:
        self._left, self._found = keys_of(message.keys, self._limits.keys), []
        self.go_on(message)

    def go_on(self, message: Find) -> None:
        """Raises EngineError; then there is nothing to go on with."""
        self.under_way = None
        keys, self._left = self._left[:_SLICE_KEYS], self._left[_SLICE_KEYS:]
        found = self._namespace.runtime.find(self._namespace.salted(keys))
        self._found.append(found)
        if len(found) == len(keys) and len(self._left):
            self.under_way = message
            return
        blocks = np.concatenate([part.blocks for part in self._found])
        stamps = np.concatenate([part.stamps for part in self._found])
        self._found = []
        raw = raw_of(blocks, np.int64), raw_of(stamps, np.int64)
        self._reply(replies.Found(message.id, *raw))
