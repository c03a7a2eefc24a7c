"""Load, recompute, or load the first n: what brings a found prefix into use soonest.

Decides how many of the blocks that were found are worth reading, from what reading and computing
cost. Measures nothing and holds no state: times come with the call.

Loading the first n blocks takes what is queued ahead and what of them is not staged; the rest is
computed afterwards, since prefill needs the prefix. Tokens behind the blocks that were found are
computed in any case and count for neither. The least total wins; of equals the one that loads more,
which leaves the processor to others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.model import Ids, Mask
from prefetchd.read_meter import ReadRate

_NS_MAX = 1 << 62


@dataclass(frozen=True, slots=True)
class Prefill:
    """What an engine says of itself: `tokens_s`, the tokens it computes a second; `pairs_s`, the
    pairs of a token and one before it that its attention computes a second beside that (None: too
    little to count). Token number k has k pairs. Raises ValueError."""

    tokens_s: float
    block_tokens: int = 16
    pairs_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("prefill_tokens_s", self.tokens_s), ("pairs_s", self.pairs_s)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be a number above 0")
        if not 0 < self.block_tokens <= 1 << 20:
            raise ValueError(f"block_tokens is {self.block_tokens}; it must be 1 to 1,048,576")

    def ns(self, blocks: int) -> NDArray[np.float64]:
        """Of computing the blocks from n on, for each n from 0 to `blocks`."""
        before = np.arange(blocks + 1, dtype=np.float64) * self.block_tokens
        tokens = before[-1] - before
        seconds = tokens / self.tokens_s
        if self.pairs_s is not None:
            seconds += tokens * (before[-1] + before - 1) / 2 / self.pairs_s
        nanoseconds: NDArray[np.float64] = seconds * 1e9
        return nanoseconds


@dataclass(frozen=True, slots=True)
class Advice:
    """`blocks`: load the first so many of `found` (those, of the blocks asked about, that can be
    had at all) and compute the rest. `load_ns`, `recompute_ns`, `chosen_ns`: about how long it
    takes to load all that were found, to compute them all, and to do as advised; None: it was
    never measured, or not for so much. `words` says why."""

    blocks: int
    found: int
    load_ns: int | None
    recompute_ns: int
    chosen_ns: int | None
    words: str

    @property
    def choice(self) -> str:
        """ "load", "recompute" or "load the first n"."""
        if self.blocks == 0:
            return "recompute"
        return "load" if self.blocks == self.found else "load the first n"


def advise(
    absent_pages: Ids, on_the_way: Mask, ahead_pages: int, rate: ReadRate, prefill: Prefill
) -> Advice:
    """`absent_pages` (int64): how many pages of each block are to be read first; `on_the_way`: of
    which blocks some are being read; `ahead_pages`: of whatever is in flight."""
    found = len(absent_pages)
    if found == 0:
        return Advice(0, 0, 0, 0, 0, "no block was found, or none that can be had: recompute")
    recompute_ns = prefill.ns(found)
    reading = np.concatenate([[0], np.cumsum(absent_pages)])
    waits = np.concatenate([[False], np.logical_or.accumulate(on_the_way | (absent_pages > 0))])
    load_ns = waits * (rate.base_ns + rate.page_ns * (ahead_pages + reading))
    total_ns = load_ns + recompute_ns
    blocks = found - int(np.argmin(total_ns[::-1]))
    pages = int(reading[-1])
    known = not waits[-1] or pages + ahead_pages <= rate.pages_max
    if waits[-1] and not rate.pages_max:
        # Free of charge as far as anybody knows: all of it, and then it will be known.
        return Advice(found, found, None, _ns(recompute_ns[0]), None, _UNKNOWN)
    return Advice(
        blocks,
        found,
        _ns(load_ns[-1]) if known else None,
        _ns(recompute_ns[0]),
        _ns(total_ns[blocks]) if known or not waits[blocks] else None,
        _words(blocks, found, load_ns[-1], recompute_ns[0]) if known else _beyond(pages, rate),
    )


_UNKNOWN = "no reads were measured within the last minute: load, which measures them"


def _beyond(pages: int, rate: ReadRate) -> str:
    return (
        f"{pages} pages are to be read, far more than were measured at once; the times of up to "
        f"{rate.pages_max} say so"
    )


def _words(blocks: int, found: int, load_ns: float, recompute_ns: float) -> str:
    what = "recompute" if blocks == 0 else f"load the first {blocks} of {found} blocks"
    what = f"load all {found} blocks" if blocks == found else what
    return f"loading takes {load_ns / 1e6:.4g} ms, computing {recompute_ns / 1e6:.4g} ms: {what}"


def _ns(value: float) -> int:
    return int(min(math.ceil(value), _NS_MAX))
