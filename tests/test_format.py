"""What a store's bytes mean: what is written is read again, and what was changed is noticed."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.format import (
    FORMAT_VERSION,
    Binding,
    FormatError,
    Header,
    Superblock,
    align_up,
    decode_header,
    decode_superblock,
    encode_header,
    encode_superblock,
    namespace_id,
    page_checksum,
)

identity = st.binary(min_size=16, max_size=16)
number = st.integers(0, 2**64 - 1)


@st.composite
def superblocks(draw: st.DrawFn) -> Superblock:
    alignment = draw(st.sampled_from([4096, 16_384, 65_536]))
    page_bytes = draw(st.integers(1, 1 << 20))
    return Superblock(
        FORMAT_VERSION,
        draw(st.integers(1, 2000)),
        page_bytes,
        align_up(page_bytes, alignment),
        draw(st.integers(1, 1 << 40)),
        alignment,
        draw(identity),
        draw(identity),
        draw(st.booleans()),
    )


SHAPE = Superblock(FORMAT_VERSION, 5, 1000, 4096, 9, 4096, b"f" * 16, b"s" * 16, clean=True)
HEADER = Header(b"k" * 16, b"n" * 16, 77, np.arange(5, dtype=np.uint64) * 10**18)
COVERED = np.flatnonzero(encode_header(HEADER, SHAPE)).max() + 1  # the rest is padding


@given(superblocks())
def test_a_superblock_survives(shape: Superblock) -> None:
    block = encode_superblock(shape)
    assert len(block) == shape.superblock_bytes
    assert decode_superblock(block) == shape
    for size in (shape.superblock_bytes, shape.header_bytes, shape.extent_bytes, shape.file_bytes):
        assert size % shape.alignment_bytes == 0
    assert shape.extent_offset(shape.blocks) == shape.file_bytes


@given(superblocks(), identity, identity, number, st.integers(0, 2**32 - 1))
def test_a_header_survives(
    shape: Superblock, key: bytes, namespace: bytes, sequence: int, seed: int
) -> None:
    checksums = np.random.default_rng(seed).integers(0, 2**64, shape.layers, np.uint64)
    block = encode_header(Header(key, namespace, sequence, checksums), shape)
    assert len(block) == shape.header_bytes
    found = decode_header(block, shape)
    assert found is not None
    assert (found.key, found.namespace, found.sequence) == (key, namespace, sequence)
    assert np.array_equal(found.checksums, checksums)


@settings(max_examples=300)
@given(st.data(), st.integers(1, 255))
def test_any_changed_byte_is_noticed(data: st.DataObject, change: int) -> None:
    block = encode_superblock(SHAPE)
    block[data.draw(st.integers(0, int(np.flatnonzero(block).max())))] ^= change
    with pytest.raises(FormatError):
        decode_superblock(block)
    header = encode_header(HEADER, SHAPE)
    header[data.draw(st.integers(0, int(COVERED) - 1))] ^= change
    assert decode_header(header, SHAPE) is None


@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_store(text: bytes) -> None:
    block = np.frombuffer(text, np.uint8)
    with pytest.raises(FormatError):
        decode_superblock(block)
    with pytest.raises(FormatError):
        decode_superblock(np.concatenate([np.frombuffer(b"prefetchd", np.uint8), block]))


def test_every_prefix_of_a_superblock_is_refused() -> None:
    block = encode_superblock(SHAPE)
    for length in range(int(np.flatnonzero(block).max())):
        with pytest.raises(FormatError):
            decode_superblock(block[:length])


@pytest.mark.parametrize(
    "other",
    [
        {"layers": 4},
        {"page_bytes": 999},
        {"fingerprint": b"g" * 16},
    ],
)
def test_a_header_of_another_layout_is_no_header(other: dict[str, int]) -> None:
    block = encode_header(HEADER, SHAPE)
    assert decode_header(block, SHAPE) is not None
    assert decode_header(block, msgspec.structs.replace(SHAPE, **other)) is None


def test_a_page_checksum_is_bound_to_what_the_page_is() -> None:
    page = np.arange(1000, dtype=np.uint16).view(np.uint8)
    binding = Binding(namespace_id("mine"), b"f" * 16, len(page))
    places = [
        (binding, b"k" * 16, 0),
        (binding, b"k" * 16, 1),
        (binding, b"l" * 16, 0),
        (dataclasses.replace(binding, namespace=namespace_id("theirs")), b"k" * 16, 0),
        (dataclasses.replace(binding, fingerprint=b"g" * 16), b"k" * 16, 0),
        (dataclasses.replace(binding, page_bytes=len(page) - 1), b"k" * 16, 0),
    ]
    sums = {page_checksum(page, bound.seed(key), layer) for bound, key, layer in places}
    sums |= {page_checksum(page[:-1], binding.seed(b"k" * 16), 0)}
    assert len(sums) == len(places) + 1
    highest = 2**64 - 1  # a seed so high that its layers go round
    assert page_checksum(page, highest, 1) == page_checksum(page, 0, 0)


@given(st.data(), st.integers(0, 7))
def test_any_changed_bit_of_a_page_changes_its_checksum(data: st.DataObject, bit: int) -> None:
    page = np.random.default_rng(4).integers(0, 256, 300, np.uint8)
    before = page_checksum(page, 5, 2)
    page[data.draw(st.integers(0, 299))] ^= np.uint8(1 << bit)
    assert page_checksum(page, 5, 2) != before
