"""How guesses of several sources become one: order, duplicates, and who said what.

Decides nothing about anybody's worth; pure functions over arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefetchd.model import NO_IDS, Codes, Ids, Scores
from prefetchd.predictor import Guess

SOURCES_MAX = 16  # a page's source code is this x the source's own code + the source's number


@dataclass(frozen=True, slots=True)
class Weighed:
    """A source's guess after its measure was taken."""

    pages: Ids
    scores: Scores
    codes: Codes
    deadline_ns: int | None
    held: Ids


def source_codes(number: int, own: Codes | None, count: int) -> Codes:
    """What tells the source of each page, and the source's own code in it."""
    if own is None:
        return np.full(count, number, np.uint8)
    return own[:count] % SOURCES_MAX * np.uint8(SOURCES_MAX) + np.uint8(number)


def best_first(pages: Ids, scores: Scores) -> Ids:
    """Places in `pages` by falling score, each page at its best place only."""
    order = np.argsort(-scores, kind="stable")
    best: Ids = order.take(firsts(pages.take(order)))
    return best


def firsts(pages: Ids) -> Ids:
    """The first place of each of these pages, in order."""
    # Each page above its place: no two are equal, and whole numbers are sorted fast.
    place_bits = len(pages).bit_length()
    keys = pages << place_bits
    keys += np.arange(len(pages))
    keys.sort()
    numbers = keys >> place_bits
    new = np.ones(len(pages), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=new[1:])
    places: Ids = keys[new] & ((1 << place_bits) - 1)
    places.sort()
    return places


def each_once(parts: list[Ids]) -> Ids:
    """All pages in the order given, each at its first place only."""
    if len(parts) < 2:
        return parts[0] if parts else NO_IDS
    every = np.concatenate(parts)
    return every.take(firsts(every))


def merged(guesses: Sequence[Weighed], limit: int) -> Guess:
    """One guess of at most `limit` pages, best first, and all that any of them holds."""
    said = [guess for guess in guesses if len(guess.pages)]
    held = each_once([guess.held for guess in guesses if len(guess.held)])
    if not said:
        return Guess(keep=held)
    pages = np.concatenate([guess.pages for guess in said])
    scores = np.concatenate([guess.scores for guess in said])
    codes = np.concatenate([guess.codes for guess in said])
    best = best_first(pages, scores)[: max(0, limit)]
    deadlines = [guess.deadline_ns for guess in said]
    known = [deadline for deadline in deadlines if deadline is not None]
    # Pages without a deadline may be wanted sooner than those with one.
    deadline_ns = min(known) if known and len(known) == len(deadlines) else None
    return Guess(pages[best], scores[best], deadline_ns, codes[best], held)
