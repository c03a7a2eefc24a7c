"""What a client says will be needed, and what it has read without asking. None of it is answered.

Decides which hints make no sense. Refuses to know what is made of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefetchd import model
from prefetchd.model import ChainHint, DoneHint, PageHint, Scores
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.protocol import (
    TIMEOUT_NS_MAX,
    USES_MAX,
    HintChain,
    HintDone,
    HintPages,
    Used,
)
from prefetchd.sidecar.replies import Limits
from prefetchd.sidecar.wire import array_of

REQUEST_BITS = 32
REQUEST_MASK = (1 << REQUEST_BITS) - 1
"""Of a request's number, as its client has it."""


class Notes:
    """`stream` makes a request's number one among those of all clients; `marks`: whether this
    client has any. All methods raise ValueError for what makes no sense."""

    def __init__(
        self,
        namespace: Namespace,
        limits: Limits,
        stream: Callable[[int], int],
        *,
        marks: bool,
    ) -> None:
        self._runtime = namespace.runtime
        self._most = limits.ids
        self._stream = stream
        self._marks = marks

    def pages(self, message: HintPages) -> None:
        pages = self._ids(message.pages, "pages")
        scores = self._scores(message.scores, len(pages))
        geometry = self._runtime.geometry
        inside = ((pages >= 0) & (pages < geometry.pages)).all()
        if not inside or len(pages) == 0 or len(np.unique(pages)) < len(pages):
            raise ValueError("a page hint names distinct pages of the store, at least one")
        if (pages % geometry.layers != pages[0] % geometry.layers).any():
            raise ValueError("a page hint names pages of one layer")
        self._runtime.hint(PageHint(pages, scores))

    def chain(self, message: HintChain) -> None:
        blocks = self._ids(message.blocks, "blocks")
        start_ns = self._time(message.lead_ns)
        self._runtime.hint(ChainHint(self._stream(message.request), blocks, start_ns))

    def done(self, message: HintDone) -> None:
        blocks = self._ids(message.blocks, "blocks")
        request, return_ns = self._stream(message.request), self._time(message.lead_ns)
        self._runtime.hint(DoneHint(request, message.reason, return_ns, blocks))

    def used(self, message: Used) -> None:
        pages, counts = self._ids(message.pages, "pages"), self._ids(message.counts, "counts")
        requests = array_of(message.requests, np.int64, self._most, "requests", len(counts))
        if not self._marks:
            raise ValueError("pages are read in place by those who have marks")
        if len(counts) > USES_MAX:
            raise ValueError(f"{len(counts)} demands in a message, {USES_MAX} are the most")
        if counts.min(initial=1) < 1 or counts.max(initial=1) > len(pages):
            raise ValueError("of each demand there is at least one page")
        if counts.sum() != len(pages):
            raise ValueError(f"{len(pages)} pages, of demands with {counts.sum()} in all")
        scores = None if message.scores is None else self._scores(message.scores, len(pages))
        streams = self._stream(0) + (requests & REQUEST_MASK)
        self._runtime.used(model.Used(pages, counts, streams, scores))

    def _ids(self, raw: bytes, what: str) -> NDArray[np.int64]:
        return array_of(raw, np.int64, self._most, what)

    def _scores(self, raw: bytes, count: int) -> Scores:
        return array_of(raw, np.float32, self._most, "scores", count)

    def _time(self, lead_ns: int | None) -> int | None:
        if lead_ns is None:
            return None
        return self._runtime.engine.clock() + max(-TIMEOUT_NS_MAX, min(lead_ns, TIMEOUT_NS_MAX))
