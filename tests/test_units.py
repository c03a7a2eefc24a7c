"""Sizes and shares: what people write, and what is refused in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.units import parse_bytes, parse_share

POWERS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("64KiB", 65536),
        ("64 kib", 65536),
        ("64K", 65536),
        ("64KB", 64000),
        ("1.5G", 3 << 29),
        ("0.25MB", 250_000),
        (" 7B ", 7),
        ("14GB", 14 * 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@given(number=st.integers(0, 2**63), prefix=st.sampled_from(sorted(POWERS)))
def test_whole_numbers_are_exact_or_too_large(number: int, prefix: str) -> None:
    text = f"{number}{prefix}iB" if prefix else f"{number}B"
    if number * POWERS[prefix] < 2**63:
        assert parse_bytes(text) == number * POWERS[prefix]
    else:
        with pytest.raises(ValueError, match="more than any machine has"):
            parse_bytes(text)


@pytest.mark.parametrize("text", ["", "K", "-1", "1e3", "64KiBB", "5iB", "1 2", "\u0661", "nan"])
def test_what_is_no_size_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_parts_of_a_byte_are_refused() -> None:
    with pytest.raises(ValueError, match="no whole number of bytes"):
        parse_bytes("0.3KiB")


def test_shares() -> None:
    assert [parse_share(text) for text in ("25%", "12.5 %", "0%", "100%")] == [0.25, 0.125, 0, 1]
    assert parse_share("25") is None
    assert parse_share("64KiB") is None
    with pytest.raises(ValueError, match="at most 100 %"):
        parse_share("101%")
