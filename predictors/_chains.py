"""What has been seen across requests: which block follows which, and which pages get used.

Two tables of fixed size for the predictor `cross_request`. They decide how sure a path of blocks
is; they know neither hints nor budgets.
"""

from __future__ import annotations

import numpy as np

from prefetchd.model import NO_IDS, Geometry, Ids, Mask, Scores

FLOOR = 0.1  # a path ends where its confidence falls below


class Chains:
    """The last successor of each block, given the block before it, and how often it held.

    Two int32 and two uint8 a block. The prior of an edge's chance is pooled over the first tests
    of all edges, apart for the last edge of a chain and for the inner ones. A later turn repeats
    a chain and replaces its end, a block that was only partly full: on the public conversation
    trace 98.7 % of inner edges held and 2 % of last ones.
    """

    def __init__(self, blocks: int) -> None:
        self._before = np.full(blocks, -1, np.int32)
        self._after = np.full(blocks, -1, np.int32)
        self._held = np.zeros(blocks, np.uint8)
        self._tested = np.zeros(blocks, np.uint8)
        self._pooled_held = np.array([7.0, 7.0])  # of last edges, of inner edges
        self._pooled_tested = np.array([8.0, 8.0])
        # Scalar reads through a memory view take a third of the time of numpy's.
        self._before_view = self._before.data
        self._after_view = self._after.data
        self._held_view = self._held.data
        self._tested_view = self._tested.data

    def learn(self, sequence: Ids) -> None:
        """Take in consecutive blocks of one request; the inner ones must be distinct."""
        if len(sequence) < 3:
            return
        before, at, after = sequence[:-2], sequence[1:-1], sequence[2:]
        known: Mask = self._before[at] == before
        self._test(at[known], after[known])
        replaced = at[~known]
        self._held[replaced] = 0
        self._tested[replaced] = 0
        self._before[at] = before
        self._after[at] = after

    def follow(self, before: int, at: int, after: int) -> None:
        """As `learn` of these three, in a fifth of the time."""
        if self._before_view[at] != before:
            self._held_view[at] = self._tested_view[at] = 0
        else:
            expected = self._after_view[at]
            held = int(expected == after)
            if not self._tested_view[at]:
                inner = int(self._before_view[expected] == at)
                self._pooled_tested[inner] += 1
                self._pooled_held[inner] += held
            elif self._tested_view[at] == 255:
                self._tested_view[at] //= 2
                self._held_view[at] //= 2
            self._tested_view[at] += 1
            self._held_view[at] += held
        self._before_view[at] = before
        self._after_view[at] = after

    def end(self, before: int, at: int) -> None:
        """A request ended here: what followed the last time did not come."""
        if self._before_view[at] == before:
            self._test(np.array([at]), np.array([-1]))

    def walk(self, before: int, at: int, steps: int) -> tuple[Ids, Scores]:
        """The blocks that should follow `before, at`, and the confidence of the path to each."""
        last, inner = (2 * self._pooled_held / self._pooled_tested).tolist()
        path: list[int] = []
        confidence: list[float] = []
        sure = 1.0
        follows = self._before_view[at] == before
        while follows and len(path) < steps:
            before, at = at, self._after_view[at]
            follows = self._before_view[at] == before
            prior = inner if follows else last
            sure *= (self._held_view[before] + prior) / (self._tested_view[before] + 2)
            if sure < FLOOR:
                break
            path.append(at)
            confidence.append(sure)
        return np.array(path, np.int64), np.array(confidence, np.float32)

    def _test(self, at: Ids, after: Ids) -> None:
        """Compare the successors held for `at` with those that came."""
        expected = self._after[at]
        held: Mask = expected == after
        fresh: Mask = self._tested[at] == 0
        inner = (self._before[expected[fresh]] == at[fresh]).astype(np.int64)
        self._pooled_tested += np.bincount(inner, minlength=2)
        self._pooled_held += np.bincount(inner[held[fresh]], minlength=2)
        full = at[self._tested[at] == 255]
        self._tested[full] //= 2
        self._held[full] //= 2
        self._tested[at] += 1
        self._held[at] += held


class Uses:
    """What requests have touched: those that run now (a bit each), and those that have ended.

    Six bytes a page and six a block.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._layers = geometry.layers
        self.blocks_touched = np.zeros(geometry.blocks, np.uint32)
        self.pages_touched = np.zeros((geometry.blocks, geometry.layers), np.uint32)
        self._pages_flat = self.pages_touched.reshape(-1)
        self._block_requests = np.zeros(geometry.blocks, np.uint8)
        self._page_requests = np.zeros((geometry.blocks, geometry.layers), np.uint8)
        self._blocks_view = self.blocks_touched.data
        self._pages_view = self._pages_flat.data
        self._block_counts = self._block_requests.data
        self._page_counts = self._page_requests.reshape(-1).data

    def touch(self, pages: Ids, bit: np.uint32) -> Ids:
        """Mark pages, and return the blocks that this request had not touched, in order."""
        blocks = pages // self._layers
        (places,) = ((self.blocks_touched.take(blocks) & bit) == 0).nonzero()
        self._pages_flat[pages] |= bit
        if len(places) == 0:
            return NO_IDS
        new = blocks.take(places)
        self.blocks_touched[new] |= bit
        return np.array(list(dict.fromkeys(new.tolist())), np.int64)

    def touch_one(self, page: int, bit: int) -> bool:
        """Mark a page; whether this request had not touched its block."""
        block = page // self._layers
        new = not self._blocks_view[block] & bit
        self._pages_view[page] |= bit
        self._blocks_view[block] |= bit
        return new

    def finish(self, bit: np.uint32, blocks: Ids) -> None:
        """A request is over: count the pages it used of these blocks, all that it touched, and
        free its bit."""
        full = blocks[self._block_requests[blocks] == 255]
        self._block_requests[full] //= 2
        self._page_requests[full] //= 2
        self._block_requests[blocks] += 1
        self._page_requests[blocks] += (self.pages_touched[blocks] & bit) != 0
        self.blocks_touched[blocks] &= ~bit
        self.pages_touched[blocks] &= ~bit

    def unread(self, blocks: Ids, bit: np.uint32) -> Mask:
        """(blocks, layers) bool: pages this request has not touched and that may be of use."""
        known = self._block_requests[blocks] > 0
        useful = (self._page_requests[blocks] > 0) | ~known[:, None]
        unread: Mask = useful & ((self.pages_touched[blocks] & bit) == 0)
        return unread

    def has_read(self, block: int, bit: int) -> bool:
        """Whether this request has touched a block, in a geometry of one layer, or has no use for
        it: as `unread` says of one."""
        useless = self._block_counts[block] and not self._page_counts[block]
        return bool(self._blocks_view[block] & bit or useless)

    def shares(self, blocks: Ids) -> Scores:
        """(blocks, layers) float32: the share of ended requests over a block that used a page.

        1 for all pages of a block over which no request has ended: then they may all be needed.
        """
        requests = self._block_requests[blocks].astype(np.float32)[:, None]
        known = requests > 0
        return np.where(known, self._page_requests[blocks] / np.maximum(requests, 1), 1).astype(
            np.float32
        )
