"""The vocabulary: pages, outcomes, and the events and commands that cross every boundary.

Decides what things are called and which arrays carry them. Knows nothing of devices, clocks,
policies or files. Every event and command is one frozen object per *batch*; its arrays are owned
by whoever receives it and are never written to afterwards.

A *page* is one token block of one layer: page id = block index x layers + layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
"""Page ids or block indices, 1-d."""
Slots = NDArray[np.int64]
"""Cells of the staging buffer, 1-d."""
Scores = NDArray[np.float32]
"""Higher is more likely or more important; comparable within one array only."""
Mask = NDArray[np.bool_]
Codes = NDArray[np.uint8]
"""Small enumerations, one a page: Outcome, Verdict, or the number of a predictor's source."""

NO_IDS: Ids = np.empty(0, np.int64)
NO_IDS.setflags(write=False)  # it is everybody's


class Outcome(IntEnum):
    """How a demanded page was found."""

    RETAINED = 0  # resident since an earlier demand, or since a caller brought it
    TIMELY = 1  # resident thanks to a prefetch
    LATE = 2  # its read was still in flight
    MISS = 3  # it had to be read, or could not be


class Verdict(IntEnum):
    """What became of a prefetched page."""

    USEFUL = 0  # demanded after it had arrived
    LATE = 1  # demanded while it was still on its way
    WASTED = 2  # evicted or cancelled before anybody asked


class IoClass(IntEnum):
    """The three kinds of I/O, most urgent first."""

    DEMAND = 0
    PREFETCH = 1
    WRITE_BACK = 2


@dataclass(frozen=True, slots=True)
class Geometry:
    """The space of page ids: `blocks` token blocks of `layers` pages each."""

    layers: int
    blocks: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.blocks < 1:
            raise ValueError(f"a geometry needs layers and blocks, got {self}")

    @property
    def pages(self) -> int:
        return self.layers * self.blocks

    def block_of(self, pages: Ids) -> Ids:
        return pages // self.layers

    def page_ids(self, blocks: Ids, layer: int) -> Ids:
        return blocks * self.layers + layer

    def checked_page_ids(self, blocks: Ids, layer: int) -> Ids:
        """Raises ValueError for a layer that there is not."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} of a store with {self.layers} pages a block")
        return self.page_ids(blocks, layer)

    def all_pages(self, blocks: Ids) -> Ids:
        """Of these blocks, one after another, each in layer order."""
        return (blocks[:, None] * self.layers + np.arange(self.layers)).reshape(-1)

    def real(self, blocks: Ids) -> Ids:
        """Those of `blocks` that there can be: callers' hints may name anything."""
        return blocks[(blocks >= 0) & (blocks < self.blocks)]


# --- hints: what an engine says ahead of time ---


@dataclass(frozen=True, slots=True)
class PageHint:
    """Pages of one layer that an engine expects to demand next, distinct, best first. `scores`
    (float32, same length, falling) are the engine's own: masses, logits or anything else."""

    pages: Ids
    scores: Scores


@dataclass(frozen=True, slots=True)
class ChainHint:
    """A request that will come: its known blocks, in prefix order, and when it is expected."""

    request: int
    blocks: Ids
    start_ns: int | None = None


@dataclass(frozen=True, slots=True)
class DoneHint:
    """A request that has ended, and why (`"end_turn"`, `"tool_use"`, ... or empty).

    `blocks`: all its blocks in prefix order, those that it put included; empty when not told.
    """

    request: int
    reason: str = ""
    return_ns: int | None = None
    blocks: Ids = field(default_factory=lambda: NO_IDS)


Hint = PageHint | ChainHint | DoneHint


# --- what a predictor is told of ---


@dataclass(frozen=True, slots=True)
class Access:
    """One demand as it was met: pages in the order asked, and how each was found (Outcome).

    `scores` (float32) are the engine's own weights of these pages (its attention mass), if it
    gave any; `request` tells streams apart (0 when there is only one); `now_ns` is when it came,
    on the events' clock (0 = not known).
    """

    pages: Ids
    outcomes: Codes
    request: int = 0
    scores: Scores | None = None
    now_ns: int = 0


@dataclass(frozen=True, slots=True)
class Feedback:
    """What became of prefetched pages: the source that guessed each, and its Verdict."""

    pages: Ids
    sources: Codes
    verdicts: Codes


# --- events: what has happened ---


@dataclass(frozen=True, slots=True)
class Demanded:
    """An engine needs these pages, all different, now. They are pinned until `Released`.

    `once`: they are part of a pass over more than staging holds. Those that had to be read leave
    with their pins, what is here stays, and nobody learns from it.
    """

    ticket: int
    pages: Ids
    deadline_ns: int
    request: int = 0
    scores: Scores | None = None
    once: bool = False


@dataclass(frozen=True, slots=True)
class Used:
    """What engines have read by the books, without asking: demands of `counts` pages each, one
    after another, with the request of each."""

    pages: Ids
    counts: Ids
    requests: Ids
    scores: Scores | None = None

    def parts(self) -> list[slice]:
        """Where each demand's pages are."""
        ends = np.cumsum(self.counts).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True)
class Released:
    """The pins of a ticket are no longer needed."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Hinted:
    hint: Hint


@dataclass(frozen=True, slots=True)
class Completed:
    """Reads have ended: each slot's generation at submit, and whether its page is verified."""

    slots: Slots
    generations: NDArray[np.int64]
    verified: Mask


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing urgent is waiting: time to learn a little, to plan, to look at deadlines."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """These pages have gone from the store; nobody waits for them, or reads them by a demand."""

    pages: Ids


@dataclass(frozen=True, slots=True)
class Offered:
    """A caller has bytes for these distinct, absent pages, which nobody may ask for yet. There is
    room for all of them (a `Fill` comes of it) or for none."""

    pages: Ids


@dataclass(frozen=True, slots=True)
class Filled:
    """The bytes of offered pages are in their slots. They stay until `Cleaned`."""

    pages: Ids


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Filled pages need not be kept any longer: the store has them, or never will."""

    pages: Ids


StoreEvent = Forgotten | Offered | Filled | Cleaned
Event = Demanded | Used | Released | Hinted | Completed | Idle | StoreEvent


# --- commands: what is to be done ---


@dataclass(frozen=True, slots=True)
class Read:
    """Read pages from the store into slots. `generations` come back in `Completed`."""

    pages: Ids
    slots: Slots
    generations: NDArray[np.int64]
    io_class: IoClass
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Fill:
    """Copy the bytes of offered pages into these slots; then say `Filled`."""

    pages: Ids
    slots: Slots


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop these reads if possible. Their slots stay the device's until they end."""

    slots: Slots


@dataclass(frozen=True, slots=True)
class Ready:
    """A demand is answered: for each page its slot, or -1 for one that could not be had, and in
    `waits_ns` (int64) the time from demand to readable: 0 if it was resident."""

    ticket: int
    slots: Slots
    outcomes: Codes
    waits_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanSoon:
    """An `Idle` event is wanted as soon as nothing urgent is waiting."""


Command = Read | Fill | Cancel | Ready | PlanSoon
