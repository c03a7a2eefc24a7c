"""Sizes and shares as people write them: `64KiB`, `1.5G`, `25%`. Decides parsing only."""

from __future__ import annotations

import re
from fractions import Fraction

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MOST = 2**63 - 1  # of a file, and of what fits into a number of the processor


def parse_bytes(text: str) -> int:
    """`65536`, `64KiB`, `64K` (both 1,024) or `64KB` (1,000). Raises ValueError in words."""
    pattern = r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B)?|B)?\s*"
    match = re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB")
    number, prefix, suffix = match.group(1), match.group(2) or "", match.group(3) or ""
    base = 1000 if suffix.upper() == "B" else 1024
    size = Fraction(number) * base ** _POWERS[prefix.upper()]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of bytes")
    if size > _MOST:
        raise ValueError(f"{text!r} is more than any machine has; give at most 8 EiB")
    return int(size)


def parse_share(text: str) -> float | None:
    """0.25 for `25%`; None when the text is no percentage. Raises ValueError above 100 %."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text, re.ASCII)
    if match is None:
        return None
    share = float(match.group(1)) / 100
    if share > 1:
        raise ValueError(f"{text!r} is out of range; give at most 100 %")
    return share
