"""Trace files: what is written is read, chunk by chunk; what is not whole is refused in words."""

from __future__ import annotations

import errno
import io
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from prefetchd.lab.trace_format import TraceError, TraceHeader, TraceWriter, is_trace, open_trace
from prefetchd.lab.trace_schema import Columns, pieces

DECODE = TraceHeader(kind="decode", name="d", layers=3, kv_heads=2, block_tokens=16)
RESTORE = TraceHeader(kind="restore", name="r", origin="o", licence="l", stops=("", "end"))


def decode_columns(steps: int, *, ranks: int = 4, seed: int = 1) -> Columns:
    random = np.random.default_rng(seed)
    shape = (steps, DECODE.layers, DECODE.kv_heads, ranks)
    return {
        "block_ids": random.integers(0, 60_000, shape).astype(np.uint16),
        "mass": random.random(shape).astype(np.float16),
    }


def restore_columns(sizes: list[int], first_ns: int = 0) -> Columns:
    count = len(sizes)
    return {
        "arrival_ns": first_ns + np.arange(count, dtype=np.int64),
        "sizes": np.array(sizes, np.int64),
        "blocks": np.arange(sum(sizes), dtype=np.int64),
        "session": np.arange(count, dtype=np.int64),
        "stop": (np.arange(count) % 2).astype(np.uint16),
        "think_ns": np.full(count, 7, np.int64),
    }


def write(path: Path, header: TraceHeader, *chunks: Columns) -> Path:
    with TraceWriter(path, header) as writer:
        for chunk in chunks:
            writer.write(chunk)
    return path


def joined(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    chunks = list(open_trace(path).chunks())
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def same(one: Columns, other: Columns) -> None:
    assert list(one) == list(other)
    for name, values in one.items():
        assert values.dtype == other[name].dtype
        assert np.array_equal(values, other[name])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), steps=st.integers(1, 5), hints=st.booleans(), wide=st.booleans())
def test_a_decode_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, data: Any, steps: int, hints: bool, wide: bool
) -> None:
    shape = (steps, 3, 2, data.draw(st.integers(1, 4)))
    ids = arrays.arrays(np.uint32 if wide else np.uint16, shape)
    masses = arrays.arrays(np.float16, shape, elements=st.floats(0, 1, width=16))
    columns = {"block_ids": data.draw(ids), "mass": data.draw(masses)}
    if hints:
        columns |= {"hint_ids": data.draw(ids), "hint_mass": data.draw(masses)}
    path = tmp_path_factory.mktemp("t") / "t.npz"
    write(path, DECODE, columns, columns)
    same(joined(path), {name: np.concatenate([one, one]) for name, one in columns.items()})
    assert open_trace(path).header == msgspec.structs.replace(DECODE, rows=(steps, steps))
    with np.load(path) as archive:  # what numpy alone can read
        assert np.array_equal(archive["00001/mass"], columns["mass"])


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=30), cut=st.integers(1, 500))
def test_requests_come_back_as_they_were_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cut: int
) -> None:
    columns = restore_columns(sizes)
    path = tmp_path_factory.mktemp("t") / "t.npz"
    write(path, RESTORE, *pieces("restore", columns, cut))
    same(joined(path), columns)
    assert open_trace(path).header.length == len(sizes)


def test_a_trace_is_the_same_bytes_each_time_and_whole_or_not_there(tmp_path: Path) -> None:
    one = write(tmp_path / "a.npz", RESTORE, restore_columns([2, 3]))
    assert write(tmp_path / "b.npz", RESTORE, restore_columns([2, 3])).read_bytes() == (
        one.read_bytes()
    )
    old = one.read_bytes()
    with pytest.raises(TraceError, match="lacks"):
        write(one, RESTORE, restore_columns([1]), {})
    assert one.read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]
    with pytest.raises(TraceError, match="nothing was written"):
        write(one, RESTORE)
    with TraceWriter(one, RESTORE) as writer:  # what is known at the end is in the header
        writer.write(restore_columns([1]))
        writer.header = msgspec.structs.replace(writer.header, how="cut")
    assert open_trace(one).header.how == "cut"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mass": None}, "lacks mass"),
        ({"other": np.zeros(1)}, "holds other"),
        ({"mass": np.zeros((2, 3, 2, 4))}, "mass must be float16 or float32, not float64"),
        ({"block_ids": np.zeros((2, 3), np.uint16)}, r"must be \[step, layer, KV head, rank\]"),
        ({"mass": np.zeros((2, 3, 2, 3), np.float16)}, "differ in shape"),
        ({"mass": np.full((2, 3, 2, 4), np.nan, np.float16)}, "not finite"),
        ({"hint_ids": np.zeros((2, 3, 2, 4), np.uint16)}, "hint_ids and hint_mass differ"),
        ({"window_mass": np.zeros((1, 3, 9, 4), np.float16)}, "window_mass is not of the steps"),
    ],
)
def test_what_is_no_decode_cannot_be_written(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    columns = {**decode_columns(2), **change}
    chunk = {name: values for name, values in columns.items() if values is not None}
    with pytest.raises(TraceError, match=told):
        write(tmp_path / "t.npz", DECODE, chunk)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sizes": np.array([1, 1])}, "sizes and blocks do not fit"),
        ({"session": np.array([1])}, "session do not fit"),
        ({"arrival_ns": np.array([1, 0])}, "arrival_ns falls"),
        ({"think_ns": np.array([1, -1])}, "negative"),
        ({"stop": np.array([0, 2], np.uint16)}, "table lacks"),
    ],
)
def test_what_is_no_request_cannot_be_written(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(TraceError, match=told):
        write(tmp_path / "t.npz", RESTORE, {**restore_columns([1, 2]), **change})
    late, early = restore_columns([1], 5), restore_columns([1], 4)
    with pytest.raises(TraceError, match="begins before"):
        write(tmp_path / "t.npz", RESTORE, late, early)
    with pytest.raises(TraceError, match="the ones before it"):
        write(tmp_path / "t.npz", RESTORE, early, {**late, "agent": np.zeros(1, np.int32)})


def edited(path: Path, edit: Callable[[dict[str, bytes]], None]) -> Path:
    """The same archive with changed members, checksums and all."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=True)
    return stream.getvalue()


def header(**changes: Any) -> bytes:
    stored = {"schema": RESTORE.schema, **msgspec.structs.asdict(RESTORE), "rows": [2]}
    return npy(np.frombuffer(msgspec.json.encode({**stored, **changes}), np.uint8))


@pytest.mark.parametrize(
    ("member", "data", "told"),
    [
        ("header.npy", header(schema="prefetchd.trace.restore/2"), "update prefetchd"),
        ("header.npy", header(schema="prefetchd.trace.store/1"), "reads decode/1 and restore/1"),
        ("header.npy", header(schema="other/1"), "its schema is 'other/1'"),
        ("header.npy", header(kind="decode"), "contradicts itself"),
        ("header.npy", header(rows=[3]), "has not the 3 rows"),
        ("header.npy", header(rows=[2, 2]), "does not hold the 2 chunks"),
        ("header.npy", header(rows="2"), "header cannot be read"),
        ("header.npy", header(rows=[]), "no steps or requests at all"),
        ("header.npy", header(block_tokens=-1), "header cannot be read"),
        ("header.npy", npy(np.frombuffer(b"{", np.uint8)), "header cannot be read"),
        ("header.npy", None, "no trace of ours"),
        ("00000/sizes.npy", None, "lacks sizes"),
        ("00000/more.npy", npy(np.zeros(2)), "holds more"),
        ("00001/sizes.npy", npy(np.zeros(2)), "does not hold the 1 chunks"),
        ("00000/session.npy", npy(np.array([None, {}])), "pickled"),
        ("00000/session.npy", npy(np.zeros(2, np.int64))[:-8], "does not hold"),
        ("00000/session.npy", npy(np.zeros(2, np.int64)) + b"x", "does not hold"),
        ("00000/session.npy", b"no array", r"cannot be read as an \.npz"),
        ("00000/think_ns.npy", npy(np.array([0, -1])), "negative"),
    ],
)
def test_what_is_foreign_newer_or_pickled_is_told(
    tmp_path: Path, member: str, data: bytes | None, told: str
) -> None:
    path = write(tmp_path / "t.npz", RESTORE, restore_columns([1, 2]))

    def edit(members: dict[str, bytes]) -> None:
        members.pop(member, None)
        if data is not None:
            members[member] = data

    with pytest.raises(TraceError, match=told) as error:
        joined(edited(path, edit))
    assert str(path) in str(error.value)


def test_what_is_no_zip_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no trace"):
        open_trace(tmp_path / "t.npz")
    (tmp_path / "t.npz").write_bytes(b"")
    for path, told in ((tmp_path / "t.npz", "is empty"), (tmp_path, "EISDIR")):
        with pytest.raises(TraceError, match=told):
            open_trace(path)
        assert not is_trace(path)


def test_a_file_cut_short_or_damaged_anywhere_is_told_or_the_same_trace(tmp_path: Path) -> None:
    columns = decode_columns(3)
    whole = write(tmp_path / "t.npz", DECODE, columns).read_bytes()
    path = tmp_path / "bad.npz"
    for length in range(0, len(whole), 61):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError):
            joined(path)
    random = np.random.default_rng(5)
    refused = 0
    for place, bit in zip(
        random.integers(0, len(whole), 600), random.integers(0, 8, 600), strict=True
    ):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            found = joined(path)
        except TraceError:
            refused += 1
            continue
        same(found, columns)
    assert refused > 400


def test_a_large_trace_needs_memory_for_a_chunk_only(tmp_path: Path) -> None:
    columns = decode_columns(8_000, ranks=32)  # 6 MB
    columns = {name: np.zeros_like(values) for name, values in columns.items()}
    path = tmp_path / "t.npz"
    tracemalloc.start()
    try:
        written = 0
        with TraceWriter(path, DECODE) as writer:
            while written < 64 << 20:
                writer.write(columns)
                written += sum(values.nbytes for values in columns.values())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.reset_peak()
        read = sum(sum(one.nbytes for one in chunk.values()) for chunk in open_trace(path).chunks())
        assert read == written
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_columns_can_be_read_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", DECODE, decode_columns(2))
    assert [list(chunk) for chunk in open_trace(path).chunks(["mass"])] == [["mass"]]


@pytest.mark.parametrize("when", ["write", "fsync"])
def test_a_full_disk_leaves_nothing_and_is_told_with_the_file(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TraceWriter if when == "write" else os, when, full)
    columns: Columns = {
        "arrival_ns": np.arange(2),
        "sizes": np.ones(2, np.int64),
        "blocks": np.arange(2),
        "session": np.arange(2),
        "stop": np.zeros(2, np.uint16),
        "think_ns": np.zeros(2, np.int64),
    }
    out = tmp_path / "out.npz"
    with pytest.raises(OSError, match="No space left") as told:
        write(out, TraceHeader(kind="restore", name="x", block_tokens=16, stops=("",)), columns)
    assert told.value.filename == str(out)
    assert list(tmp_path.iterdir()) == []
