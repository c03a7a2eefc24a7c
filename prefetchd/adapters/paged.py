"""One sequence's KV in pages: the newest tokens in memory, whole blocks in a runtime.

Decides what is kept in memory (sinks, a recent window, what is not stored yet), when blocks are
sealed and which pages are demanded ahead. Refuses to know models and attention: it is given keys
and values layer by layer and gives them back.

A forward pass visits the layers in order. Its far blocks are the same for every layer, so a layer's
pages are demanded while the layers before it compute: nothing is guessed. Bytes can only be those
that were put: every demand carries the stamps of its blocks, and a page that cannot be had is an
error before it is a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from prefetchd.adapters.selection import Selector
from prefetchd.model import NO_IDS, Ids, PageHint
from prefetchd.runtime import Runtime
from prefetchd.tickets import PutTicket, Ticket


class KvLost(Exception):  # noqa: N818  (an answer: these tokens must be computed again)
    """Pages of a sequence cannot be had, so its next token cannot be computed: which, and why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One page holds `block_tokens` tokens of one layer: [key or value, head, token, dimension]."""

    layers: int
    heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return 2 * self.heads * self.block_tokens * self.head_dim * self.dtype.itemsize


class PagedSequence:
    """`keys`: from tokens to the keys of their whole blocks. `window_blocks`: so many of the newest
    whole blocks stay in memory, and the first `sink_blocks`. `ahead`: layers whose pages are
    demanded before it is their turn. `selector`: chooses the far blocks that single tokens read;
    without it they read all. Batches of one only."""

    def __init__(
        self,
        runtime: Runtime,
        shape: Shape,
        keys: Callable[[list[int]], list[bytes]],
        *,
        window_blocks: int = 4,
        sink_blocks: int = 1,
        ahead: int = 3,
        selector: Selector | None = None,
    ) -> None:
        self.selector = selector
        self.runtime = runtime
        self.shape = shape
        self.tokens: list[int] = []
        self.blocks: Ids = NO_IDS
        """Where the sealed blocks are in the store, in order; their `stamps` likewise."""
        self.stamps: Ids = NO_IDS
        self._keys = keys
        self._window = window_blocks
        self._sinks = sink_blocks
        self._ahead = ahead
        self._staged = _staged(runtime, shape)
        self._lengths = [0] * shape.layers
        self._base = 0  # tokens before it are far: only the store has them
        self._recent = self._room(0)
        self._sink = self._room(sink_blocks * shape.block_tokens)
        self._full = torch.empty(0)
        self._tickets: dict[int, Ticket] = {}
        self._puts: list[tuple[int, PutTicket]] = []  # first block of each put
        self._sealed = 0

    def length(self, layer: int = 0) -> int:
        return self._lengths[layer]

    # --- a forward pass ---

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens of one layer: [head, token, dimension] each."""
        start, count = self._lengths[layer] - self._base, keys.shape[1]
        if start + count > self._recent.shape[3]:
            self._grow(start + count)
        self._recent[layer, 0, :, start : start + count] = keys
        self._recent[layer, 1, :, start : start + count] = values
        self._lengths[layer] += count

    def whole(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens so far: [head, token, dimension], valid until the next
        call. Raises KvLost."""
        dense = self.selector is None
        if self.far:
            self._demand(layer, wrap=dense)
            ticket = self._arrived(layer, self._tickets.pop(layer))
        else:
            ticket = None
        full = self._assembled(layer, ticket)
        if self.selector and (known := self.selector.known(layer)) < self.far:
            self.selector.add(
                layer, self._blocks_of(full[0], self._sinks + known, self._sinks + self.far)
            )
        self._passed(layer)
        if dense:
            self._demand(layer + 1, wrap=True)
        return full[0], full[1]

    def chosen(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of sinks, chosen far blocks and the newest tokens, for a single new one."""
        assert self.selector is not None
        places, mass = self.selector.choose(layer)
        blocks = self._sinks + places
        pages = self.blocks[blocks] * self.shape.layers + layer
        ticket = self.runtime.demand(pages, stamps=self.stamps[blocks], scores=mass)
        full = self._assembled(layer, self._arrived(layer, ticket))
        self._passed(layer)
        return full[0], full[1]

    @property
    def far(self) -> int:
        """Blocks that only the runtime has."""
        return max(0, self._base // self.shape.block_tokens - self._sinks)

    @property
    def selects(self) -> bool:
        """Whether the next single token can do with chosen blocks, in every layer."""
        return self.selector is not None and self.far > 0

    def ready(self, layer: int) -> bool:
        """Whether this layer's far blocks are summed up, so that they can be chosen from."""
        return self.selector is not None and 0 < self.far == self.selector.known(layer)

    def foreseen(self, layer: int, query: torch.Tensor) -> None:
        """Tell the runtime what a layer will probably need, by a query foreseen of it."""
        if self.selector and self.selector.sparse.hints and self.ready(layer):
            places, mass = self.selector.foresee(layer, query)
            pages = self.blocks[self._sinks + places] * self.shape.layers + layer
            self.runtime.hint(PageHint(pages, mass))

    def _assembled(self, layer: int, ticket: Ticket | None) -> torch.Tensor:
        """[key or value, head, token, dimension]: sinks, a ticket's pages, the newest tokens."""
        size = self.shape.block_tokens
        sinks = min(self._sinks * size, self._base)
        end = sinks + (len(ticket.slots) * size if ticket else 0)
        near = self._lengths[layer] - self._base
        full = self._buffer(end + near)[:, :, : end + near]
        full[:, :, :sinks] = self._sink[layer, :, :, :sinks]
        full[:, :, end:] = self._recent[layer, :, :, :near]
        if ticket:
            self._gather(ticket, full, sinks)
            ticket.release()
        return full

    def _passed(self, layer: int) -> None:
        if layer == self.shape.layers - 1:
            self._seal()

    def _blocks_of(self, tokens: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """[head, block, token, dimension] of blocks of [head, token, dimension]."""
        size = self.shape.block_tokens
        return tokens[:, first * size : last * size].unflatten(1, (last - first, size))

    def _gather(self, ticket: Ticket, full: torch.Tensor, at: int) -> None:
        slots = torch.from_numpy(ticket.slots)
        end = at + len(slots) * self.shape.block_tokens
        for half in range(2):
            for head in range(self.shape.heads):
                rows = full[half, head, at:end].view(len(slots), -1)
                torch.index_select(self._staged[:, half, head], 0, slots, out=rows)

    # --- far pages ---

    def _demand(self, layer: int, *, wrap: bool) -> None:
        """Ask for the pages of this layer and of some after it; with `wrap` also of the first ones,
        for the pass to come."""
        if not self.far:
            return
        layers = self.shape.layers
        for turn in range(layer, layer + 1 + self._ahead):
            if turn % layers not in self._tickets and (wrap or turn < layers):
                blocks = slice(self._sinks, self._sinks + self.far)
                pages = self.blocks[blocks] * layers + turn % layers
                ticket = self.runtime.demand(pages, stamps=self.stamps[blocks])
                self._tickets[turn % layers] = ticket

    def _arrived(self, layer: int, ticket: Ticket) -> Ticket:
        ticket.wait()
        if ticket.missing.any():
            lost = ticket.pages[ticket.missing][0] // self.shape.layers
            place = int(np.flatnonzero(self.blocks == lost)[0])
            ticket.release()
            self.release()
            first = place * self.shape.block_tokens
            raise KvLost(
                f"{int(ticket.missing.sum())} pages of layer {layer} cannot be had, the first of "
                f"tokens {first}-{first + self.shape.block_tokens - 1}: the store lost them or its "
                "drive does not answer (see the log and Runtime.stats().failures). Begin a new "
                "cache: what is whole is found again, the rest is computed anew"
            )
        return ticket

    def release(self) -> None:
        """Give back what is pinned; the sequence may go on."""
        for ticket in self._tickets.values():
            ticket.release()
        self._tickets.clear()

    # --- sealing ---

    def _seal(self) -> None:
        """At the end of a pass: store the blocks that are full, forget those that are stored."""
        size = self.shape.block_tokens
        full = self._lengths[-1] // size
        if full > self._sealed:
            names = self._keys(self.tokens[: full * size])[self._sealed : full]
            pages = self._pages(self._sealed, full)
            self._puts.append((self._sealed, self.runtime.put(names, pages, durability="fast")))
            self._sealed = full
        keep = max(0, full - self._window)
        if keep * size > self._base:
            self._stored(keep)
            self._forget(keep * size)

    def _pages(self, first: int, last: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
        """Bytes of whole blocks: (blocks, layers, page_bytes)."""
        size, shape = self.shape.block_tokens, self.shape
        span = self._recent[:, :, :, first * size - self._base : last * size - self._base]
        blocks = span.unflatten(3, (last - first, size)).permute(3, 0, 1, 2, 4, 5).contiguous()
        return blocks.view(torch.uint8).view(last - first, shape.layers, -1).numpy()

    def _stored(self, keep: int) -> None:
        """Wait until the first `keep` blocks can be had from the runtime."""
        while self._puts and self._puts[0][0] < keep:
            first, put = self._puts.pop(0)
            blocks, stamps = put.blocks, put.stamps
            if put.failures or put.refused:
                why = put.failures[0] if put.failures else "admission refused it"
                raise KvLost(f"block {first} of a sequence could not be stored: {why}")
            self.blocks = np.concatenate([self.blocks, blocks])
            self.stamps = np.concatenate([self.stamps, stamps])

    def _forget(self, base: int) -> None:
        """Let go of the memory of tokens before `base`, but for the sinks."""
        sinks = self._sink.shape[3]
        if self._base < sinks:
            upto = min(sinks, base)
            part = self._recent[:, :, :, : upto - self._base]
            self._sink[:, :, :, self._base : upto] = part
        self._sum_up(base)
        kept = max(self._lengths) - base
        shift = base - self._base
        recent = self._room(self._capacity(kept))
        recent[:, :, :, :kept] = self._recent[:, :, :, shift : shift + kept]
        self._recent, self._base = recent, base
        self.release()

    def _sum_up(self, base: int) -> None:
        """Summaries of the blocks that become far, where those before them have theirs."""
        if self.selector is None:
            return
        first = max(self._base // self.shape.block_tokens, self._sinks)
        last = base // self.shape.block_tokens
        start = self._base // self.shape.block_tokens
        for layer in range(self.shape.layers):
            if first < last and self.selector.known(layer) == self.far:
                keys = self._blocks_of(self._recent[layer, 0], first - start, last - start)
                self.selector.add(layer, keys)

    # --- memory ---

    def _room(self, tokens: int) -> torch.Tensor:
        shape = self.shape
        return torch.zeros(shape.layers, 2, shape.heads, tokens, shape.head_dim, dtype=shape.dtype)

    def _capacity(self, tokens: int) -> int:
        size = self.shape.block_tokens
        return max((self._window + 2) * size, -(-tokens // size) * size)

    def _grow(self, tokens: int) -> None:
        recent = self._room(self._capacity(tokens))
        recent[:, :, :, : self._recent.shape[3]] = self._recent
        self._recent = recent

    def _buffer(self, tokens: int) -> torch.Tensor:
        if not self._full.numel() or self._full.shape[2] < tokens:
            shape, room = self.shape, self._capacity(tokens + tokens // 8)
            self._full = torch.empty(2, shape.heads, room, shape.head_dim, dtype=shape.dtype)
        return self._full

    @property
    def memory_bytes(self) -> int:
        """What the sequence itself holds, beside the runtime's staging."""
        return self._recent.nbytes + self._sink.nbytes + self._full.nbytes

    # --- restoring ---

    def restore(self, tokens: list[int]) -> int:
        """Begin with the longest stored prefix of whole blocks; how many tokens that is. At least
        one token is left to compute. Raises KvLost."""
        size = self.shape.block_tokens
        names = self._keys(tokens[: max(0, len(tokens) - 1)])
        found = self.runtime.find(names) if names else None
        if found is None or not len(found):
            return 0
        self.blocks, self.stamps = found.blocks, found.stamps
        self._sealed = len(found)
        self._base = len(found) * size
        self._lengths = [self._base] * self.shape.layers
        self.tokens = list(tokens[: self._base])
        self._recent = self._room(self._capacity(size))
        self._load_sinks()
        return self._base

    def _load_sinks(self) -> None:
        blocks = min(self._sinks, len(self.blocks))
        for place in range(blocks):
            pages = self.blocks[place] * self.shape.layers + np.arange(self.shape.layers)
            stamps = np.full(len(pages), self.stamps[place])
            with self.runtime.demand(pages, stamps=stamps) as ticket:
                if ticket.missing.any():
                    raise KvLost(f"block {place} of a stored prefix cannot be read back")
                size = self.shape.block_tokens
                data = self._staged[torch.from_numpy(ticket.slots)].unflatten(3, (size, -1))
                self._sink[:, :, :, place * size : (place + 1) * size] = data


def _staged(runtime: Runtime, shape: Shape) -> torch.Tensor:
    """Staging as tensors, in place: [slot, key or value, head, tokens of a block]."""
    with warnings.catch_warnings():
        # The array cannot be written to, and nobody does: torch has no word for that.
        warnings.simplefilter("ignore", UserWarning)
        raw = torch.from_numpy(runtime.staged)
    return raw.view(shape.dtype).view(len(raw), 2, shape.heads, -1)
