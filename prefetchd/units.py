"""Sizes and shares as people write them: `64KiB`, `1.5G`, `25%`. Decides parsing only."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(text: str) -> int:
    """`65536`, `64KiB`, `64K` (both 1,024) or `64KB` (1,000). Raises ValueError in words."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write bytes, or a number with KiB, MiB, GiB")
    number, prefix, suffix = match.group(1), match.group(2).upper(), (match.group(3) or "").upper()
    factor = _FACTORS[prefix + "B"] if suffix == "B" and prefix else _FACTORS[prefix]
    size = float(number) * factor
    if size != int(size):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size)


def parse_share(text: str) -> float | None:
    """0.25 for `25%`; None when the text is no percentage. Raises ValueError out of 0..100 %."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        return None
    share = float(match.group(1)) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is out of range; give more than 0 % and at most 100 %")
    return share
