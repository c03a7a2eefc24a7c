"""What a put may be asked for: which levels of durability there are, and what pages look like.

Decides the words of a refusal. Stores nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DURABILITIES = ("durable", "fast")


def check_terms(durability: str, ttl_s: float | None) -> None:
    """Raises ValueError for a level or a time that there is not."""
    if durability not in DURABILITIES:
        raise ValueError(f"durability is one of {DURABILITIES}, not {durability!r}")
    if ttl_s is not None and not ttl_s > 0:
        raise ValueError(f"a time to live of {ttl_s} s; give a number of seconds above 0")


def as_pages(
    pages: NDArray[np.generic], count: int, layers: int, page_bytes: int
) -> NDArray[np.uint8]:
    """As bytes of shape (count, layers, page_bytes). Raises ValueError if they are not."""
    shape = (count, layers, page_bytes)
    flat = np.ascontiguousarray(pages).reshape(-1).view(np.uint8)
    if flat.size != count * layers * page_bytes or pages.shape[:2] != shape[:2]:
        raise ValueError(
            f"pages for {count} keys take {shape} bytes, got {flat.size} bytes "
            f"(array of shape {pages.shape}, {pages.dtype})"
        )
    return flat.reshape(shape)
