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
    Superblock,
    align_up,
    decode_superblock,
    encode_superblock,
    namespace_id,
    newest_superblock,
    page_checksum,
    page_checksums,
    superblock_place,
)
from prefetchd.journal import Journal, generation_of, newest, pack, unpack
from prefetchd.records import (
    PUBLISH,
    REMOVE,
    Records,
    decode_headers,
    encode_headers,
    record_dtype,
    seal,
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
        stripes=(stripes := draw(st.integers(1, 5))),
        stripe=draw(st.integers(0, stripes - 1)),
        epoch=draw(number) >> 24,
    )


def records(shape: Superblock, *blocks: int, kind: int = PUBLISH, seed: int = 0) -> Records:
    random = np.random.default_rng(seed)
    made = np.zeros(len(blocks), record_dtype(shape.layers))
    made["kind"], made["block"] = kind, blocks
    made["sequence"] = random.integers(1, 2**63, len(blocks), np.uint64)
    made["checksums"] = random.integers(0, 2**64, (len(blocks), shape.layers), np.uint64)
    made["key"], made["namespace"] = np.void(b"k" * 16), np.void(b"n" * 16)
    return made


SHAPE = Superblock(FORMAT_VERSION, 5, 1000, 4096, 9, 4096, b"f" * 16, b"s" * 16, clean=True)
COVERED = SHAPE.record_bytes  # the rest is padding


@given(superblocks())
def test_a_superblock_survives(shape: Superblock) -> None:
    block = encode_superblock(shape)
    assert len(block) == shape.copy_bytes
    assert decode_superblock(block) == shape
    for size in (shape.superblock_bytes, shape.header_bytes, shape.extent_bytes, shape.file_bytes):
        assert size % shape.alignment_bytes == 0
    front = np.zeros(shape.superblock_bytes, np.uint8)
    front[superblock_place(shape) :][: len(block)] = block
    assert newest_superblock(front) == shape


@given(superblocks())
def test_every_block_has_an_extent_of_its_own(shape: Superblock) -> None:
    shape = msgspec.structs.replace(shape, blocks=min(shape.blocks, 40) + shape.stripes)
    blocks = np.arange(shape.blocks)
    places = set(zip(shape.files(blocks), shape.extent_offsets(blocks), strict=True))
    assert len(places) == shape.blocks
    for stripe in range(shape.stripes):
        part = shape.of_stripe(stripe)
        offsets = shape.extent_offsets(blocks[shape.files(blocks) == stripe])
        assert len(offsets) == part.extents
        assert offsets.min() == part.superblock_bytes
        assert offsets.max() + part.extent_bytes == part.journal_offset <= part.file_bytes


def test_of_two_superblocks_the_newer_whole_one_counts() -> None:
    newer = msgspec.structs.replace(SHAPE, epoch=1, clean=False)
    front = np.concatenate([encode_superblock(SHAPE), encode_superblock(newer)])
    assert newest_superblock(front) == newer
    front[4096 + 40] ^= 1
    assert newest_superblock(front) == SHAPE
    swapped = np.concatenate([encode_superblock(newer), encode_superblock(SHAPE)])
    with pytest.raises(FormatError, match="wrong place"):
        newest_superblock(swapped)


@given(superblocks(), st.integers(0, 2**32 - 1), st.sampled_from([PUBLISH, REMOVE]))
def test_headers_survive_in_their_own_extents_only(shape: Superblock, seed: int, kind: int) -> None:
    shape = msgspec.structs.replace(shape, blocks=9)
    said = records(shape, 0, 3, 8, kind=kind, seed=seed)
    rows = encode_headers(said, shape)
    assert rows.shape == (3, shape.header_bytes)
    found, good = decode_headers(rows, said["block"], shape)
    assert good.all()
    assert (found == seal(said, shape)).all()
    assert not decode_headers(rows, said["block"] + 1, shape)[1].any()
    assert not decode_headers(np.zeros_like(rows), said["block"], shape)[1].any()


@given(st.integers(1, 900), st.integers(0, 30), st.integers(1, 2**40))
def test_a_journal_gives_back_what_was_written_in_this_generation(
    layers: int, count: int, generation: int
) -> None:
    shape = msgspec.structs.replace(SHAPE, layers=layers, blocks=40)
    journal = Journal(shape, generation - 1, 0, 0)
    said = records(shape, *range(count))
    pieces = journal.snapshot(said, 3 * shape.header_bytes)
    data = np.concatenate([np.zeros(0, np.uint8), *(piece.data for piece in pieces)])
    assert len(data) == journal.pages * shape.header_bytes
    more = records(shape, 39, kind=REMOVE, seed=1)
    assert journal.has_room(1)
    piece = journal.append(more)
    whole = np.concatenate([data, piece.data])
    found, _ = unpack(whole, shape, generation)
    assert (found["block"] == [*range(count), 39]).all()
    assert journal.state == (generation, len(whole) // shape.header_bytes, count + 1)
    assert len(unpack(whole, shape, generation + 2)[0]) == 0
    head = journal.head()
    assert generation_of(head.data, shape, generation % 2) == generation
    assert generation_of(head.data, shape, 1 - generation % 2) == 0
    foreign = msgspec.structs.replace(shape, store_id=b"t" * 16)
    assert generation_of(head.data, foreign, generation % 2) == 0
    assert len(unpack(whole, foreign, generation)[0]) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 99)), unique_by=lambda said: said[1]))
def test_of_several_statements_about_a_block_the_newest_holds(said: list[tuple[int, int]]) -> None:
    made = records(SHAPE, *(block for block, _ in said))
    made["sequence"] = [sequence for _, sequence in said]
    table, seen = np.zeros(9, made.dtype), np.zeros(9, np.bool_)
    newest(table, seen, made[: len(said) // 2])
    newest(table, seen, made[len(said) // 2 :])
    latest = {block: max(s for b, s in said if b == block) for block, _ in said}
    assert {int(b): int(table["sequence"][b]) for b in np.flatnonzero(seen)} == latest


def test_packing_wastes_no_page() -> None:
    said = seal(records(SHAPE, *range(9)), SHAPE, 1)
    assert len(pack(said, SHAPE)) == 4096
    assert len(pack(said[:0], SHAPE)) == 0


@settings(max_examples=300)
@given(st.data(), st.integers(1, 255))
def test_any_changed_byte_is_noticed(data: st.DataObject, change: int) -> None:
    block = encode_superblock(SHAPE)
    block[data.draw(st.integers(0, int(np.flatnonzero(block).max())))] ^= change
    with pytest.raises(FormatError):
        decode_superblock(block)
    rows = encode_headers(records(SHAPE, 4), SHAPE)
    rows[0, data.draw(st.integers(0, COVERED - 1))] ^= change
    assert not decode_headers(rows, np.array([4]), SHAPE)[1].any()


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


def test_a_header_of_another_store_is_no_header() -> None:
    rows = encode_headers(records(SHAPE, 4), SHAPE)
    other = msgspec.structs.replace(SHAPE, store_id=b"t" * 16)
    assert not decode_headers(rows, np.array([4]), other)[1].any()


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
    seeds, layers = np.array([0, highest, 7], np.uint64), np.array([0, 1, 3])
    one_by_one = [page_checksum(page, int(s), int(n)) for s, n in zip(seeds, layers, strict=True)]
    rows = np.stack([page, page[::-1], page])
    assert page_checksums(rows, np.array([0, 2, 0]), seeds, layers).tolist() == one_by_one


@given(st.data(), st.integers(0, 7))
def test_any_changed_bit_of_a_page_changes_its_checksum(data: st.DataObject, bit: int) -> None:
    page = np.random.default_rng(4).integers(0, 256, 300, np.uint8)
    before = page_checksum(page, 5, 2)
    page[data.draw(st.integers(0, 299))] ^= np.uint8(1 << bit)
    assert page_checksum(page, 5, 2) != before
