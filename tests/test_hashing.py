"""Rows are hashed as the package xxhash does it, with the interpreter's lock and without."""

from __future__ import annotations

import ctypes
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from prefetchd import hashing

SEEDS = [0, 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize(
    "length", [0, 1, 240, 4096, (1 << 14) - 1, 1 << 14, 24576, 1 << 16, 1 << 18]
)
@pytest.mark.parametrize("unlocked", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_hashes_are_those_of_xxhash(
    length: int, unlocked: bool, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:
        monkeypatch.setattr(hashing, "_unlocked", None)
    random = np.random.default_rng(length)
    rows = random.integers(0, 256, (5, length + 24), np.uint8)[:, 8 : 8 + length]
    places = np.array([4, 0, 0, 2])
    expected = [
        xxhash.xxh3_64_intdigest(rows[n].tobytes(), s) for n, s in zip(places, SEEDS, strict=True)
    ]
    found = hashing.hash_rows(rows, places, SEEDS, unlocked=unlocked)
    assert found.dtype == np.uint64
    assert found.tolist() == expected
    assert len(hashing.hash_rows(rows, places[:0], [])) == 0


@pytest.mark.parametrize("length", [4096, 24576, 1 << 18])
@pytest.mark.parametrize("place", [3, -1])
def test_no_memory_beyond_the_rows_is_hashed(length: int, place: int) -> None:
    rows = np.zeros((3, length), np.uint8)
    with pytest.raises(IndexError, match="of 3"):
        hashing.hash_rows(rows, np.array([1, place]), [0, 0])


@pytest.mark.parametrize("length", [1 << 14, 1 << 16, 1 << 20])
def test_large_rows_are_hashed_without_the_lock_if_their_bytes_lie_side_by_side(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []

    def unlocked(address: int, count: int, seed: int) -> int:
        hashed.append(count)
        return seed

    monkeypatch.setattr(hashing, "_unlocked", unlocked)
    rows, places = np.zeros((2, 2 * length), np.uint8), np.array([1, 0])
    assert hashing.hash_rows(rows[:, :length], places, [7, 8], unlocked=True).tolist() == [7, 8]
    assert hashed == [length, length]
    hashing.hash_rows(rows[:, :length], places, [7, 8])
    assert hashed == [length, length], "only if asked for"
    with pytest.raises(ValueError, match="contiguous"):
        hashing.hash_rows(rows[:, ::2], places, [7, 8], unlocked=True)


def test_a_library_that_differs_or_hides_the_function_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hashing._library_function() is not None
    real = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
    other = SimpleNamespace(XXH3_64bits_withSeed=real.XXH64)  # as many arguments
    for library in (other, SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", lambda path, library=library: library)
        assert hashing._library_function() is None
