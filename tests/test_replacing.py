"""Another drive in the place of an empty path: all blocks stay, a refusal leaves nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from prefetchd import StoreError
from prefetchd.cli import app
from prefetchd.replacing import replace_path
from tests.runtime_bench import content, keys
from tests.test_draining import OPTIONS, left, open_three, read_all, until


@pytest.fixture
def drained(tmp_path: Path) -> Path:
    """A store of three paths, the last of which is empty."""
    with open_three(tmp_path) as kv:
        kv.put(keys(24), content(24)).wait()
    with open_three(tmp_path, replace(OPTIONS, drain=(str(tmp_path / "c"),))) as kv:
        until(kv, lambda: left(kv, 2) == 0)
    return tmp_path


@pytest.mark.parametrize("away", [False, True])
def test_an_empty_path_is_replaced(drained: Path, away: bool) -> None:
    if away:
        shutil.rmtree(drained / "c")
    words = [str(drained / name) for name in "acd"]
    done = CliRunner().invoke(
        app, ["store", "replace", "--no-fill", *words], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    assert str(drained / "d") in done.output
    shutil.rmtree(drained / "c", ignore_errors=True)
    for scan in (False, True):
        with open_three(drained, replace(OPTIONS, scan=scan)) as kv:
            assert kv._parts.store.directories[2] == drained / "d"
            assert np.array_equal(read_all(kv, keys(24)), content(24))
            kv.put(keys(30, 100), content(30)).wait()
            assert left(kv, 2) > 0
            assert len(kv.lookup(keys(30, 100))) == 30


def test_a_path_of_an_encrypted_store_is_emptied_and_replaced(tmp_path: Path) -> None:
    pages, key = content(24), tmp_path / "keys" / "kv.key"
    key.parent.mkdir()
    sealed = replace(OPTIONS, key_file=key)
    with open_three(tmp_path, sealed) as kv:
        kv.put(keys(24), pages).wait()
    for old, new in (("b", "d"), ("c", "e")):
        with open_three(tmp_path, replace(sealed, drain=(str(tmp_path / old),))) as kv:
            until(kv, lambda old=old: left(kv, kv.folders.index(tmp_path / old)) == 0)  # type: ignore[misc]
            assert np.array_equal(read_all(kv, keys(24)), pages)
            if old == "b":
                kv.attach(tmp_path / old, tmp_path / new, fill=False)
                kv.put(keys(12, 100), content(12)).wait()
                assert kv.lookup(keys(12, 100)).size == 12
                assert kv.stats().failures == {}
    with pytest.raises(StoreError, match="give its key file"):
        replace_path(tmp_path / "a", tmp_path / "c", tmp_path / "e", fill=False)
    words = [str(tmp_path / name) for name in "ace"]
    done = CliRunner().invoke(
        app, ["store", "replace", "--no-fill", "--key-file", str(key), *words]
    )
    assert done.exit_code == 0, done.output
    for scan in (False, True):
        with open_three(tmp_path, replace(sealed, scan=scan)) as kv:
            assert kv.folders == tuple(tmp_path / name for name in "ade")
            assert np.array_equal(read_all(kv, keys(24)), pages)
            assert np.array_equal(read_all(kv, keys(12, 100)), content(12))
            kv.put(keys(12, 200), content(12)).wait()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("a", "d", "has no further path"),
        ("x", "d", "has no further path"),
        ("b", "d", "blocks lie on .*empty it first"),
        ("c", "b", "has the path .* already"),
        ("c", "/".join(["d" * 200] * 19), "names of its folders are too long"),
        ("c", "no/such", "create its parent folder first"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_changes(
    drained: Path, old: str, new: str, words: str
) -> None:
    if "too long" in words:
        (drained / new).parent.mkdir(parents=True)
    with pytest.raises(StoreError, match=words):
        replace_path(drained / "a", drained / old, drained / new, fill=False)
    assert not (drained / "d").exists()
    assert new == "b" or not (drained / new).exists()
    with open_three(drained) as kv:
        assert kv._parts.store.directories[2] == drained / "c"
        assert np.array_equal(read_all(kv, keys(24)), content(24))


def test_a_path_that_is_away_is_not_named_twice(drained: Path) -> None:
    shutil.move(drained / "b", drained / "away")
    with pytest.raises(StoreError, match=r"has the path .* already"):
        replace_path(drained / "a", drained / "c", drained / "b", fill=False)
    assert not (drained / "b").exists()
    shutil.move(drained / "away", drained / "b")
    with open_three(drained) as kv:
        assert np.array_equal(read_all(kv, keys(24)), content(24))
