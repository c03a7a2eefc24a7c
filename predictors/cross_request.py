"""What earlier requests read tells what this one will read: prefix chains with path confidence.

Decides which blocks follow, from hints (exact) or from the chains it has seen (guessed), and which
pages of those blocks are worth reading. It knows nothing of attention within a request.

A chain is kept as one successor a block: the block that came next last time. A successor counts
only if the block before matches as well, because the first block of a prompt is often everybody's
and says nothing. How sure a path is, is the product of the chances of its edges, and a path ends
where that product falls under a floor: the stop rule of the signature path prefetcher (Kim et al.,
"Path Confidence based Lookahead Prefetching", MICRO 2016).

All of it is said as a restore, what chains foretell as well, though that is uncertain: held to
bursts, chains staged 73 % of the blocks of a recorded conversation in time and not 86 %, and spared
a seventh of the wasted reads. `auto` weighs what no hint has named.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prefetchd.model import NO_IDS, Access, ChainHint, DoneHint, Geometry, Ids, Mask, Scores
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors._chains import Chains, Uses

STREAMS_MAX = 32  # one bit each in the tables of what a request has touched
PLANS_MAX = 64
PLAN_BLOCKS_MAX = 1 << 16  # a million tokens of 16-token blocks
DEPTH_MAX = 256
FEW_BLOCKS = 8  # new to a request at once: so many are learned one by one in less time
LOOK_FACTOR = 8  # pages of hinted requests looked at for each one that is asked for
_CERTAIN = np.ones(1, np.float32)


@dataclass(slots=True)
class _Stream:
    """A running request: its bit, the blocks it touched, the last two of them (its anchors), and
    accesses since it last went on."""

    bit: np.uint32
    touched: list[int] = field(default_factory=list)
    before: int = -1
    at: int = -1
    idle: int = 0


@dataclass(slots=True)
class _Plan:
    """The blocks that a request was said to need; those before `done` it has read in full."""

    blocks: Ids
    start_ns: int | None
    done: int = 0
    demanded_pages: int = 0


@dataclass(slots=True)
class _Basket:
    """Guessed pages so far, each once, until there is no room."""

    room: int
    named: Mask
    pages: list[Ids] = field(default_factory=lambda: [NO_IDS])
    confidence: list[Scores] = field(default_factory=lambda: [np.empty(0, np.float32)])

    def add(self, pages: Ids, confidence: Scores) -> None:
        new: Mask = ~self.named[pages]
        fresh, sure = pages[new][: self.room], confidence[new][: self.room]
        self.named[fresh] = True
        self.room -= len(fresh)
        self.pages.append(fresh)
        self.confidence.append(sure)


class CrossRequest(Predictor):
    name = "cross_request"

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self._chains = Chains(geometry.blocks)
        self._uses = Uses(geometry)
        self._streams: dict[int, _Stream] = {}  # least recently active first
        self._bits = [np.uint32(1 << bit) for bit in reversed(range(STREAMS_MAX))]
        self._plans: dict[int, _Plan] = {}
        self._layers = np.arange(geometry.layers)
        # Two passes over the layers without a new block: the request has left the chain.
        self._patience = 2 * geometry.layers
        self._named = np.zeros(geometry.pages, np.bool_)  # all False between calls

    def on_access(self, access: Access) -> None:
        stream = self._stream(access.request)
        if len(access.pages) == 1:
            new = self._touch_one(int(access.pages[0]), stream)
        else:
            new = self._touch(access.pages, stream)
        stream.idle = 0 if new else stream.idle + 1
        if access.request in self._plans:
            self._follow(access, stream, new)

    def _touch(self, pages: Ids, stream: _Stream) -> int:
        """Take in what a request touched; how many blocks were new to it."""
        new = self._uses.touch(pages, stream.bit)
        if len(new) <= FEW_BLOCKS:
            for block in new.tolist():
                self._go_on(block, stream)
        else:
            anchors = [block for block in (stream.before, stream.at) if block >= 0]
            sequence = np.concatenate([np.array(anchors, np.int64), new])
            self._chains.learn(sequence)
            stream.before = int(sequence[-2]) if len(sequence) > 1 else -1
            stream.at = int(sequence[-1])
            stream.touched += new.tolist()
        return len(new)

    def _touch_one(self, page: int, stream: _Stream) -> int:
        """As `_touch` of one page: a restore asks for most of its blocks one by one."""
        if not self._uses.touch_one(page, int(stream.bit)):
            return 0
        self._go_on(page // self.geometry.layers, stream)
        return 1

    def _go_on(self, block: int, stream: _Stream) -> None:
        """A block that is new to the request came after all others."""
        if stream.before >= 0:
            self._chains.follow(stream.before, stream.at, block)
        stream.before, stream.at = stream.at, block
        stream.touched.append(block)

    def on_chain_hint(self, hint: ChainHint) -> None:
        blocks = self.geometry.real(hint.blocks)
        _, first = np.unique(blocks, return_index=True)
        blocks = blocks[np.sort(first)[:PLAN_BLOCKS_MAX]]
        self._plans.pop(hint.request, None)
        if len(self._plans) == PLANS_MAX:
            self._plans.pop(next(iter(self._plans)))
        self._plans[hint.request] = _Plan(blocks, hint.start_ns)

    def on_done_hint(self, hint: DoneHint) -> None:
        self._plans.pop(hint.request, None)
        self._learn_rest(hint)
        if hint.request in self._streams:
            self._finish(hint.request)

    def _learn_rest(self, hint: DoneHint) -> None:
        """Take in what followed the last demanded block: blocks that the request itself made."""
        blocks = self.geometry.real(hint.blocks)
        if len(blocks) < 2:
            return
        stream = self._streams.get(hint.request)
        if stream is None:
            self._chains.learn(blocks)
            self._chains.end(int(blocks[-2]), int(blocks[-1]))
            return
        last = np.flatnonzero(blocks == stream.at)
        if len(last):
            self._chains.learn(blocks[max(0, int(last[0]) - 1) :])
            stream.before, stream.at = int(blocks[-2]), int(blocks[-1])

    def predict(self, now_ns: int, limit: int) -> Guess:
        basket = _Basket(max(0, limit), self._named)
        start_ns = self._guess_plans(basket)
        planned = len(basket.pages)
        self._guess_chains(basket)
        if len(basket.pages) == 1:  # none but the empty one it began with
            return Guess(restores=True)
        for pages in basket.pages:
            self._named[pages] = False
        guessed, sure = basket.pages[planned:], basket.confidence[planned:]
        if guessed:  # several requests: the surest first, whoever's it is
            order = np.argsort(-np.concatenate(sure), kind="stable")
            guessed, sure = [np.concatenate(guessed)[order]], [np.concatenate(sure)[order]]
        return Guess(
            np.concatenate(basket.pages[:planned] + guessed),
            np.concatenate(basket.confidence[:planned] + sure),
            deadline_ns=start_ns,
            restores=True,
        )

    def _guess_plans(self, basket: _Basket) -> int | None:
        """Hinted blocks in prefix order, the request that starts first before the others.

        Returns the earliest start of those whose pages are in the basket, if all have one.
        """
        starts: list[int | None] = []
        look = LOOK_FACTOR * basket.room // self.geometry.layers + 1
        for request, plan in sorted(self._plans.items(), key=lambda item: item[1].start_ns or 0):
            blocks = plan.blocks[plan.done :][:look]
            left, step = basket.room, 2 * basket.room // self.geometry.layers + 8
            for start in range(0, len(blocks), step):
                if basket.room > 0:
                    self._add_pages(basket, request, blocks[start : start + step], _CERTAIN)
            look -= len(blocks)
            if basket.room < left:
                starts.append(plan.start_ns)
        known = [start for start in starts if start is not None]
        return min(known) if known and len(known) == len(starts) else None

    def _guess_chains(self, basket: _Basket) -> None:
        """What should follow in requests without a hint, the most recently active first."""
        for request in reversed(self._streams):
            stream = self._streams[request]
            if basket.room <= 0:
                break
            if request in self._plans or stream.before < 0 or stream.idle > self._patience:
                continue
            blocks, sure = self._chains.walk(stream.before, stream.at, min(DEPTH_MAX, basket.room))
            self._add_pages(basket, request, blocks, sure)

    def _add_pages(self, basket: _Basket, request: int, blocks: Ids, sure: Scores) -> None:
        """Pages of `blocks` that earlier requests used and this one has not read."""
        if not len(blocks):
            return
        confidence = self._uses.shares(blocks) * sure[:, None]
        wanted = confidence > 0
        if request in self._streams:
            wanted &= self._uses.unread(blocks, self._streams[request].bit)
        pages = blocks[:, None] * self.geometry.layers + self._layers
        basket.add(pages[wanted], confidence[wanted])

    def _follow(self, access: Access, stream: _Stream, new_blocks: int) -> None:
        """Pass over what has been read of a plan, and drop the plan when it must be fulfilled."""
        plan = self._plans[access.request]
        head = plan.blocks[plan.done :][: new_blocks + 8]
        if self.geometry.layers == 1 and new_blocks < 2:  # a restore, block by block
            for block in head.tolist():
                if not self._uses.has_read(block, int(stream.bit)):
                    break
                plan.done += 1
        else:
            unread = np.flatnonzero(self._uses.unread(head, stream.bit).any(axis=1))
            plan.done += int(unread[0]) if len(unread) else len(head)
        plan.demanded_pages += len(access.pages)
        # A restore reads every page once: whoever has read twice as many decodes by now.
        if plan.demanded_pages > 2 * len(plan.blocks) * self.geometry.layers:
            del self._plans[access.request]

    def _stream(self, request: int) -> _Stream:
        """The request's stream, now the most recently active; the oldest is forgotten."""
        stream = self._streams.pop(request, None)
        if stream is None:
            if not self._bits:
                self._finish(next(iter(self._streams)))
            stream = _Stream(self._bits.pop())
        self._streams[request] = stream
        return stream

    def _finish(self, request: int) -> None:
        stream = self._streams.pop(request)
        if stream.before >= 0:
            self._chains.end(stream.before, stream.at)
        self._uses.finish(stream.bit, np.array(stream.touched, np.int64))
        self._bits.append(stream.bit)
