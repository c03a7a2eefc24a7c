"""Keys: what a token block is called, so that equal prefixes meet and tenants never do.

Decides the hash chain only. A block's key hashes its parent's key and its own tokens; the first
parent is made of the namespace and the layout's fingerprint, so that no key of one tenant or
geometry is ever one of another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from prefetchd.layout import Layout


def block_keys(
    tokens: Sequence[int] | NDArray[np.integer],
    layout: Layout,
    namespace: str = "default",
    *,
    after: bytes | None = None,
) -> list[bytes]:
    """One 16-byte key (xxh3-128) per *whole* block of `layout.block_tokens` tokens, in order.

    Tokens are hashed as 64-bit little-endian numbers; the rest that fills no block has no key.
    `after`: the key of the block before the first of `tokens`; without it they begin a chain.
    """
    numbers = np.ascontiguousarray(tokens, "<i8")
    size = layout.block_tokens
    parent = after
    if parent is None:
        salt = layout.fingerprint() + namespace.encode()
        parent = xxhash.xxh3_128_digest(b"prefetchd chain" + salt)
    keys = []
    for start in range(0, len(numbers) - size + 1, size):
        parent = xxhash.xxh3_128_digest(parent + numbers[start : start + size].tobytes())
        keys.append(parent)
    return keys
