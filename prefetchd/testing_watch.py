"""What a hook touches besides its arguments: clocks, chance, files, and memory that only grows.

Decides which calls a predictor must not make, and how much memory is too much. Sees every call of
a built-in function from Python code, however it was imported; what compiled code calls by itself
is not seen, but then results that differ tell of it.
"""

from __future__ import annotations

import datetime
import gc
import io
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np

from prefetchd.model import Geometry

CLOCK, RANDOM, FILES = "clock", "random", "files"
_CLOCKS = (
    "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time "
    "process_time_ns thread_time thread_time_ns clock_gettime clock_gettime_ns sleep"
)
_FORBIDDEN: dict[Any, tuple[str, str]] = {
    **{
        getattr(time, name): (CLOCK, f"time.{name}")
        for name in _CLOCKS.split()
        if hasattr(time, name)
    },
    datetime.datetime.now: (CLOCK, "datetime.now"),
    datetime.datetime.utcnow: (CLOCK, "datetime.utcnow"),
    datetime.datetime.today: (CLOCK, "datetime.today"),
    datetime.date.today: (CLOCK, "date.today"),
    random.random: (RANDOM, "the generator of the module random"),
    random.getrandbits: (RANDOM, "the generator of the module random"),
    os.urandom: (RANDOM, "os.urandom (as default_rng() without a seed does)"),
    io.open: (FILES, "open"),
    os.open: (FILES, "os.open"),
}
GLOBAL_NUMPY = "numpy's global generator (np.random.random and its like)"
Seen = tuple[str, str, str]
"""The kind of what was called, its name, and the place of the call."""


class Watch:
    """Notes forbidden calls made while it is `on`. `own` is the file in which to say the place."""

    def __init__(self, own: str | None) -> None:
        self._own = own
        self.seen: list[Seen] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """The profiler that was set before has a rest meanwhile."""
        state = _numpy_state()
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
        if not np.array_equal(state, _numpy_state()):
            self.seen.append((RANDOM, GLOBAL_NUMPY, ""))

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call":
            return
        try:
            found = _FORBIDDEN.get(function)
        except TypeError:  # a method of something that cannot be hashed: none of ours
            return
        if found and not _imports(frame):
            self.seen.append((*found, self._place(frame)))

    def _place(self, frame: FrameType) -> str:
        for caller in _callers(frame):
            if caller.f_code.co_filename == self._own:
                frame = caller
                break
        return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _numpy_state() -> Any:
    state: Any = np.random.get_state(legacy=False)
    return np.append(state["state"]["key"], [state["state"]["pos"], state["has_gauss"]])


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller: FrameType | None = frame
    while caller is not None:
        yield caller
        caller = caller.f_back


def _imports(frame: FrameType) -> bool:
    """Whether a module is being imported just now: that may read files, once."""
    return any("importlib" in caller.f_code.co_filename for caller in _callers(frame))


# --- memory ---

_FRAMES = 4
LONGER = 4
"""So many times the traffic, for what has grown at first: a table may take long to fill."""
SLACK_BYTES = 512
PAGE_ALLOWANCE_BYTES = 8
"""What a round may add for each page and slot."""


def memory_growth(
    geometry: Geometry, slots: int, own: str | None, go_on: Callable[[], None]
) -> tuple[list[int], str] | None:
    """Bytes taken after each round of `go_on`, and what takes them, if they grow without end.

    `own` is the file in which to say the place.
    """
    began = not tracemalloc.is_tracing()
    if began:
        tracemalloc.start(_FRAMES)
    try:
        allowed = SLACK_BYTES + PAGE_ALLOWANCE_BYTES * (geometry.pages + slots)
        go_on()  # things that are taken once, caches of the interpreter among them
        taken = _taken(go_on, 1)
        if not _grows(taken, allowed):
            return None
        before = tracemalloc.take_snapshot()
        taken = _taken(go_on, LONGER)
        if not _grows(taken, allowed * LONGER):
            return None
        return taken, _where(before, own)
    finally:
        if began:
            tracemalloc.stop()


def _taken(go_on: Callable[[], None], times: int) -> list[int]:
    taken = [_bytes_now()]
    for _ in range(2):
        for _ in range(times):
            go_on()
        taken.append(_bytes_now())
    return taken


def _bytes_now() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _grows(taken: list[int], allowed: int) -> bool:
    return all(later - earlier > allowed for earlier, later in pairwise(taken))


def _where(before: tracemalloc.Snapshot, own: str | None) -> str:
    """What took most of what was taken since."""
    most = tracemalloc.take_snapshot().compare_to(before, "traceback")[0]
    latest_first = list(reversed(most.traceback))
    for frame in latest_first:
        if frame.filename == own:
            return f"taken in {own}, line {frame.lineno}"
    if any(frame.filename.endswith("testing_traffic.py") for frame in latest_first):
        return "arrays that it was told of"
    return f"taken in {latest_first[0].filename}, line {latest_first[0].lineno}"
