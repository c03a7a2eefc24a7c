"""Sinks and a moving window: the pages that almost every step of a decode reads.

Decides which blocks are near the end of each request, and asks to hold them for all layers.
Assumes that a request's blocks are numbered in the order of its tokens; knows nothing of far pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetchd.model import NO_IDS, Access, ChainHint, DoneHint, Geometry, Ids, Scores
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors._merging import best_first

REQUESTS_MAX = 8  # the oldest is forgotten: a window for each must fit into half of the staging
LAYERS_AHEAD = 2  # further layers have their turn soon enough, and their frontier may move
RATE_STEP = 1 / 64  # how fast the measured chances follow: about two decode steps of 30 layers


@dataclass(slots=True)
class _Stream:
    """One request: its highest block so far, and the layer it demanded last."""

    frontier: int
    layer: int


class SlidingWindow(Predictor):
    """Keeps the first `sink_blocks` and each request's last `window_blocks`, in every layer.

    The window shrinks until sinks and windows of all layers take at most half of the staging;
    several requests share that half. The confidence of a page is the measured chance that a
    demand includes a block at its distance from the frontier.
    """

    name = "sliding_window"
    by_past_use = True

    def __init__(
        self, geometry: Geometry, slots: int, *, sink_blocks: int = 1, window_blocks: int = 64
    ) -> None:
        super().__init__(geometry, slots)
        held_blocks = slots // 2 // geometry.layers
        self.sink_blocks = min(sink_blocks, held_blocks, geometry.blocks)
        self.window_blocks = max(0, min(window_blocks, held_blocks - self.sink_blocks))
        self._room_blocks = held_blocks - self.sink_blocks
        self._streams: dict[int, _Stream] = {}  # least recently active first
        # By distance from the frontier, then by number of the sink.
        self._chances = np.full(self.window_blocks + self.sink_blocks, 0.5, np.float32)
        self._layers = np.arange(geometry.layers)
        self._keep: Ids | None = NO_IDS

    def on_access(self, access: Access) -> None:
        if len(access.pages) == 0:
            return
        blocks = access.pages // self.geometry.layers
        stream = self._stream(access.request, int(blocks.max()))
        stream.layer = int(access.pages[-1]) % self.geometry.layers
        distance = stream.frontier - blocks
        demanded = np.zeros(len(self._chances), np.float32)
        demanded[distance[distance < self.window_blocks]] = 1
        demanded[self.window_blocks + blocks[blocks < self.sink_blocks]] = 1
        self._chances += (demanded - self._chances) * np.float32(RATE_STEP)

    def on_chain_hint(self, hint: ChainHint) -> None:
        blocks = self.geometry.real(hint.blocks)
        if len(blocks):
            self._stream(hint.request, int(blocks.max()))

    def on_done_hint(self, hint: DoneHint) -> None:
        if self._streams.pop(hint.request, None) is not None:
            self._keep = None

    def predict(self, now_ns: int, limit: int) -> Guess:
        if self._keep is None:  # only remembered work: the same calls would give it again
            self._keep = self._kept_pages()
        if limit <= 0:
            return Guess(keep=self._keep)
        pages, confidence = [NO_IDS], [np.empty(0, np.float32)]
        for ahead in range(min(LAYERS_AHEAD, self.geometry.layers)):
            for stream in reversed(self._streams.values()):
                blocks, chances = self._near(stream)
                layer = (stream.layer + 1 + ahead) % self.geometry.layers
                pages.append(self.geometry.page_ids(blocks, layer))
                confidence.append(chances)
        every, chances = np.concatenate(pages), np.concatenate(confidence)
        best = best_first(every, chances)[:limit]  # requests share their sinks
        return Guess(every[best], chances[best], keep=self._keep)

    def _stream(self, request: int, highest: int) -> _Stream:
        """The request's stream, now the most recently active, with its frontier moved on."""
        stream = self._streams.pop(request, None)
        if stream is None:
            stream = _Stream(-1, self.geometry.layers - 1)
            if len(self._streams) == REQUESTS_MAX:
                self._streams.pop(next(iter(self._streams)))
        self._streams[request] = stream
        if highest > stream.frontier:
            stream.frontier = highest
            self._keep = None
        return stream

    def _near(self, stream: _Stream) -> tuple[Ids, Scores]:
        """Sinks first, then the window from the frontier backwards, with their chances."""
        window = min(self.window_blocks, self._room_blocks // len(self._streams))
        start = max(self.sink_blocks, stream.frontier + 1 - window)
        near = np.arange(stream.frontier, start - 1, -1)
        sinks = np.arange(min(self.sink_blocks, stream.frontier + 1))
        chances = self._chances
        return (
            np.concatenate([sinks, near]),
            np.concatenate([chances[self.window_blocks :][: len(sinks)], chances[: len(near)]]),
        )

    def _kept_pages(self) -> Ids:
        """Sinks and windows in all layers, the nearest blocks first, each page once."""
        blocks = [self._near(stream)[0] for stream in reversed(self._streams.values())]
        if not blocks:
            return NO_IDS
        every = np.concatenate(blocks)
        rank = np.concatenate([np.arange(len(near)) for near in blocks])
        every = every[np.argsort(rank, kind="stable")]
        _, first = np.unique(every, return_index=True)
        distinct = every[np.sort(first)]
        return (distinct[:, None] * self.geometry.layers + self._layers).reshape(-1)
