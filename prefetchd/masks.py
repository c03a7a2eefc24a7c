"""Small masks, looked at often. Decides how that is quick; refuses to know what they are of."""

from __future__ import annotations

from prefetchd.model import Mask


def every(mask: Mask) -> bool:
    """Whether all of a mask holds. Small masks are looked at some twenty times a demand, and
    looking for a byte takes a tenth of the time of any of numpy's ways."""
    return 0 not in mask.tobytes()


def some(mask: Mask) -> bool:
    """Whether any of a mask holds, as quickly."""
    return 1 in mask.tobytes()
