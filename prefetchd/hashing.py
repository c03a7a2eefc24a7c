"""xxh3-64 of many rows of one array, for the checks of pages.

Decides by whose hand: the package `xxhash` keeps the interpreter's lock while it hashes up to
64 KiB, older releases of it while they hash anything, and a thread that checks pages would stand in
the way of one that computes. Its library's own function, called through ctypes, lets go of the
lock, for those who ask for that: beside threads that are busy in Python each page may then have to
wait for it. Rows below 16 KiB take less time than letting go does. The hashes are the same.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import repeat

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefetchd.model import Ids

log = logging.getLogger("prefetchd")

_UNLOCKED_FROM_BYTES = 1 << 14
Hash = Callable[[int, int, int], int]


def _library_function() -> Hash | None:
    """Of an address, a length (bytes) and a seed; None where the package does not show it."""
    sample, seed = bytes(range(256)) * 5, 2**64 - 5
    try:
        library = ctypes.CDLL(import_module("xxhash._xxhash").__file__)
        function = library.XXH3_64bits_withSeed
    except (AttributeError, ImportError, OSError) as error:
        log.info("pages are checked under the interpreter's lock: %s", error)
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64)
    function.restype = ctypes.c_uint64
    place = ctypes.create_string_buffer(sample, len(sample))
    if function(ctypes.addressof(place), len(sample), seed) != xxhash.xxh3_64_intdigest(
        sample, seed
    ):
        log.info("pages are checked under the interpreter's lock: xxhash's library differs from it")
        return None
    return function


_unlocked = _library_function()


def hash_rows(
    rows: NDArray[np.uint8], places: Ids, seeds: list[int], *, unlocked: bool = False
) -> NDArray[np.uint64]:
    """Of `rows[place]` for each of `places`, with a seed each. A row's bytes lie side by side.
    `unlocked`: without the interpreter's lock, as far as that can be. Raises IndexError for a place
    that there is not, also for one below 0."""
    length, numbers = rows.shape[1], places.tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) < len(rows):
        raise IndexError(f"rows {min(numbers)} to {max(numbers)} of {len(rows)}")
    hashes: Iterable[int]
    free = unlocked and length >= _UNLOCKED_FROM_BYTES and rows.strides[1] == 1
    if free and _unlocked is not None:
        addresses = (rows.ctypes.data + places * rows.strides[0]).tolist()
        hashes = map(_unlocked, addresses, repeat(length), seeds)
    else:
        # A loop written out costs as much as hashing, around pages of a few KiB.
        hashes = map(xxhash.xxh3_64_intdigest, [rows[n] for n in numbers], seeds)
    return np.fromiter(hashes, np.uint64, len(places))
