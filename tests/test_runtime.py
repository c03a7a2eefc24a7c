"""The runtime: what was put is found and read back, exactly, by whoever may have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import (
    DoneHint,
    EngineError,
    Options,
    Outcome,
    PageHint,
    Runtime,
    StoreError,
    block_keys,
)
from prefetchd.core import CoreLimits
from prefetchd.model import Hinted
from prefetchd.predictor import Guess, Predictor
from tests.runtime_bench import (
    BLOCKS,
    LAYERS,
    PAGE_BYTES,
    PLAIN,
    FaultyRuntime,
    content,
    harm_next,
    keys,
    layout,
    open_plain,
    pinned,
    read_all,
)

DEVICES = ["memory", "threads", "uring"]


def place(device: str, tmp_path: Path) -> Path | None:
    return None if device == "memory" else tmp_path / "kv"


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with open_plain() as runtime:
        yield runtime


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_bytes", [1_000, PAGE_BYTES])
def test_what_was_put_is_read_back_exactly(device: str, page_bytes: int, tmp_path: Path) -> None:
    pages = content(BLOCKS, page_bytes)
    options = replace(PLAIN, device=device)
    with open_plain(place(device, tmp_path), options, page_bytes) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        assert (np.sort(blocks) == np.arange(BLOCKS)).all()
        assert np.array_equal(runtime.lookup(keys(BLOCKS)), blocks)
        assert np.array_equal(read_all(runtime, blocks), pages)
        assert np.array_equal(read_all(runtime, blocks[::-1]), pages[::-1])
        stats = runtime.stats()
        assert stats.outcomes["miss"] == BLOCKS * LAYERS == stats.outcomes["retained"]
        assert (stats.device, stats.failures, pinned(runtime)) == (device, {}, 0)
        assert stats.bytes_read == BLOCKS * LAYERS * runtime.slot_bytes


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_store_is_found_again_after_a_close(device: str, tmp_path: Path) -> None:
    pages = content(5)
    options = replace(PLAIN, device=device)
    with open_plain(tmp_path / "kv", options) as runtime:
        runtime.put(keys(5), pages).wait()
    with prefetchd.open(tmp_path / "kv", options=options) as runtime:
        blocks = runtime.lookup(keys(6))
        assert np.array_equal(read_all(runtime, blocks), pages)
        assert runtime.put(keys(1, 5), content(1, seed=2)).blocks.min() >= 0
        assert np.array_equal(read_all(runtime, blocks), pages), "nothing was written over"


def test_eviction_under_pressure_returns_no_wrong_page(tmp_path: Path) -> None:
    pages = content(BLOCKS)
    options = Options(device="threads", staging_bytes=8 * PAGE_BYTES, evict="cycle")
    with open_plain(tmp_path / "kv", options) as runtime:
        runtime.put(keys(BLOCKS), pages).wait()
        random = np.random.default_rng(5)
        for step in range(120):
            layer = step % LAYERS
            blocks = random.choice(BLOCKS, 4, replace=False)
            runtime.hint(PageHint(runtime.pages(blocks[:3], layer), np.ones(3, np.float32)))
            with runtime.demand(runtime.pages(blocks, layer)) as ticket:
                assert np.array_equal(np.stack(ticket.views()), pages[blocks, layer])
        assert runtime.stats().slots_used <= 8


def test_lookup_returns_the_longest_known_prefix(runtime: Runtime) -> None:
    chain = block_keys(np.arange(16 * 6), layout())
    blocks = runtime.put(chain[:2] + chain[3:4], content(3)).blocks
    assert runtime.lookup(chain).tolist() == blocks[:2].tolist()
    assert runtime.lookup(chain[3:]).tolist() == blocks[2:].tolist()
    assert runtime.lookup(chain[2:]).tolist() == []
    assert runtime.lookup([]).tolist() == []
    rows = np.frombuffer(b"".join(chain), np.uint8).reshape(-1, 16)
    assert runtime.lookup(rows).tolist() == blocks[:2].tolist()


def test_views_are_read_only_and_stay_while_they_are_pinned() -> None:
    pages = content(BLOCKS)
    with open_plain(None, replace(PLAIN, staging_bytes=4 * PAGE_BYTES)) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        held = runtime.demand(runtime.pages(blocks[:2], 0))
        views = held.views()
        assert all(np.shares_memory(view, runtime._parts.staging) for view in views)
        with pytest.raises(ValueError, match="read-only"):
            views[0][0] = 1
        for block in range(2, BLOCKS):  # two slots are left, and go round
            with runtime.demand(runtime.pages(blocks[block : block + 1], 1)) as ticket:
                assert np.array_equal(ticket.view(0), pages[block, 1])
        assert np.array_equal(np.stack(views), pages[:2, 0])
        assert held.outcomes.tolist() == [Outcome.MISS] * 2
        held.release()
        held.release()
        with pytest.raises(ValueError, match="released"):
            held.views()
        assert pinned(runtime) == 0


def test_a_push_brings_the_pages_to_a_buffer(runtime: Runtime) -> None:
    pages = content(3)
    blocks = runtime.put(keys(3), pages).blocks
    buffer = runtime.buffer(4)
    with runtime.demand(runtime.pages(blocks, 1)) as ticket:
        ticket.push(buffer, 1).wait()
    assert np.array_equal(runtime.peek(buffer, 4, PAGE_BYTES)[1:], pages[:, 1])


def test_the_callers_arrays_are_the_callers_again_at_once() -> None:
    pages, ids = content(2), np.array([0, 3], np.int64)
    with FaultyRuntime() as runtime:
        wanted = pages.copy()
        put = runtime.put(keys(2), pages)
        pages[:] = 0
        put.wait()
        harm_next(runtime, (0, "stall"), (1, "stall"))
        ticket = runtime.demand(ids, timeout_s=60)
        ids[:] = 0
        runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
        assert ticket.pages.tolist() == [0, 3]
        assert np.array_equal(np.stack(ticket.wait().views()), wanted[:, 0])


def test_namespaces_never_see_each_other(tmp_path: Path) -> None:
    mine, theirs = content(2), content(2, seed=2)
    for name, pages in (("mine", mine), ("theirs", theirs)):
        with open_plain(tmp_path / "kv", replace(PLAIN, namespace=name)) as runtime:
            assert runtime.lookup(keys(2)).tolist() == []
            runtime.put(keys(2), pages).wait()
    for name, pages in (("mine", mine), ("theirs", theirs)):
        full = replace(PLAIN, namespace=name, evict_blocks=False)
        with open_plain(tmp_path / "kv", full) as runtime:
            blocks = runtime.lookup(keys(2))
            assert np.array_equal(read_all(runtime, blocks), pages)
            others = np.setdiff1d(np.arange(BLOCKS), blocks)
            for block in others:
                with runtime.demand(runtime.pages(np.array([block]), 0)) as ticket:
                    assert ticket.missing.all()
            left = runtime.put(keys(5, 2), content(5)).blocks >= 0
            assert np.count_nonzero(left) == (4 if name == "mine" else 0)
    with open_plain(tmp_path / "kv", replace(PLAIN, namespace="mine")) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(2))), mine)


def test_a_full_store_says_so_and_goes_on_reading() -> None:
    pages = content(BLOCKS + 2)
    with open_plain(None, replace(PLAIN, evict_blocks=False)) as runtime:
        put = runtime.put(keys(BLOCKS + 2), pages).wait()
        assert put.blocks[-2:].tolist() == [-1, -1]
        why = f"was not stored: all {BLOCKS} blocks of the store are in use"
        assert put.failures == [f"block {place} {why}" for place in (BLOCKS, BLOCKS + 1)]
        assert np.array_equal(read_all(runtime, put.blocks[:BLOCKS]), pages[:BLOCKS])


def test_a_known_key_is_not_written_again(runtime: Runtime) -> None:
    first = runtime.put(keys(2), content(2)).blocks
    written = runtime.stats().bytes_written
    assert runtime.put(keys(2), content(2)).blocks.tolist() == first.tolist()
    assert runtime.stats().bytes_written == written


def test_a_key_put_twice_at_once_takes_one_block() -> None:
    pages = content(1)
    with FaultyRuntime([(0, "stall")]) as runtime:
        put = runtime.put(keys(1) * 2, np.concatenate([pages, pages]))
        runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
        assert put.blocks[0] == put.blocks[1] == runtime.lookup(keys(1))[0]
        assert runtime.stats().blocks_visible == 1
        assert runtime.put(keys(BLOCKS - 1, 5), content(BLOCKS - 1)).blocks.min() >= 0


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([0, 1, 0], "demanded twice"),
        ([-1], "page -1 is none of the"),
        ([10**12], "is none of the"),
        (range(30), "30 pages demanded at once, staging holds 24"),
        ([[0, 1]], "1-d"),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused_in_words(
    runtime: Runtime, pages: list[int], words: str
) -> None:
    runtime.put(keys(1), content(1)).wait()
    with pytest.raises(ValueError, match=words):
        runtime.demand(np.array(pages, np.int64))
    with runtime.demand(np.array([0, LAYERS, 1], np.int64)) as ticket:
        assert ticket.missing.tolist() == [False, True, False], "page 3 is of no block so far"


def test_wrong_arguments_are_refused_in_words(runtime: Runtime) -> None:
    with pytest.raises(ValueError, match="keys are 16 bytes"):
        runtime.put([b"short"], content(1))
    with pytest.raises(ValueError, match=r"take \(2, 3, 12288\) bytes"):
        runtime.put(keys(2), content(1))
    with pytest.raises(ValueError, match=r"\(2, 3, 12288\)"):
        runtime.put(keys(2), content(2).transpose(1, 0, 2))
    with pytest.raises(ValueError, match="layer 3"):
        runtime.pages(np.array([0]), LAYERS)
    assert runtime.put([], content(0)).wait().done
    assert runtime.stats().blocks_visible == 0


def test_too_many_open_demands_are_refused_in_words() -> None:
    with open_plain(None, replace(PLAIN, core=CoreLimits(tickets_max=2))) as runtime:
        runtime.put(keys(1), content(1)).wait()
        tickets = [runtime.demand(np.array([0])) for _ in range(2)]
        with pytest.raises(ValueError, match="2 demands are open"):
            runtime.demand(np.array([0]))
        tickets[0].release()
        runtime.demand(np.array([0])).wait()


def test_hints_are_followed_by_timely_demands() -> None:
    pages = content(BLOCKS)
    options = replace(PLAIN, predictor="attention", evict="cycle")
    with open_plain(None, options) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        wanted = runtime.pages(blocks[:4], 1)
        runtime.hint(PageHint(wanted, np.ones(4, np.float32)))
        core = runtime.engine.core
        runtime.engine.wait(lambda: core.counters.prefetch_reads > 0 and core.reading == 0)
        issued = core.counters.prefetch_reads
        with runtime.demand(wanted) as ticket:
            assert np.count_nonzero(ticket.outcomes == Outcome.TIMELY) == issued
            assert np.count_nonzero(ticket.waits_ns == 0) == issued
            assert np.array_equal(np.stack(ticket.views()), pages[:4, 1])
        assert runtime.stats().prefetch["useful"] == issued


class Echo(Predictor):
    guess = Guess()

    def on_page_hint(self, hint: PageHint) -> None:
        self.guess = Guess(hint.pages)

    def predict(self, now_ns: int, limit: int) -> Guess:
        return self.guess


def test_pages_that_were_never_written_are_not_guessed_at() -> None:
    with open_plain(None, replace(PLAIN, predictor=Echo)) as runtime:
        blocks = runtime.put(keys(2), content(2)).blocks
        core = runtime.engine.core
        every = runtime.pages(np.arange(BLOCKS - 1, -1, -1), 1)  # the two that are there come last
        runtime.engine.handle(Hinted(PageHint(every, np.ones(BLOCKS, np.float32))))
        runtime.engine.wait(lambda: core.reading == 0)
        staged = np.flatnonzero(core.staging.slot_of >= 0)
        assert staged.tolist() == np.sort(runtime.pages(blocks, 1)).tolist()
        assert runtime.stats().failures == {}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"depth": 0}, "option depth is 0; it must be at least 1"),
        ({"depth": 1 << 20}, "option depth is 1048576; it must be at most 32768"),
        ({"write_buffers": 0}, "option write_buffers is 0"),
        ({"staging_bytes": -1}, "option staging_bytes is -1"),
        ({"demand_timeout_s": -0.5}, "option demand_timeout_s is -0.5"),
        ({"put_timeout_s": float("nan")}, "option put_timeout_s is nan"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_words(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options(**wrong)


@pytest.mark.parametrize(
    ("name", "value"), [("read_timeout_ns", -1), ("tickets_max", 0), ("candidates", -1)]
)
def test_limits_that_make_no_sense_are_refused_in_words(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"at least.*{name}={value}"):
        CoreLimits(**{name: value})  # type: ignore[arg-type]  # the others are bool


def test_use_after_close_is_refused_in_words(tmp_path: Path) -> None:
    runtime = open_plain(tmp_path / "kv", replace(PLAIN, device="uring"))
    blocks = runtime.put(keys(2), content(2)).blocks
    ticket = runtime.demand(runtime.pages(blocks, 0)).wait()
    runtime.close()
    runtime.close()
    for use in (
        lambda: runtime.demand(runtime.pages(blocks, 1)),
        lambda: runtime.put(keys(1, 4), content(1)),
        lambda: runtime.hint(DoneHint(1)),
        lambda: runtime.find(keys(1)),
        lambda: runtime.lookup(keys(1)),
        lambda: runtime.tend(0),
        ticket.release,
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            use()
    assert runtime.stats().slots_used == 2


def test_a_store_in_memory_needs_to_know_its_shape() -> None:
    with pytest.raises(StoreError, match="needs a layout"):
        prefetchd.open(None)
