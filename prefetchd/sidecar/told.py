"""Stores that clients have made: what is known of them without a configuration.

Decides what of a layout a client has to tell. Opens nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefetchd.layout import Layout, uniform
from prefetchd.sidecar.protocol import Shape
from prefetchd.store_opening import Opening, exists, superblock_of


@dataclass(frozen=True, slots=True)
class _Told(Layout):
    """A layout of which only what a store needs is known: a client told it."""

    told: bytes = b""

    def fingerprint(self) -> bytes:
        return self.told


def layout_told(shape: Shape) -> Layout:
    """Raises LayoutError for sizes that no layout has."""
    plain = uniform(shape.layers, shape.page_bytes)
    return _Told(shape.name, plain.groups, plain.block_tokens, told=shape.fingerprint)


def payload_bytes(path: Path) -> int:
    """Of a store that is there; 0 if there is none. Raises StoreError."""
    if not exists(path):
        return 0
    shape = superblock_of(path, Opening(read_only=True))
    return shape.blocks * shape.layers * shape.page_bytes
