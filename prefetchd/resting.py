"""The garbage collector's rest while something is measured or simulated.

Decides nothing else. What it would search through is mostly the notes of the run itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_rests() -> Iterator[None]:
    """Collect now, and not again before the end; as before afterwards."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
