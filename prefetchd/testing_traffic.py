"""Invented traffic for a predictor: what an engine might tell it and ask of it, from a seed.

Decides the order and the shape of calls: decode layer by layer, with page hints and without;
restores that a chain hint announces; requests that end and requests that never say so; empty
batches. Refuses to know any predictor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefetchd.model import (
    NO_IDS,
    Access,
    ChainHint,
    DoneHint,
    Geometry,
    Ids,
    Outcome,
    PageHint,
)

ACTIVE_REQUESTS = 3
LIMITS = 256, 16, 3
LAYER_NS = 250_000
_BATCH_DEMANDS = 6
_WINDOW_BLOCKS, _FAR_BLOCKS = 3, 4
_REASONS = "end_turn", "tool_use", ""


@dataclass(frozen=True, slots=True)
class Ask:
    """The arguments of a call of `predict`."""

    now_ns: int
    limit: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Pages of the last guess have ended; their verdicts come from this seed."""

    seed: int


Told = tuple[Access, ...] | PageHint | ChainHint | DoneHint | Ask | Ended


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a hook. Demands are a batch, for `on_accesses` or one by one for `on_access`."""

    hook: str
    told: Told

    def __str__(self) -> str:
        told = self.told
        if isinstance(told, tuple):
            pages = sum(len(access.pages) for access in told)
            return f"{self.hook} of {pages} pages in {len(told)} demands"
        if isinstance(told, PageHint):
            return f"{self.hook} of {len(told.pages)} pages"
        if isinstance(told, ChainHint | DoneHint):
            return f"{self.hook} of request {told.request}, {len(told.blocks)} blocks"
        return self.hook


def traffic(geometry: Geometry, *, seed: int, turns: int, request_turns: int = 4) -> Iterator[Step]:
    """`turns` passes over the layers by a few requests at a time, and what comes between them.

    Every `request_turns` passes a new request comes. Arrays are new with each step. The same
    arguments give the same steps, byte for byte.
    """
    engine = _Engine(geometry, seed)
    for turn in range(turns):
        if turn % request_turns == 0:
            yield from engine.begin()
        if turn % 7 == 3:
            yield from engine.empty()
        if turn % 5 == 4:
            yield from engine.restore()
        # By threes, so that each request knows turns with hints, with scores and with neither.
        yield from engine.decode(hints=turn // 3 % 3 == 0, scores=turn // 3 % 3 != 2)


class _Engine:
    def __init__(self, geometry: Geometry, seed: int) -> None:
        self._geometry = geometry
        self._random = np.random.default_rng(seed)
        self._now_ns = 1_000_000_000
        self._asked = 0
        self._begun = 0
        self._chains: dict[int, Ids] = {}  # of active requests, oldest first, in prefix order

    def begin(self) -> Iterator[Step]:
        """A request comes, half of them announced, and the oldest ends, some without a word."""
        if len(self._chains) == ACTIVE_REQUESTS:
            oldest = next(iter(self._chains))
            chain = self._chains.pop(oldest)
            if oldest % 3:
                blocks = chain if oldest % 2 else NO_IDS
                yield Step("on_done_hint", DoneHint(oldest, _REASONS[oldest % 3], None, blocks))
                yield self._ask()
        request, self._begun = self._begun, self._begun + 1
        chain = self._chain()
        self._chains[request] = chain
        if request % 2:
            start_ns = self._now_ns + 50 * LAYER_NS if request % 4 == 1 else None
            yield Step("on_chain_hint", ChainHint(request, chain.copy(), start_ns))
            yield self._ask()

    def _chain(self) -> Ids:
        """Distinct blocks: the start is everybody's, the rest a run from somewhere."""
        blocks = self._geometry.blocks
        shared = np.arange(min(2, blocks))
        rest = np.arange(blocks)[len(shared) :]
        start = int(self._random.integers(0, max(1, len(rest) // 2)))
        length = int(self._random.integers(1, max(2, len(rest) // 2 + 1)))
        return np.concatenate([shared, rest[start : start + length]])

    def empty(self) -> Iterator[Step]:
        """What has nothing in it, and the end of a request that nobody knows."""
        no_codes, no_scores = np.empty(0, np.uint8), np.empty(0, np.float32)
        yield Step("on_page_hint", PageHint(np.empty(0, np.int64), no_scores))
        yield self._ask()
        yield Step("on_accesses", (Access(np.empty(0, np.int64), no_codes, now_ns=self._now_ns),))
        yield Step("on_chain_hint", ChainHint(1 << 40, np.empty(0, np.int64)))
        yield Step("on_done_hint", DoneHint(1 << 41))
        yield self._ask()

    def restore(self) -> Iterator[Step]:
        """A request demands its first blocks in all layers at once."""
        request, chain = next(iter(self._chains.items()))
        layers = np.arange(self._geometry.layers)
        pages = (chain[:6, None] * self._geometry.layers + layers).reshape(-1)
        yield Step("on_accesses", (self._access(pages, request, scores=False),))
        yield self._ask()

    def decode(self, *, hints: bool, scores: bool) -> Iterator[Step]:
        """Each layer in turn, demands in batches as an engine that hints shows them."""
        layers = self._geometry.layers
        enough = min(_BATCH_DEMANDS, max(1, layers // 2)) if hints else 1
        requests = list(self._chains)
        request = requests[int(self._random.integers(len(requests)))]
        batch: list[Access] = []
        for layer in range(layers):
            pages = self._wanted(request, layer)
            if hints:
                yield self._page_hint(pages, layer)
                yield self._ask()
            batch.append(self._access(pages, request, scores=scores))
            if len(batch) == enough or layer == layers - 1:
                yield Step("on_accesses", tuple(batch))
                batch = []
                yield self._ask()
            if layer % 8 == 5 or layers == 1:
                yield Step("on_feedback", Ended(int(self._random.integers(1 << 30))))

    def _wanted(self, request: int, layer: int) -> Ids:
        """A sink, the end of the chain and a few far blocks, in no order."""
        chain = self._chains[request]
        far = self._random.choice(chain, min(_FAR_BLOCKS, len(chain)), replace=False)
        blocks = np.unique(np.concatenate([chain[:1], far, chain[-_WINDOW_BLOCKS:]]))
        return self._geometry.page_ids(self._random.permutation(blocks), layer)

    def _page_hint(self, wanted: Ids, layer: int) -> Step:
        """Most of what will be wanted, and some that will not."""
        other = self._geometry.page_ids(self._random.choice(self._geometry.blocks, 3), layer)
        hinted = np.unique(np.concatenate([wanted[1:], other]))
        hinted = self._random.permutation(hinted)
        scores = -np.sort(-self._random.normal(size=len(hinted)).astype(np.float32))
        return Step("on_page_hint", PageHint(hinted, scores))

    def _access(self, pages: Ids, request: int, *, scores: bool) -> Access:
        self._now_ns += LAYER_NS
        outcomes = self._random.integers(0, len(Outcome), len(pages)).astype(np.uint8)
        mass = self._random.random(len(pages)).astype(np.float32) if scores else None
        return Access(pages, outcomes, request, mass, self._now_ns)

    def _ask(self) -> Step:
        self._asked += 1
        return Step("predict", Ask(self._now_ns, LIMITS[self._asked % len(LIMITS)]))
