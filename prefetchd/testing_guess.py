"""What may be wrong with one guess, in words with an example from it.

Decides what a `Guess` must look like, whatever it guesses. Refuses to know who said it and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from prefetchd.model import Geometry
from prefetchd.predictor import Guess

Fault = tuple[str, str]
"""The kind of a fault, one short word, and what is wrong and what to do, in words."""
FIELDS = "pages", "confidence", "deadline_ns", "sources", "keep", "restores"


def faults_of(guess: object, geometry: Geometry, slots: int, limit: int) -> list[Fault]:
    """All that is wrong with what `predict` returned when it was asked for `limit` pages."""
    if not isinstance(guess, Guess):
        return [("guess", f"it returned {guess!r:.60}: return a Guess, an empty one for no pages")]
    faults = [*_of_ids("pages", guess.pages, geometry), *_of_ids("keep", guess.keep, geometry)]
    if not faults or faults[0][0] != "type":
        faults += _of_counts(guess, slots, limit)
        faults += _of_confidence(guess)
        faults += _of_sources(guess)
    deadline = guess.deadline_ns
    if deadline is not None and not isinstance(deadline, int | np.integer):
        faults.append(("type", f"deadline_ns is {deadline!r:.40}: give an int, or None"))
    return faults


def form_faults(guess: Guess) -> Iterator[str]:
    """What is wrong with a guess's arrays themselves, whatever they hold, in words."""
    arrays: tuple[tuple[str, object, type[np.generic]], ...] = (
        ("pages", guess.pages, np.int64),
        ("keep", guess.keep, np.int64),
        ("confidence", guess.confidence, np.float32),
        ("sources", guess.sources, np.uint8),
    )
    for name, array, dtype in arrays:
        if array is not None:
            for _, words in _of_array(name, array, dtype):
                yield words


def _of_array(name: str, array: object, dtype: type[np.generic]) -> Iterator[Fault]:
    """It is a flat numpy array of this type."""
    wanted = np.dtype(dtype).name
    if not isinstance(array, np.ndarray):
        yield "type", f"{name} is a {type(array).__name__}, not a numpy array of {wanted}"
    elif array.dtype != dtype:
        example = f", such as {array.flat[0]!s:.20}" if array.size else ""
        yield (
            "type",
            f"{name} holds {array.dtype}{example}: make it {wanted}, "
            f"for example with .astype(np.{wanted})",
        )
    elif array.ndim != 1:
        yield "type", f"{name} has the shape {array.shape}: make it flat, with .reshape(-1)"


def _of_ids(name: str, ids: Any, geometry: Geometry) -> Iterator[Fault]:
    faults = list(_of_array(name, ids, np.int64))
    yield from faults
    if faults or not len(ids):
        return
    wrong = ids[(ids < 0) | (ids >= geometry.pages)]
    if len(wrong):
        yield (
            "range",
            f"{name} names page {wrong[0]}, and there are 0 to {geometry.pages - 1}: "
            f"{len(wrong)} of {len(ids)} ids are no page",
        )
    distinct, times = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        most = int(np.argmax(times))
        yield (
            "duplicates",
            f"{name} names page {distinct[most]} {times[most]} times: name each page once, at its "
            f"best place, since a repetition takes the place of another page",
        )


def _of_counts(guess: Guess, slots: int, limit: int) -> Iterator[Fault]:
    if len(guess.pages) > limit:
        yield (
            "limit",
            f"it names {len(guess.pages)} pages when asked for at most {limit}: "
            f"cut to the best with [:limit]",
        )
    if len(guess.keep) > slots:
        yield (
            "limit",
            f"keep names {len(guess.keep)} pages, and staging has only {slots} slots: "
            f"keep far fewer, or nothing else finds room",
        )


def _of_confidence(guess: Guess) -> Iterator[Fault]:
    sure: Any = guess.confidence
    if sure is None:
        return
    faults = [("confidence", words) for _, words in _of_array("confidence", sure, np.float32)]
    yield from faults
    if faults:
        return
    if len(sure) != len(guess.pages):
        yield "confidence", f"there are {len(sure)} confidences for {len(guess.pages)} pages"
    missing = np.flatnonzero(np.isnan(sure))
    if len(missing):
        yield "confidence", f"the confidence at place {missing[0]} is NaN"
        return
    wrong = sure[(sure < 0) | (sure > 1)]
    if len(wrong):
        yield "confidence", f"a confidence is {wrong[0]:.4g}: it is a chance, from 0 to 1"
    rising = np.flatnonzero(np.diff(sure) > 0)
    if len(rising) and not guess.restores:
        place = rising[0]
        yield (
            "order",
            f"confidence rises from {sure[place]:.4g} to {sure[place + 1]:.4g} at place "
            f"{place + 1}: the best comes first, as the tail is what is cut off",
        )


def _of_sources(guess: Guess) -> Iterator[Fault]:
    sources: Any = guess.sources
    if sources is None:
        return
    faults = list(_of_array("sources", sources, np.uint8))
    yield from faults
    if not faults and len(sources) != len(guess.pages):
        yield "type", f"there are {len(sources)} sources for {len(guess.pages)} pages"


# --- comparing ---


def flat(guess: object) -> list[Any]:
    """A guess as plain values in the order of FIELDS, whatever is wrong with it."""
    if not isinstance(guess, Guess):
        return [repr(guess)]
    fields = [getattr(guess, name) for name in FIELDS]
    return [field.tolist() if isinstance(field, np.ndarray) else field for field in fields]


def difference(one: list[Any], other: list[Any], *, rounding: float = 0.0) -> str:
    """The first thing in which two flat guesses differ, or nothing.

    `rounding`: confidences that differ by no more than this share of themselves are the same.
    """
    if repr(one) == repr(other):  # and not by ==: a NaN equals none
        return ""
    for name, here, there in zip(FIELDS, one, other, strict=False):
        if repr(here) == repr(there):
            continue
        if rounding and name == "confidence" and _close(here, there, rounding):
            continue
        if not isinstance(here, list) or not isinstance(there, list):
            return f"{name} is {here!r:.60}, and then {there!r:.60}"
        for place, pair in enumerate(zip(here, there, strict=False)):
            if repr(pair[0]) != repr(pair[1]):
                return f"{name}[{place}] is {pair[0]!r}, and then {pair[1]!r}"
        return f"{name} has {len(here)} entries, and then {len(there)}"
    if len(one) == len(other) == len(FIELDS):
        return ""
    return f"it is {one!r:.60}, and then {other!r:.60}"


def _close(one: object, other: object, rounding: float) -> bool:
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return False
    return np.allclose(one, other, rtol=rounding, atol=0, equal_nan=True)
