"""The blocks of a sequence that only a runtime has: asked for in time, gathered, given back.

Decides how many layers one demand is for and how far ahead of its turn a layer is asked for.
Refuses to know what is computed with the pages.

A pass visits the layers in order, and one that reads everything reads the same blocks in each: so
groups of layers are demanded while the group before them computes, and nothing is guessed. Pages
of neighbouring layers are neighbours on the medium, so a group is read in fewer, larger parts.
Bytes can only be those that were put: every demand carries the stamps of its blocks, and a page
that cannot be had is an error before it is a token.
"""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from prefetchd.adapters.copying import Copier, Copy
from prefetchd.adapters.measuring import Meter
from prefetchd.adapters.pages import KvLost, Shape
from prefetchd.engine import EngineError
from prefetchd.model import NO_IDS, Ids, PageHint, Scores, Slots
from prefetchd.runtime import Runtime
from prefetchd.tickets import Ticket

GROUP_LAYERS = 3
"""Layers of one demand: two are held at once, which takes a fifth of 30 layers' pages."""


class Far:
    """`blocks` and `stamps`: where the sealed blocks of the sequence are, in order; the first
    `sink_blocks` are never asked for here."""

    def __init__(self, runtime: Runtime, shape: Shape, sink_blocks: int, copier: Copier) -> None:
        self.blocks: Ids = NO_IDS
        self.stamps: Ids = NO_IDS
        self.count = 0
        """Blocks after the sinks that are not in ordinary memory."""
        self.meter: Meter | None = None
        self._runtime = runtime
        self._shape = shape
        self._sinks = sink_blocks
        self._staged = _staged(runtime, shape)
        self._width = 1  # layers of a demand in this pass
        self._groups: dict[int, Ticket] = {}
        self._copier = copier
        # The newest, and the one before it, which may still have to pass on.
        self._copies: deque[Copy] = deque(maxlen=2)
        self._ahead: tuple[int, torch.Tensor] | None = None  # which layer's the newest is, where to

    # --- passes that read everything ---

    def read(self, layer: int, into: torch.Tensor, following: torch.Tensor | None) -> None:
        """Copy a layer's far pages to `into`, [key or value, head, token, dimension], and begin to
        copy the next one's to `following`. Raises KvLost, ValueError."""
        if self._ahead is None or (self._ahead[0], self._ahead[1].shape) != (layer, into.shape):
            if self._ahead is not None:  # in vain; what it holds must not keep this from room
                self.release()
            self._begin(layer, into)
        assert self._ahead is not None
        (_, copied), self._ahead = self._ahead, None
        try:
            for copy in reversed(self._copies):  # so that the one before it is over
                copy.wait()
        except BaseException:
            self.release()
            raise
        if copied.data_ptr() != into.data_ptr():  # more tokens are new than were foreseen
            into.copy_(copied)
        if following is not None and layer + 1 < self._shape.layers:
            self._begin(layer + 1, following)

    def _begin(self, layer: int, into: torch.Tensor) -> None:
        """Let the copier's thread do the rest."""
        wake = self._runtime.engine.resolved
        copy = Copy(partial(self._copy, layer, into), partial(self._pass_on, layer), wake)
        try:
            self._copies.append(copy)
            self._copier.begin(copy)
        except BaseException:
            self.release()  # nobody is to wait for one that never begins
            raise
        self._ahead = layer, into

    def _copy(self, layer: int, into: torch.Tensor, copy: Copy) -> None:
        """In the copier's thread: ask, wait, check, copy. Raises KvLost, ValueError."""
        if not self._groups:
            self._width = self._layers_at_once()
        self._ask_from(layer)
        ticket = self._groups[layer // self._width]
        self._runtime.engine.wait(lambda: ticket.done or copy.unwanted)
        if copy.unwanted:
            return
        self._arrived(ticket, layer)
        slots: Slots = ticket.slots.reshape(self.count, -1)[:, layer % self._width]
        self.gather(slots, into)

    def _pass_on(self, layer: int) -> None:
        """In the copier's thread: give back what was copied, check what has arrived meanwhile, ask
        for what will be needed."""
        last = layer + 1 == self._shape.layers
        if last or (layer + 1) % self._width == 0:
            self._groups.pop(layer // self._width).release()
        # Once a layer: all of a group at its end would keep its first layer waiting, and bytes that
        # have just come may still be in a cache. Not a moment is slept for more to come.
        self._runtime.tend(0)
        self._runtime.engine.collect()
        if not last:
            # What cannot be asked for now is asked for once more where it is waited for.
            with suppress(EngineError, ValueError):
                self._ask_from(layer + 1)

    def passed(self, into: torch.Tensor | None) -> None:
        """A pass is over. `into`: where to another one over everything would probably read the
        first layer. Raises what had no layer after it to raise it."""
        for copy in self._copies:
            copy.finish()
        self.release()
        if into is not None and self.count:
            self._begin(0, into)

    def _layers_at_once(self) -> int:
        slots = self._runtime.slots
        if self.count > slots:
            raise ValueError(
                f"a layer of this sequence has {self.count} pages to read at once and staging holds"
                f" {slots}: open the store with more staging, or read fewer blocks with `sparse`"
            )
        return max(1, min(GROUP_LAYERS, slots // (2 * self.count)))

    def _ask_from(self, layer: int) -> None:
        """This layer's group and the one after it."""
        for group in (layer // self._width, layer // self._width + 1):
            self._ask(group)

    def _ask(self, group: int) -> None:
        layers = range(self._shape.layers)[group * self._width : (group + 1) * self._width]
        if group in self._groups or not layers:
            return
        mine = slice(self._sinks, self._sinks + self.count)
        pages = self.blocks[mine, None] * self._shape.layers + np.array(layers)
        stamps = np.repeat(self.stamps[mine], len(layers))
        self._groups[group] = self._runtime.demand(pages.reshape(-1), stamps=stamps, once=True)

    # --- chosen blocks ---

    def choose(self, layer: int, places: Ids, mass: Scores) -> Ticket:
        """The pages of some far blocks; release it. Raises KvLost."""
        asked_ns = self._runtime.engine.clock()
        stamps = self.stamps[self._sinks + places]
        ticket = self._runtime.demand(self._pages(layer, places), stamps=stamps, scores=mass)
        try:
            self._arrived(ticket, layer)
        except KvLost:
            self.release()
            raise
        if self.meter:
            self.meter.served(ticket, mass, asked_ns)
        # What it has to learn it learns here, where a thread beside this one would only get in
        # the way of what computes.
        self._runtime.tend(0)
        return ticket

    def hint(self, layer: int, places: Ids, mass: Scores) -> None:
        """Far blocks that a layer will probably need, best first."""
        self._runtime.hint(PageHint(self._pages(layer, places), mass))

    def _pages(self, layer: int, places: Ids) -> Ids:
        pages: Ids = self.blocks[self._sinks + places] * self._shape.layers + layer
        return pages

    # --- bytes ---

    def gather(self, slots: Slots, into: torch.Tensor) -> None:
        """Copy pages to [key or value, head, token, dimension], one block after another."""
        blocks = into.unflatten(2, (len(slots), -1)).flatten(3).flatten(0, 1)
        # By rows: along another dimension torch copies all of staging first, if `into` lies close.
        torch.index_select(self._staged, 0, torch.from_numpy(slots), out=blocks.transpose(0, 1))

    def read_block(self, place: int) -> list[torch.Tensor]:
        """A block by layers, [key or value, head, token, dimension] each. Raises KvLost."""
        shape = self._shape
        pages = self.blocks[place] * shape.layers + np.arange(shape.layers)
        stamps = np.full(len(pages), self.stamps[place])
        rooms = [shape.room(shape.block_tokens) for _ in range(shape.layers)]
        with self._arrived(self._runtime.demand(pages, stamps=stamps, once=True), 0) as ticket:
            for layer, room in enumerate(rooms):
                self.gather(ticket.slots[layer : layer + 1], room)
        return rooms

    def _arrived(self, ticket: Ticket, layer: int) -> Ticket:
        ticket.wait()
        missing = ticket.missing
        if missing.any():
            lost = ticket.pages[missing][0] // self._shape.layers
            ticket.release()
            first = int(np.flatnonzero(self.blocks == lost)[0]) * self._shape.block_tokens
            raise KvLost(
                f"{np.count_nonzero(missing)} pages from layer {layer} on cannot be had, the first "
                f"of tokens {first}-{first + self._shape.block_tokens - 1}: the store lost them or "
                "its drive does not answer (see the log and Runtime.stats().failures). Begin a new "
                "cache: what is whole is found again, the rest is computed anew"
            )
        return ticket

    def release(self) -> None:
        """Give back what is held, without waiting for pages that are on their way; the sequence
        may go on."""
        self._ahead = None
        for copy in self._copies:
            copy.end()
        self._copies.clear()
        for ticket in self._groups.values():
            ticket.release()
        self._groups.clear()


def _staged(runtime: Runtime, shape: Shape) -> torch.Tensor:
    """Staging in place, [slot, key or value and head, numbers]."""
    with warnings.catch_warnings():
        # The array cannot be written to, and nobody does: torch has no word for that.
        warnings.simplefilter("ignore", UserWarning)
        raw = torch.from_numpy(runtime.staged)
    return raw.view(shape.dtype).view(len(raw), 2 * shape.heads, -1)
