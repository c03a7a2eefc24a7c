"""One sequence's KV in pages: the newest tokens in memory, whole blocks in a runtime.

Decides when blocks are sealed and what a layer's attention is given. Refuses to know models and
attention: it is given keys and values layer by layer and gives them back.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from prefetchd.adapters.copying import Copier
from prefetchd.adapters.far import Far
from prefetchd.adapters.near import Near
from prefetchd.adapters.pages import KvLost, Shape
from prefetchd.adapters.selection import Selector
from prefetchd.runtime import Runtime
from prefetchd.tickets import PutTicket

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [head, token, dimension] each."""


class BlockKeys(Protocol):
    """From tokens to the keys of their whole blocks; `after`: the key of the block before them."""

    def __call__(self, tokens: list[int], *, after: bytes | None = None) -> list[bytes]: ...


class PagedSequence:
    """`window_blocks`: so many of the newest whole blocks stay in memory, and the first
    `sink_blocks`. `selector`: chooses the far blocks that single tokens read; without it they read
    all. `copier`: shared by a store's sequences, whose passes take turns. Batches of one only."""

    def __init__(
        self,
        runtime: Runtime,
        shape: Shape,
        keys: BlockKeys,
        copier: Copier,
        *,
        window_blocks: int = 2,
        sink_blocks: int = 1,
        selector: Selector | None = None,
    ) -> None:
        self.runtime = runtime
        self.shape = shape
        self.selector = selector
        self.tokens: list[int] = []
        self.near = Near(shape, sink_blocks)
        self.far = Far(runtime, shape, sink_blocks, copier)
        self._keys = keys
        self._window = window_blocks
        self._sinks = sink_blocks
        self._rooms = [shape.room(0), shape.room(0)]
        self._puts: list[tuple[int, PutTicket]] = []  # first block of each put
        self._sealed = 0
        self._last_key: bytes | None = None  # of the last block that is sealed

    def length(self, layer: int = 0) -> int:
        return self.near.lengths[layer]

    # --- a forward pass ---

    def whole(self, layer: int) -> Pair:
        """Keys and values of all tokens so far, valid until the next call. Raises KvLost,
        ValueError when staging is too small for that."""
        far = self.far
        full, middle = self._assembled(layer, far.count)
        if far.count:
            # Choosing layers need no copy ahead, and which of them will choose is not known here.
            ahead = None if self.selector else self._ahead(full.shape[2])
            far.read(layer, middle, ahead)
        if self.selector and (known := self.selector.known(layer)) < far.count:
            blocks = slice(self._sinks + known, self._sinks + far.count)
            self.selector.add(layer, self._blocks(full[0])[:, blocks])
        self._passed(layer)
        return full[0], full[1]

    def chosen(self, layer: int) -> Pair:
        """The same of sinks, chosen far blocks and the newest tokens, for a single new one."""
        assert self.selector is not None
        with self.far.choose(layer, *self.selector.choose(layer)) as ticket:
            full, middle = self._assembled(layer, len(ticket.slots))
            self.far.gather(ticket.slots, middle)
        self._passed(layer)
        return full[0], full[1]

    def ready(self, layer: int) -> bool:
        """Whether this layer's far blocks are summed up, so that they can be chosen from."""
        return self.selector is not None and 0 < self.far.count == self.selector.known(layer)

    def foreseen(self, layer: int, query: torch.Tensor) -> None:
        """Tell the runtime what a layer will probably need, by a query foreseen of it."""
        if self.selector and self.selector.sparse.hints and self.ready(layer):
            self.far.hint(layer, *self.selector.foresee(layer, query))

    # Parts of tensors are taken by `narrow`: an index of slices costs three times as much.

    def _assembled(self, layer: int, far_blocks: int) -> Pair:
        """[key or value, head, token, dimension]: sinks, room for far blocks, the newest tokens;
        and that room alone."""
        if self.selector is None:  # else nothing is copied ahead
            self._rooms.reverse()
        sinks, recent = self.near.sinks(layer), self.near.recent(layer)
        start, far, end = sinks.shape[2], far_blocks * self.shape.block_tokens, recent.shape[2]
        full = self._room(0, start + far + end)
        full.narrow(2, 0, start).copy_(sinks)
        full.narrow(2, start + far, end).copy_(recent)
        return full, full.narrow(2, start, far)

    def _ahead(self, tokens: int) -> torch.Tensor:
        """Room for the far blocks of the next layer to be read, of so many tokens in all."""
        start = self.near.sinks(0).shape[2]
        return self._room(1, tokens).narrow(2, start, self.far.count * self.shape.block_tokens)

    def _room(self, turn: int, tokens: int) -> torch.Tensor:
        """0: of the layer that is being read; 1: of the next one, which is copied meanwhile."""
        room = self._rooms[turn]
        if room.shape[2] < tokens:
            size = self.shape.block_tokens
            room = self._rooms[turn] = self.shape.room(-(-tokens // size) * size)
        return room.narrow(2, 0, tokens)

    def _blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """[head, block, token, dimension] of the whole blocks of [head, token, dimension]."""
        size = self.shape.block_tokens
        return tokens[:, : tokens.shape[1] // size * size].unflatten(1, (-1, size))

    def _passed(self, layer: int) -> None:
        if layer < self.shape.layers - 1:
            return
        self._seal()
        near, ahead = self.near, None
        if self.selector is None:
            newest = self.length() + 1 - near.base
            far = self.far.count * self.shape.block_tokens
            ahead = self._ahead(near.sinks(0).shape[2] + far + newest)
        self.far.passed(ahead)

    def release(self) -> None:
        """Give back what is pinned; the sequence may go on."""
        self.far.release()

    # --- sealing ---

    def _seal(self) -> None:
        """At the end of a pass: store the blocks that are full, forget those that are stored."""
        size = self.shape.block_tokens
        if set(self.near.lengths) != {len(self.tokens)}:
            raise ValueError(
                f"this cache was told of {len(self.tokens)} tokens and holds {self.length()}: call "
                "the model itself, not a part of it, and begin a new cache after an error"
            )
        full = self.length() // size
        if full > self._sealed:
            tokens = self.tokens[self._sealed * size : full * size]
            names = self._keys(tokens, after=self._last_key)
            for number, name in enumerate(names, self._sealed):
                put = self.runtime.put([name], self.near.block(number), durability="fast")
                self._puts.append((number, put))
            self._sealed, self._last_key = full, names[-1]
        keep = max(0, full - self._window)
        if keep * size > self.near.base:
            self._stored(keep)
            self._sum_up(keep)
            self.near.forget(keep * size)
            self.far.count = max(0, keep - self._sinks)

    def _stored(self, keep: int) -> None:
        """Wait until the first `keep` blocks can be had from the runtime. Raises KvLost."""
        while self._puts and self._puts[0][0] < keep:
            first, put = self._puts.pop(0)
            blocks, stamps = put.blocks, put.stamps
            if put.failures or put.refused:
                why = put.failures[0] if put.failures else "admission refused it"
                raise KvLost(f"block {first} of a sequence could not be stored: {why}")
            self.far.blocks = np.concatenate([self.far.blocks, blocks])
            self.far.stamps = np.concatenate([self.far.stamps, stamps])

    def _sum_up(self, keep: int) -> None:
        """Summaries of the blocks that become far, where those before them have theirs."""
        before = self.near.base // self.shape.block_tokens
        first = max(before, self._sinks)
        if self.selector is None or first >= keep:
            return
        for layer in range(self.shape.layers):
            if self.selector.known(layer) == self.far.count:
                blocks = self._blocks(self.near.recent(layer)[0])
                self.selector.add(layer, blocks[:, first - before : keep - before])

    @property
    def memory_bytes(self) -> int:
        """What the sequence itself holds, beside the runtime's staging and without summaries."""
        return self.near.memory_bytes + sum(room.nbytes for room in self._rooms)

    # --- restoring ---

    def restore(self, tokens: list[int]) -> int:
        """Begin with the longest stored prefix of whole blocks; how many tokens that is. At least
        one token is left to compute. Raises KvLost."""
        size = self.shape.block_tokens
        names = self._keys(tokens[: max(0, len(tokens) - 1)])
        found = self.runtime.find(names) if names else None
        if found is None or not len(found):
            return 0
        far, near = self.far, self.near
        far.blocks, far.stamps = found.blocks, found.stamps
        self._sealed, self._last_key = len(found), names[len(found) - 1]
        near.begin(self._sealed * size)
        far.count = max(0, self._sealed - self._sinks)
        self.tokens = list(tokens[: near.base])
        for place in range(min(self._sinks, self._sealed)):
            for layer, block in enumerate(far.read_block(place)):
                near.set_sinks(layer, place * size, block)
        return near.base
