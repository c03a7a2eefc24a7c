"""A path is emptied while the store is used: nothing fails, nothing is lost, a crash included."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import Options, Runtime, StoreError
from prefetchd.assembly import assemble
from prefetchd.device import Completions
from prefetchd.devices.powerloss import Image, PowerLoss
from prefetchd.format import newest_superblock
from prefetchd.store import of_memory
from tests import tier_bench
from tests.drain_campaign import campaign
from tests.runtime_bench import LAYERS, PLAIN, content, keys, layout
from tests.test_reconfigure import asking
from tests.tier_bench import Tier, key_of, new_image, pages_of

BLOCKS = 60
SECOND_NS = 10**9
OPTIONS: Options = replace(PLAIN, device="threads", lease_s=0)


def open_three(folder: Path, options: Options = OPTIONS, **words: Any) -> Runtime:
    paths = [folder / "b", folder / "c"]
    return prefetchd.open(
        folder / "a", layout(), blocks=BLOCKS, fill=False, paths=paths, options=options, **words
    )


def until(kv: Runtime, true: Callable[[], bool]) -> None:
    assert kv.engine.wait(true, kv.engine.clock() + 20 * SECOND_NS), "it never holds"


def left(kv: Runtime, path: int) -> int:
    return kv._parts.catalog.taken_on(path)


def read_all(kv: Runtime, names: list[bytes]) -> Any:
    blocks = kv.lookup(names)
    assert len(blocks) == len(names)
    found = []
    for layer in range(LAYERS):
        with kv.demand(kv.pages(blocks, layer)) as ticket:
            found.append(np.stack(ticket.views()))
    return np.stack(found, axis=1)


def test_a_path_is_emptied_while_everything_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefetchd")
    pages = content(24)
    with open_three(tmp_path) as kv:
        blocks = kv.put(keys(24), pages).blocks
        some = blocks[blocks % 3 == 2][:3]  # on a path that stays
        chosen = [int(np.flatnonzero(blocks == block)[0]) for block in some]
        with asking(kv, pages[chosen], some) as more:
            more()
            before = left(kv, 1)
            assert before > 0
            changes = kv.reconfigure(drain=(str(tmp_path / "b"),))
            assert changes.applied[0].startswith("drain from () to ")
            until(kv, lambda: left(kv, 1) == 0)
            more()
            assert left(kv, 1) == 0, "nothing new goes there"
        assert [one.draining for one in kv.stats().paths] == [False, True, False]
        assert np.array_equal(read_all(kv, keys(24)), pages)
        until(kv, lambda: "b/extents.dat: this path is empty" in caplog.text)
    shutil.rmtree(tmp_path / "b")
    with open_three(tmp_path, allow_missing_paths=True) as kv:
        assert np.array_equal(read_all(kv, keys(24)), pages)


def test_a_drain_goes_on_at_the_next_opening_and_can_be_called_off(tmp_path: Path) -> None:
    pages = content(24)
    with open_three(tmp_path) as kv:
        kv.put(keys(24), pages).wait()
    drain = (str(tmp_path / "c"),)
    with open_three(tmp_path, replace(OPTIONS, drain=drain)) as kv:
        until(kv, lambda: left(kv, 2) == 0)
        assert np.array_equal(read_all(kv, keys(24)), pages)
        kv.reconfigure(drain=())
        kv.put(keys(30, 100), content(30)).wait()
        assert left(kv, 2) > 0
    with open_three(tmp_path) as kv:
        assert kv.stats().blocks_visible == 54


@pytest.fixture
def stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store whose second path is drained by hand, with 12 blocks."""
    with open_three(tmp_path, replace(OPTIONS, lease_s=100)) as kv:
        kv.put(keys(12), content(12)).wait()
        monkeypatch.setattr(kv._drains, "_run", lambda: None)
        kv.reconfigure(drain=(str(tmp_path / "b"),))
        yield kv


def test_an_index_that_was_looked_up_is_good_for_its_lease(stepped: Runtime) -> None:
    kv, drains = stepped, stepped._drains
    found = kv.find(keys(12))
    there = left(kv, 1)
    while drains.step():
        assert not drains.settle()
    assert left(kv, 1) == there, "old copies stay"
    new = kv.find(keys(12))
    assert not (new.blocks % 3 == 1).any()
    moved = found.blocks % 3 == 1
    assert (new.blocks[~moved] == found.blocks[~moved]).all()
    for layer in range(LAYERS):
        with kv.demand(kv.pages(found.blocks, layer), stamps=found.stamps) as ticket:
            assert not ticket.missing.any()
    held = kv.demand(kv.pages(found.blocks[moved][:1], 0)).wait()
    clock = kv.engine.clock
    kv.engine.clock = lambda: clock() + 200 * SECOND_NS
    until(kv, lambda: not drains.settle() and left(kv, 1) == 1)  # which a reader holds
    held.release()
    until(kv, drains.settle)
    with kv.demand(kv.pages(found.blocks, 0), stamps=found.stamps) as ticket:
        assert (ticket.missing == moved).all()
    assert np.array_equal(read_all(kv, keys(12)), content(12))


def test_what_goes_while_it_is_copied_does_not_come_back(stepped: Runtime) -> None:
    kv, drains, catalog = stepped, stepped._drains, stepped._parts.catalog
    (block, stamp), *_ = drains._next(1)
    rows = drains._read(block, stamp)
    assert rows is not None
    with kv.engine.lock:  # so that the write does not end before
        moved = drains._write(block, stamp, rows)
        assert moved is not None
        catalog.hide(np.array([block]))
        kv.room.leave(block)
    assert not drains._end(*moved)
    assert catalog.find(drains._key(moved[1].block)) < 0
    until(kv, lambda: catalog.blocks_used == 11)
    assert kv.stats().blocks_visible == 11


def test_bounds_do_not_stand_in_the_way(stepped: Runtime) -> None:
    kv, catalog = stepped, stepped._parts.catalog
    kv.reconfigure(quota_bytes=12 * kv._parts.store.superblock.extent_bytes)
    assert catalog.quota_full
    assert stepped._drains.step() > 0
    assert kv.stats().blocks_visible == 12


def test_what_cannot_be_drained_is_refused_in_words(tmp_path: Path) -> None:
    with open_three(tmp_path) as kv:
        kv.put(keys(50), content(50)).wait()
        for folder, words in (
            ("a", "its first path cannot be drained"),
            ("d", "has no path"),
            ("b", "the others have room for"),
        ):
            with pytest.raises(StoreError, match=words):
                kv.reconfigure(drain=(str(tmp_path / folder),), evict="arc")
        assert kv.stats().evict == "lru"
        assert not any(one.draining for one in kv.stats().paths)
    with pytest.raises(StoreError, match="has no path"):
        open_three(tmp_path, replace(OPTIONS, drain=("elsewhere",)))
    with open_three(tmp_path) as kv:
        assert kv.stats().blocks_visible == 50


# --- crashes ---


class Watched(PowerLoss):
    """Keeps what a power failure would leave, at most turns."""

    images: list[Image]

    def reap(self) -> Completions:
        done = super().reap()
        if len(done):
            self.images.append(self.crash(len(self.images)))
        return done


def test_power_fails_at_any_moment_of_a_drain() -> None:
    devices: list[Watched] = []

    def make(files: Any, arena: Any, depth: int) -> Watched:
        device = Watched(files, arena, depth, contents=image)
        device.images = []
        devices.append(device)
        return device

    image = new_image(3, 24)
    shapes = [newest_superblock(file[: 1 << 14]) for file in image]
    options = replace(OPTIONS, device=make, write_buffers=4, staging_bytes=1 << 16)
    names, pages = [key_of(n) for n in range(12)], np.stack([pages_of(n) for n in range(12)])
    with Runtime(assemble(of_memory(shapes), options), options) as kv:
        kv.put(names, pages).wait()
        device, drains = devices[0], kv._drains
        with kv.engine.lock:
            device.images.clear()
            kv._parts.driver.paths.drain(1)
        while drains.step():
            pass
        until(kv, drains.settle)
        with kv.engine.lock:
            images = list(device.images)
    assert len(images) > 10
    for number, crashed in enumerate(images):
        tier = Tier([file.copy() for file in crashed], scan=number % 2 == 1)
        stored = tier.stored()
        assert stored.keys() == set(names), "all of them, each once"
        for place, name in enumerate(names):
            assert (tier_bench.read(tier.device.contents, tier, stored[name]) == pages[place]).all()
        tier_bench.World.check_books(tier)
    assert not any(block % 3 == 1 for block in stored.values())


def test_kills_in_the_middle_of_drains_lose_nothing(tmp_path: Path) -> None:
    assert campaign(tmp_path / "kv", 3) == 30
