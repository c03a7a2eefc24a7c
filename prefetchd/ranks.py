"""Where a page's score stands among those of its turn.

Decides what a rank is: the share of the scores that are below it. Knows nothing of pages, nor of
what a rank is good for.
"""

from __future__ import annotations

import numpy as np

from prefetchd.layer_turns import Turns
from prefetchd.model import Codes, Scores


def rank_shares(scores: Scores) -> Codes:
    """For each score the share of all scores that are below it, in 255ths."""
    order = scores.argsort()
    rising = scores[order]
    below = np.arange(len(order))
    below[1:][rising[1:] == rising[:-1]] = 0  # equal ones share the place of the first
    shares = (np.maximum.accumulate(below) * (255 / len(order)) + 0.5).astype(np.uint8)
    ranks = np.empty_like(shares)
    ranks[order] = shares
    return ranks


def rank_shares_of(scores: Scores, turns: Turns) -> Codes:
    """The same, each score among those of its own turn."""
    # As whole numbers in the same order, the turn above and the place below, all are ranked by one
    # fast sort. Each turn's stay where the turn was.
    count = len(scores)
    place_bits = count.bit_length()
    score_bits = min(32, 63 - place_bits - len(turns).bit_length())
    bits = np.ascontiguousarray(scores, np.float32).view(np.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64)
    keys >>= 32 - score_bits
    keys += (turns.which << score_bits) + (1 << score_bits - 1)
    keys <<= place_bits
    keys += np.arange(count)
    keys.sort()
    order = keys & ((1 << place_bits) - 1)
    keys >>= place_bits
    below = np.arange(count)
    below[1:] *= keys[1:] != keys[:-1]  # equal ones share the place of the first
    np.maximum.accumulate(below, out=below)
    below -= turns.starts[turns.which]
    shares = np.empty(count, np.uint8)
    shares[order] = below * (255 / turns.counts[turns.which]) + 0.5
    return shares
