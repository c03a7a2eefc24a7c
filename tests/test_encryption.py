"""Encryption at rest: what is on the medium tells nothing, and what was changed there is a miss."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typer.testing import CliRunner

import prefetchd
from prefetchd import (
    EngineError,
    Options,
    Runtime,
    SidecarError,
    StoreError,
    key_file,
    store_making,
)
from prefetchd.cipher import PageCipher
from prefetchd.cli import app
from prefetchd.format import Superblock, namespace_id
from prefetchd.layout import uniform
from prefetchd.model import Ids
from prefetchd.records import decode_headers, encode_headers, record_dtype
from prefetchd.sidecar.namespace import NamespaceSettings
from prefetchd.store import plan_superblock
from prefetchd.store_making import create
from prefetchd.store_opening import Opening, superblock_of
from tests.replays import run_here
from tests.runtime_bench import (
    BLOCKS,
    LAYERS,
    PAGE_BYTES,
    PLAIN,
    content,
    keys,
    layout,
    read_all,
)
from tests.sidecar_bench import daemon, space

PAGES = content(BLOCKS)
NAMES = [bytes([200 + n]) * 8 + bytes([n]) * 8 for n in range(BLOCKS)]


def sealed(key: Path, **more: Any) -> Options:
    return replace(PLAIN, device="threads", key_file=key, **more)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    (tmp_path / "keys").mkdir()
    return tmp_path / "keys" / "kv.key"


@pytest.fixture
def kv(tmp_path: Path, key: Path) -> Path:
    """A closed store with four blocks of eight."""
    place = tmp_path / "kv"
    options = sealed(key)
    with prefetchd.open(place, layout(), blocks=BLOCKS, fill=False, options=options) as runtime:
        assert runtime.put(NAMES[:4], PAGES[:4]).wait().failures == []
    return place


def held(runtime: Runtime, count: int = 4) -> NDArray[np.uint8]:
    found = runtime.lookup(NAMES[:count])
    assert len(found) == count
    return read_all(runtime, found)


@pytest.mark.parametrize("page_bytes", [1000, 4090, PAGE_BYTES])
@pytest.mark.parametrize("stripes", [1, 3])
def test_what_was_put_is_read_again_and_lies_nowhere_in_the_clear(
    page_bytes: int, stripes: int, tmp_path: Path, key: Path
) -> None:
    places = [tmp_path / name for name in "abc"][:stripes]
    pages, options = content(6, page_bytes), sealed(key)
    made: dict[str, Any] = {"blocks": BLOCKS, "paths": places[1:], "fill": False}
    with prefetchd.open(places[0], layout(page_bytes), options=options, **made) as runtime:
        assert runtime.put(NAMES[:2], pages[:2]).wait().failures == []
        fast = runtime.put(NAMES[2:4], pages[2:4], durability="fast").wait()
        assert np.array_equal(read_all(runtime, fast.blocks), pages[2:4]), "out of staging"
        with runtime.grow() as block:
            for layer in range(LAYERS):
                block.write(layer, pages[4, layer], 0)
            assert block.seal(NAMES[4]).wait().failures == []
    for more in ({}, {"scan": True}, {}):
        with prefetchd.open(places[0], options=sealed(key, **more)) as runtime:
            assert runtime.stats().encrypted
            assert np.array_equal(held(runtime, 5), pages[:5])
            assert len(runtime.lookup([NAMES[5]])) == 0
    with prefetchd.open(places[0], options=options, read_only=True) as runtime:
        assert np.array_equal(held(runtime, 5), pages[:5])
    medium = b"".join((place / "extents.dat").read_bytes() for place in places)
    secret = json.loads(key.read_bytes())["key"]
    for plain in (*NAMES[:5], bytes.fromhex(secret), secret.encode()):
        assert plain not in medium
    chunks = pages[:5, :, : page_bytes // 100 * 100].reshape(-1, 100)
    assert not any(chunk.tobytes() in medium for chunk in chunks[::7])


def test_the_key_file_is_its_owners_and_no_other_stores(kv: Path, key: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(StoreError, match="is there already; a new store gets a new key"):
        create(kv.parent / "other", layout(), 4, fill=False, key_file=key)
    assert not (kv.parent / "other").exists()
    with pytest.raises(StoreError, match="protects nothing"):
        create(kv.parent / "other", layout(), 4, fill=False, key_file=kv.parent / "other" / "key")
    with pytest.raises(StoreError, match="ENOENT"):
        create(kv.parent / "other", layout(), 4, fill=False, key_file=kv / "none" / "key")
    assert not (kv.parent / "other").exists()
    with pytest.raises(StoreError, match="smaller store"):  # what was begun is undone
        create(kv.parent / "other", layout(), 1 << 45, fill=False, key_file=key.parent / "new")
    assert list(key.parent.iterdir()) == [key]


def test_a_key_that_does_not_fit_is_told_before_anything_is_written(kv: Path, key: Path) -> None:
    other, plain = key.parent / "other", kv.parent / "plain"
    shape = create(kv.parent / "second", layout(), 4, fill=False, key_file=other)
    create(plain, layout(), 4, fill=False)
    contents = json.loads(key.read_bytes())
    swapped = key.parent / "swapped"
    theirs = json.loads(other.read_bytes())["key"]
    swapped.write_text(json.dumps({**contents, "key": theirs}))
    (key.parent / "damaged").write_text(json.dumps(contents)[:-9])
    before = (kv / "extents.dat").read_bytes()
    for path, said in (
        (None, "is encrypted; give its key file"),
        (other, "is of another store"),
        (swapped, "is not the one this store was made with"),
        (key.parent / "damaged", "is no key file of prefetchd, or is damaged"),
        (key.parent / "none", "is not there: put it back; if it was destroyed"),
        (key.parent, "EISDIR"),
    ):
        with pytest.raises(StoreError, match=said):
            prefetchd.open(kv, options=replace(PLAIN, device="threads", key_file=path))
    assert (kv / "extents.dat").read_bytes() == before
    with pytest.raises(StoreError, match="is not encrypted, yet key file"):
        prefetchd.open(plain, options=sealed(key))
    with pytest.raises(StoreError, match="is not encrypted, yet key file"):
        prefetchd.open(None, layout(), blocks=4, options=sealed(key))
    assert shape.store_id.hex() in other.read_text()


def test_the_key_is_on_the_medium_before_the_store_and_overwritten_before_it_goes(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    flush, write = os.fsync, store_making._write_new

    def flushed(fd: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{fd}"))
        flush(fd)

    def written(*words: Any, **more: Any) -> None:
        order.append("store")
        write(*words, **more)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(store_making, "_write_new", written)
    create(tmp_path / "kv", layout(), 4, fill=False, key_file=key)
    at = order.index(str(key))
    assert order[at : at + 3] == [str(key), str(key.parent), "store"]
    order.clear()
    with open(key, "rb") as left:
        size = len(left.read())
        key_file.destroy(key)
        left.seek(0)
        assert left.read() == bytes(size), "whoever has it open finds nothing"
    assert order == [str(key), str(key), str(key.parent)]


# --- what somebody does to the medium ---


class Medium:
    """The only file of a closed store, changed behind its back."""

    def __init__(self, place: Path) -> None:
        self.path = place / "extents.dat"
        self.shape: Superblock = superblock_of(place, Opening(read_only=True))
        self.data = np.fromfile(self.path, np.uint8)

    def extent(self, block: int) -> NDArray[np.uint8]:
        at = int(self.shape.extent_offsets(np.array([block]))[0])
        return self.data[at : at + self.shape.extent_bytes]

    def pages(self, block: int) -> NDArray[np.uint8]:
        flat = self.extent(block)[self.shape.header_bytes :]
        return flat.reshape(self.shape.layers, -1)

    def header(self, block: int) -> Any:
        rows = self.extent(block)[None, : self.shape.header_bytes]
        records, good = decode_headers(rows, np.array([block]), self.shape)
        assert good.all()
        return records.copy()

    def say(self, block: int, record: Any) -> None:
        self.extent(block)[: self.shape.header_bytes] = encode_headers(record, self.shape)[0]

    def save(self) -> None:
        self.data.tofile(self.path)


def missing_of(runtime: Runtime, blocks: Ids) -> NDArray[np.bool_]:
    """(blocks, LAYERS), by one demand."""
    pages = blocks[:, None] * LAYERS + np.arange(LAYERS)
    with runtime.demand(pages.reshape(-1)) as ticket:
        return ticket.missing.reshape(pages.shape).copy()


@pytest.mark.parametrize("scan", [False, True])
def test_pages_in_another_place_do_not_open(scan: bool, kv: Path, key: Path) -> None:
    medium = Medium(kv)
    zero, one, two, three = (medium.pages(block) for block in range(4))
    zero[[0, 1]] = zero[[1, 0]]  # pages of one block
    one[2], two[2] = two[2].copy(), one[2].copy()  # of two blocks
    three[1, 5] ^= 1
    medium.save()
    with prefetchd.open(kv, options=sealed(key, scan=scan)) as runtime:
        missing = missing_of(runtime, runtime.lookup(NAMES[:4]))
        assert missing.tolist() == [
            [True, True, False],
            [False, False, True],
            [False, False, True],
            [False, True, False],
        ]
        assert runtime.stats().failures["checksum mismatch"] == 2 * 5, "each was read once more"
        assert len(runtime.lookup(NAMES[:1])) == 0
        assert runtime.stats().store_writes.blocks_rotten == 4
        assert runtime.put(NAMES[:4], PAGES[:4]).wait().failures == []
        assert np.array_equal(held(runtime), PAGES[:4])


def test_extents_that_change_places_or_come_back_do_not_open(kv: Path, key: Path) -> None:
    old = Medium(kv)
    with prefetchd.open(kv, options=sealed(key)) as runtime:
        first = runtime.lookup(NAMES[:1])
        runtime._parts.catalog.hide(first)
        runtime.room.leave(int(first[0]))
        runtime.engine.wait(lambda: runtime._parts.driver.writer.idle)
        again = runtime.put(NAMES[:1], PAGES[4:5]).wait()  # the key's bytes are others now
        assert again.blocks.tolist() == first.tolist(), "the same extent"
    medium = Medium(kv)
    medium.pages(0)[:] = old.pages(0)  # rolled back
    record = medium.header(1)
    medium.extent(2)[medium.shape.header_bytes :] = medium.pages(1).reshape(-1)
    record["block"], record["sequence"] = 2, medium.header(2)["sequence"] + 1
    medium.say(2, record)  # a whole extent moved, its header made to fit
    other = medium.header(3)
    other["namespace"], other["sequence"] = np.void(namespace_id("other")), other["sequence"] + 1
    medium.say(3, other)  # given to another tenant
    medium.save()
    with prefetchd.open(kv, options=sealed(key, scan=True)) as runtime:
        assert missing_of(runtime, runtime.lookup(NAMES[:1])).all()
        found = runtime.lookup([NAMES[1]])
        assert found.tolist() in ([1], [2])
        assert missing_of(runtime, found).all() == (found[0] == 2)
        assert len(runtime.lookup([NAMES[3]])) == 0
    with prefetchd.open(kv, options=sealed(key, scan=True, namespace="other")) as runtime:
        assert all(len(runtime.lookup([name])) == 0 for name in NAMES)
        name = other["key"][0].tobytes()  # as it stands on the medium
        block = runtime._parts.catalog.find(name)
        assert block == 3
        assert missing_of(runtime, np.array([block])).all()


# --- the key destroyed ---


def test_a_runtime_whose_key_is_destroyed_stops(
    kv: Path, key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_file, "_LOOK_NS", 0)
    runtime = prefetchd.open(kv, options=sealed(key))
    blocks = runtime.lookup(NAMES[:4])
    copy = key.read_bytes()
    key.write_bytes(copy)  # touched, and still the key
    assert np.array_equal(read_all(runtime, blocks), PAGES[:4])
    key_file.destroy(key)
    assert list(key.parent.iterdir()) == []
    for ask in (
        lambda: runtime.find(NAMES[:1]),
        lambda: runtime.demand(runtime.pages(blocks, 0)),
        lambda: runtime.put(NAMES[5:6], PAGES[5:6]),
    ):
        with pytest.raises(EngineError, match=r"kv\.key was destroyed; nothing it held can be"):
            ask()
    runtime.engine._pump.call()
    runtime.engine._pump.join(30)
    assert "the pump thread has stopped: store" in caplog.text
    assert "Traceback" not in caplog.text, "it was meant to"
    runtime.close()
    with pytest.raises(StoreError, match="if it was destroyed, what the store held is erased"):
        prefetchd.open(kv, options=sealed(key))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_key_file_that_cannot_be_looked_at_is_believed_to_be_there(
    error: int, kv: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not so one that is seen to be something else."""
    monkeypatch.setattr(key_file, "_LOOK_NS", 0)
    shape, text = superblock_of(kv, Opening(read_only=True)), key.read_bytes()
    watch = key_file.KeyWatch(key, shape)

    def refused(*_: object) -> None:
        raise OSError(error, "no")

    key.write_bytes(text)  # touched, and so read again
    os.utime(key, ns=(0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(key_file, "open", refused, raising=False)
        assert watch.gone(1) == ""
        key.write_bytes(b"")
        assert "was destroyed" in watch.gone(2)
    key.write_bytes(text.replace(b"key/1", b"key/0"))
    assert "was destroyed" in watch.gone(3), "it is looked at again"
    key.unlink()
    assert "was destroyed" in watch.gone(4)
    key.mkdir()
    assert "was destroyed" in watch.gone(5)
    key.rmdir()
    key.write_bytes(text)
    assert watch.gone(6) == ""


def test_an_encrypted_namespace_is_erased_with_its_key_and_encrypted_again(
    kv: Path, key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the key has gone before: then nobody new is let in until it is erased."""
    monkeypatch.setattr(key_file, "_LOOK_NS", 0)
    spaces = {"default": NamespaceSettings(kv, layout(), BLOCKS, False, sealed(key))}
    with daemon(kv.parent, spaces) as served:
        erase = ["namespace", "erase", "default", "--yes", "--connect", served.address]
        assert len(served.connect("default").lookup(NAMES[:4])) == 4
        for destroyed in (False, True):
            before = key.read_bytes()
            if destroyed:
                key_file.destroy(key)
                with pytest.raises(EngineError, match="was destroyed"):
                    served.runtime("default").find(NAMES[:1])
                with pytest.raises(SidecarError, match=r"the engine has stopped: .* destroyed"):
                    served.connect("default")
            said = CliRunner().invoke(app, erase, catch_exceptions=False)
            assert said.exit_code == 0
            assert key.read_bytes() != before
            again = served.connect("default")
            assert again.lookup(NAMES[:4]).tolist() == []
            again.put(NAMES[:4], PAGES[:4]).wait()
            assert len(again.lookup(NAMES[:4])) == 4
    assert PAGES[0, 0].tobytes() not in b"".join(one.read_bytes() for one in kv.iterdir())
    assert superblock_of(kv, Opening(read_only=True)).key_check
    assert "Traceback" not in caplog.text


def test_commands(
    kv: Path,
    key: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = ("--key-file", str(key), "--device", "threads")
    said = run_here(capsys, "store", "info", str(kv), "--device", "threads").out
    assert "ENCRYPTED" in said
    run_here(capsys, "store", "check", str(kv)).failed(3, "is encrypted; give its key file")
    assert "12 pages right" in run_here(capsys, "store", "check", str(kv), *named).out
    medium = Medium(kv)
    medium.pages(2)[1, 9] ^= 4
    medium.save()
    assert run_here(capsys, "store", "check", str(kv), *named).code == 1
    done = json.loads(run_here(capsys, "store", "repair", str(kv), *named, "--json").out)
    assert (done["removed"], done["blocks_stored"]) == (1, 3)
    monkeypatch.setattr("prefetchd.survey.CHUNK_BYTES", 20_000)  # less than an extent
    assert "nothing is wrong" in run_here(capsys, "store", "check", str(kv), *named).out
    erase = ("store", "erase", str(kv), "--yes")
    other = key.parent / "other"
    create(kv.parent / "second", layout(), 4, fill=False, key_file=other)
    run_here(capsys, *erase, "--key-file", str(other)).failed(3, "is of another store")
    with prefetchd.open(kv, options=sealed(key)):
        done = run_here(capsys, *erase, "--key-file", str(key))
        assert done.code == 3
        assert "what the store held can no longer be read" in done.out
        assert "in use by process" in done.out
        assert not key.exists()
    assert "key file was not named" in run_here(capsys, *erase).out
    second = ("store", "erase", str(kv.parent / "second"), "--yes", "--key-file", str(other))
    done = json.loads(run_here(capsys, *second, "--json").out)
    assert (done["key_destroyed"], len(done["erased"])) == (str(other), 1)
    assert not other.exists()
    assert not (kv.parent / "second").exists()


def test_a_namespace_of_a_daemon(
    kv: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "_LOOK_NS", 0)
    spaces = {"default": replace(space(sealed(key)), path=kv), "plain": space()}
    with daemon(tmp_path, spaces) as served:
        client, other = served.connect(), served.connect("plain")
        found = client.find(NAMES[:4])
        with client.demand(client.pages(found.blocks, 0), stamps=found.stamps) as ticket:
            assert np.array_equal(np.stack(ticket.views()), PAGES[:4, 0])
        assert client.put(NAMES[4:5], PAGES[4:5]).wait().failures == []
        key_file.destroy(key)
        with client.demand(client.pages(found.blocks, 1)) as ticket:
            assert ticket.missing.all()
        assert len(client.find(NAMES[:4])) == 0
        assert other.put(NAMES[:1], PAGES[:1]).wait().failures == [], "the others go on"


# --- the cipher ---


@given(
    layers=st.integers(1, 5),
    page_bytes=st.integers(12, 200),  # of a few bytes two sealed pages may be alike by chance
    padding=st.integers(0, 40),
    harm=st.integers(0, 2**32 - 1),
    where=st.sampled_from(["", "payload", "checksums", "key", "namespace", "block", "layer"]),
)
@settings(max_examples=100, deadline=None)
def test_a_page_opens_as_it_was_sealed_or_not_at_all(
    layers: int, page_bytes: int, padding: int, harm: int, where: str
) -> None:
    shape = plan_superblock(uniform(layers, page_bytes), 4, 4096, encrypted=True)
    space = bytes(range(16))
    cipher = PageCipher(bytes(32), shape, space)
    random = np.random.default_rng(harm)
    pages = random.integers(0, 256, (layers, page_bytes), np.uint8)
    payload = np.full((layers, page_bytes + padding), 7, np.uint8)
    record = np.zeros(1, record_dtype(shape.proof_words))
    record["block"], record["key"], record["namespace"] = 3, np.void(b"k" * 16), np.void(space)
    record["checksums"] = cipher.seal(payload, pages, b"k" * 16, 3)
    assert not payload[:, page_bytes:].any()
    number = np.arange(layers)
    records = np.repeat(record, layers)
    if where == "payload":
        payload[:, harm % page_bytes] ^= 1 << harm % 8
    elif where == "layer":
        number = number + 1
    elif where == "checksums":
        records["checksums"] ^= np.uint64(1 << harm % 64)
    elif where:
        raw = np.frombuffer(records[where].tobytes(), np.uint8).reshape(layers, -1).copy()
        raw[:, harm % raw.shape[1]] ^= 1
        records[where] = raw.reshape(-1).view(records[where].dtype)
    again = PageCipher(bytes(32), shape, b"another who asks")
    good = again.open(records, number, payload, range(layers))
    assert good.tolist() == [where == ""] * layers
    if not where:
        assert np.array_equal(payload[:, :page_bytes], pages)
    assert (
        not PageCipher(bytes(31) + b"1", shape, space)
        .open(records, number, payload, range(layers))
        .any()
    )


def test_no_nonce_is_used_twice_under_a_key() -> None:
    """Equal blocks, sealed again in one opening and in another, under one secret."""
    shape = plan_superblock(uniform(2, 64), 4, 4096, encrypted=True)
    pages, seen = np.zeros((2, 64), np.uint8), set()
    for _ in range(3):
        cipher = PageCipher(bytes(32), shape, bytes(16))
        for _ in range(50):
            payload = np.empty((2, 64), np.uint8)
            proof = cipher.seal(payload, pages, b"k" * 16, 0)
            seen |= {(proof[-3:].tobytes(), layer) for layer in range(2)}
            seen |= {payload[layer].tobytes() for layer in range(2)}
    assert len(seen) == 2 * 3 * 50 * 2


def test_a_fork_does_not_go_on_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = plan_superblock(uniform(1, 64), 4, 4096, encrypted=True)
    cipher, pages = PageCipher(bytes(32), shape, bytes(16)), np.zeros((1, 64), np.uint8)
    mine = cipher.seal(np.empty((1, 64), np.uint8), pages, b"k" * 16, 0)
    monkeypatch.setattr("prefetchd.cipher.os.getpid", lambda: -1)
    theirs = cipher.seal(np.empty((1, 64), np.uint8), pages, b"k" * 16, 0)
    assert (mine[-3:-1] != theirs[-3:-1]).all()


def test_what_is_forgotten_opens_nothing() -> None:
    shape = plan_superblock(uniform(1, 64), 4, 4096, encrypted=True)
    cipher, payload = PageCipher(bytes(32), shape, bytes(16)), np.zeros((1, 64), np.uint8)
    record = np.zeros(1, record_dtype(shape.proof_words))
    other = PageCipher(bytes(32), shape, bytes(16))
    for forgotten in (False, True):
        record["checksums"] = cipher.seal(payload, np.zeros((1, 64), np.uint8), bytes(16), 0)
        assert other.open(record, np.arange(1), payload, [0]).all() != forgotten
        cipher.forget()


def test_names_are_veiled_one_for_one(tmp_path: Path, key: Path) -> None:
    shape = plan_superblock(layout(), 4, 4096, encrypted=True)
    mine, theirs = (PageCipher(bytes(32), shape, space) for space in (b"m" * 16, b"t" * 16))
    names = mine.veil(keys(1000))
    assert mine.veil(keys(1000)) == names
    assert len({*names, *theirs.veil(keys(1000)), *keys(1000)}) == 3000
    assert mine.veil([]) == []


def test_nothing_is_imported_where_it_is_off_and_the_lack_of_it_is_told(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, prefetchd\n"
        "prefetchd.open(None, prefetchd.uniform(1, 4096), blocks=4).close()\n"
        "import prefetchd.cli\n"
        "assert not [name for name in sys.modules if name.startswith('cryptography')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(StoreError, match=r"install prefetchd\[encryption\]"):
        create(tmp_path / "kv", layout(), 4, fill=False, key_file=key)
    assert not key.exists()
    assert not (tmp_path / "kv").exists()
