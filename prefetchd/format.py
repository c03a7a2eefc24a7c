"""What a store's bytes mean: superblocks, records, where things lie, page checksums.

Decides encoding, placement and validation only; pure functions over bytes. Reads and writes
nothing.

File:    superblock, twice | extent 0 | extent 1 | ... | (file 0 only) the journal's two areas
Extent:  header | page of layer 0 | page of layer 1 | ...  (pages padded to `slot_bytes`)

The header of an extent is the last record (`prefetchd.records`) of its block, and the journal a
sequence of such records. Block b lies on file b % stripes.

A page's checksum is xxh3-64 of its exact bytes, seeded with the key, namespace, layout fingerprint,
page length and layer, so that right bytes in the wrong place do not verify. Where pages are
encrypted (`prefetchd.cipher`), tags stand in the place of checksums, and names in that of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from prefetchd.hashing import hash_rows
from prefetchd.model import Ids
from prefetchd.records import Words, mixed, multipliers, record_dtype

FORMAT_VERSION = 3
MAGIC = b"prefetchd"
_MASK64 = 2**64 - 1


class FormatError(Exception):
    """Bytes that are no store of ours, or of another version or layout; says which."""


COPY_PLACES = (0, *(4096 << power for power in range(5)))
"""Where copies of a superblock may lie, by alignment."""


class Superblock(msgspec.Struct, frozen=True):
    """What a file was made for: `layers` pages a block, `blocks` in the whole store, of which
    this file, number `stripe` of `stripes`, holds its share.

    `epoch` rises with every writing; `paths` (in the first file) names the folders of all, of which
    those of the parts `detached` are empty and not used until another drive is in their place;
    `journal` (if `clean`): the generation, pages and records that were in use at the close.
    `key_check`: what the key of its pages is known by; empty if they are not encrypted.
    """

    version: int
    layers: int
    page_bytes: int
    slot_bytes: int
    blocks: int
    alignment_bytes: int
    fingerprint: bytes
    store_id: bytes
    clean: bool
    epoch: int = 0
    stripe: int = 0
    stripes: int = 1
    paths: tuple[str, ...] = ()
    journal: tuple[int, int, int] = (0, 0, 0)
    key_check: bytes = b""
    detached: tuple[int, ...] = ()

    @property
    def proof_words(self) -> int:
        """Of a record, 8 bytes each: a checksum a page, or a tag of two words a page, two words
        for what the key is derived from and one for the nonces."""
        return 2 * self.layers + 3 if self.key_check else self.layers

    @property
    def record_bytes(self) -> int:
        return record_dtype(self.proof_words).itemsize

    @property
    def header_bytes(self) -> int:
        return align_up(self.record_bytes, self.alignment_bytes)

    @property
    def extent_bytes(self) -> int:
        return self.header_bytes + self.layers * self.slot_bytes

    @property
    def copy_bytes(self) -> int:
        """Of one superblock; a file begins with two, written in turn, so one is always whole."""
        return max(4096, self.alignment_bytes)

    @property
    def superblock_bytes(self) -> int:
        return 2 * self.copy_bytes

    @property
    def records_per_page(self) -> int:
        return max(1, self.alignment_bytes // self.record_bytes)

    @property
    def journal_pages(self) -> int:
        """Of one area, beside its head: twice what all blocks need, since every commit begins a
        page of its own."""
        return 2 * -(-self.blocks // self.records_per_page) + 64

    @property
    def area_bytes(self) -> int:
        return self.alignment_bytes + self.journal_pages * self.header_bytes

    @property
    def extents(self) -> int:
        """How many this file has."""
        return (self.blocks - self.stripe + self.stripes - 1) // self.stripes

    @property
    def journal_offset(self) -> int:
        return self.superblock_bytes + self.extents * self.extent_bytes

    @property
    def file_bytes(self) -> int:
        return self.journal_offset + (2 * self.area_bytes if self.stripe == 0 else 0)

    def of_stripe(self, stripe: int) -> Superblock:
        paths, detached = (self.paths, self.detached) if stripe == 0 else ((), ())
        return msgspec.structs.replace(self, stripe=stripe, paths=paths, detached=detached)

    @property
    def total_bytes(self) -> int:
        """Of all files of the store."""
        return sum(self.of_stripe(number).file_bytes for number in range(self.stripes))

    def files(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        return blocks % self.stripes

    def extent_offsets(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the extents of these blocks begin in their files, bytes."""
        offsets: NDArray[np.int64] = (
            self.superblock_bytes + blocks // self.stripes * self.extent_bytes
        )
        return offsets


@dataclass(frozen=True, slots=True)
class Binding:
    """What ties a page's bytes to their place: 16 bytes each."""

    namespace: bytes
    fingerprint: bytes
    page_bytes: int

    def seeds(self, keys: NDArray[Any]) -> Words:
        """The checksum seeds of layer 0 of blocks with these keys (dtype V16); layer n adds n."""
        text = self.namespace + self.fingerprint + self.page_bytes.to_bytes(8, "little")
        salt = np.uint64(xxhash.xxh3_64_intdigest(text))
        words = np.ascontiguousarray(keys).view("<u4").reshape(len(keys), 4)
        return mixed(words.astype(np.uint64) @ multipliers(4) + salt)

    def seed(self, key: bytes) -> int:
        return int(self.seeds(np.frombuffer(key, "V16"))[0])


def align_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def namespace_id(namespace: str) -> bytes:
    return xxhash.xxh3_128_digest(b"prefetchd namespace" + namespace.encode())


def page_checksum(page: NDArray[np.uint8] | memoryview, seed: int, layer: int) -> int:
    """xxh3-64 of a page's exact bytes, bound to its block by `seed` and to its layer."""
    data = page if isinstance(page, memoryview) else page.data
    return xxhash.xxh3_64_intdigest(data, (seed + layer) & _MASK64)


def page_checksums(
    rows: NDArray[np.uint8],
    places: Ids,
    seeds: NDArray[np.uint64],
    layers: Ids,
    *,
    unlocked: bool = False,
) -> NDArray[np.uint64]:
    """The same of many pages: the rows of an array that are at `places`. `unlocked`: as of
    `hash_rows`."""
    bound = (seeds + layers.view(np.uint64)).tolist()  # wraps around as `page_checksum` does
    return hash_rows(rows, places, bound, unlocked=unlocked)


# --- superblocks ---


def encode_superblock(superblock: Superblock) -> NDArray[np.uint8]:
    """One copy, `copy_bytes` long; it belongs at `superblock_place`. Raises FormatError."""
    body = msgspec.msgpack.encode(superblock)
    text = MAGIC + len(body).to_bytes(4, "little") + body
    text += xxhash.xxh3_64_digest(text)
    block = np.zeros(superblock.copy_bytes, np.uint8)
    if len(text) > len(block):
        raise FormatError("the names of its folders are too long; use shorter paths")
    block[: len(text)] = np.frombuffer(text, np.uint8)
    return block


def superblock_place(superblock: Superblock) -> int:
    """Where in the file the copy of this epoch lies: never where the last one does."""
    return superblock.epoch % 2 * superblock.copy_bytes


def decode_superblock(block: NDArray[np.uint8]) -> Superblock:
    """One copy. Raises FormatError for foreign, damaged or newer bytes."""
    text = block.tobytes()
    start = len(MAGIC) + 4
    if not text.startswith(MAGIC):
        raise FormatError("it does not begin as a prefetchd store does")
    end = start + int.from_bytes(text[len(MAGIC) : start], "little")
    if xxhash.xxh3_64_digest(text[:end]) != text[end : end + 8]:
        raise FormatError("its superblock is damaged (checksum mismatch)")
    version = msgspec.msgpack.decode(text[start:end]).get("version")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"it has format version {version}, this program reads {FORMAT_VERSION}; use the "
            "release that wrote it, or erase the folder and make the store anew"
        )
    return msgspec.msgpack.decode(text[start:end], type=Superblock)


def newest_superblock(front: NDArray[np.uint8]) -> Superblock:
    """Of the copies at the front of a file the newest whole one. Raises FormatError if none is."""
    found: list[Superblock] = []
    first: FormatError | None = None
    for place in COPY_PLACES:
        try:
            copy = decode_superblock(front[place:])
        except FormatError as error:
            first = first or error
        else:
            if superblock_place(copy) == place:
                found.append(copy)
            else:
                first = first or FormatError("its superblock is damaged (in the wrong place)")
    if not found:
        assert first is not None
        raise first
    return max(found, key=lambda copy: copy.epoch)
