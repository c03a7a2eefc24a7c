"""What a store's bytes mean: the superblock of a file, the header of an extent, page checksums.

Decides encoding and validation only; pure functions over bytes. Reads and writes nothing.

File:    superblock | extent 0 | extent 1 | ...            (each padded to the alignment)
Extent:  header | page of layer 0 | page of layer 1 | ...  (pages padded to `slot_bytes`)

A header names its key, namespace, layout and page checksums and ends in a checksum of its own: a
torn or foreign header is no header. A page's checksum is xxh3-64 of its exact bytes, seeded with
the key, namespace, layout fingerprint, page length and layer, so that right bytes in the wrong
place do not verify.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

FORMAT_VERSION = 1
_MAGIC = b"prefetchd"
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("layers", "<u4"),
        ("page_bytes", "<u8"),
        ("key", "V16"),
        ("namespace", "V16"),
        ("fingerprint", "V16"),
        ("sequence", "<u8"),
        ("expires_ns", "<u8"),
    ]
)
_HEADER_MAGIC = b"pfextent"
_MASK64 = 2**64 - 1


class FormatError(Exception):
    """Bytes that are no store of ours, or of another version or layout; says which."""


class Superblock(msgspec.Struct, frozen=True):
    """What the whole file was made for. `layers` pages a block, `blocks` extents in the file."""

    version: int
    layers: int
    page_bytes: int
    slot_bytes: int
    blocks: int
    alignment_bytes: int
    fingerprint: bytes
    store_id: bytes
    clean: bool

    @property
    def header_bytes(self) -> int:
        return align_up(_HEADER.itemsize + 8 * self.layers + 8, self.alignment_bytes)

    @property
    def extent_bytes(self) -> int:
        return self.header_bytes + self.layers * self.slot_bytes

    @property
    def superblock_bytes(self) -> int:
        return max(4096, self.alignment_bytes)

    @property
    def file_bytes(self) -> int:
        return self.superblock_bytes + self.blocks * self.extent_bytes

    def extent_offset(self, block: int) -> int:
        return self.superblock_bytes + block * self.extent_bytes


@dataclass(frozen=True, slots=True)
class Binding:
    """What ties a page's bytes to their place: 16 bytes each."""

    namespace: bytes
    fingerprint: bytes
    page_bytes: int

    def seed(self, key: bytes) -> int:
        """The checksum seed of a block's layer 0; layer n adds n."""
        text = key + self.namespace + self.fingerprint + self.page_bytes.to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(text)


@dataclass(frozen=True, slots=True)
class Header:
    key: bytes
    namespace: bytes
    sequence: int
    checksums: NDArray[np.uint64]  # one a layer


def align_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def namespace_id(name: str) -> bytes:
    return xxhash.xxh3_128_digest(name.encode())


def page_checksum(page: NDArray[np.uint8], seed: int, layer: int) -> int:
    """xxh3-64 of a page's exact bytes (no padding), under its block's seed."""
    return xxhash.xxh3_64_intdigest(page.data, (seed + layer) & _MASK64)


def encode_superblock(superblock: Superblock) -> NDArray[np.uint8]:
    body = msgspec.msgpack.encode(superblock)
    text = _MAGIC + len(body).to_bytes(4, "little") + body
    text += xxhash.xxh3_64_digest(text)
    block = np.zeros(superblock.superblock_bytes, np.uint8)
    block[: len(text)] = np.frombuffer(text, np.uint8)
    return block


def decode_superblock(block: NDArray[np.uint8]) -> Superblock:
    """Raises FormatError for foreign, damaged or newer bytes."""
    text = block.tobytes()
    start = len(_MAGIC) + 4
    if not text.startswith(_MAGIC):
        raise FormatError("it does not begin as a prefetchd store does")
    end = start + int.from_bytes(text[len(_MAGIC) : start], "little")
    if xxhash.xxh3_64_digest(text[:end]) != text[end : end + 8]:
        raise FormatError("its superblock is damaged (checksum mismatch)")
    version = msgspec.msgpack.decode(text[start:end]).get("version")
    if version != FORMAT_VERSION:
        raise FormatError(f"it has format version {version}, this program reads {FORMAT_VERSION}")
    return msgspec.msgpack.decode(text[start:end], type=Superblock)


def encode_header(header: Header, superblock: Superblock) -> NDArray[np.uint8]:
    """The header page of an extent, `header_bytes` long."""
    block = np.zeros(superblock.header_bytes, np.uint8)
    fields = block[: _HEADER.itemsize].view(_HEADER)
    fields["magic"] = _HEADER_MAGIC
    fields["version"] = FORMAT_VERSION
    fields["layers"] = superblock.layers
    fields["page_bytes"] = superblock.page_bytes
    fields["sequence"] = header.sequence
    for name, value in (
        ("key", header.key),
        ("namespace", header.namespace),
        ("fingerprint", superblock.fingerprint),
    ):
        fields[name] = np.void(value)
    end = _HEADER.itemsize + 8 * superblock.layers
    block[_HEADER.itemsize : end] = header.checksums.astype("<u8").view(np.uint8)
    block[end : end + 8] = _digest(block[:end])
    return block


def decode_header(block: NDArray[np.uint8], superblock: Superblock) -> Header | None:
    """None unless the bytes are an intact header of this store's layout."""
    fields = block[: _HEADER.itemsize].view(_HEADER)[0]
    end = _HEADER.itemsize + 8 * superblock.layers
    if bytes(fields["magic"]) != _HEADER_MAGIC or fields["version"] != FORMAT_VERSION:
        return None
    if (block[end : end + 8] != _digest(block[:end])).any():
        return None
    if (int(fields["layers"]), int(fields["page_bytes"]), fields["fingerprint"].tobytes()) != (
        superblock.layers,
        superblock.page_bytes,
        superblock.fingerprint,
    ):
        return None
    checksums = block[_HEADER.itemsize : end].view("<u8").astype(np.uint64)
    key, namespace = fields["key"].tobytes(), fields["namespace"].tobytes()
    return Header(key, namespace, int(fields["sequence"]), checksums)


def _digest(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(xxhash.xxh3_64_digest(block.data), np.uint8)
