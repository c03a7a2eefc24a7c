"""One API: what holds for the embedded runtime holds for a client of a daemon, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import (
    ChainHint,
    Client,
    DoneHint,
    EngineError,
    Options,
    Outcome,
    PageHint,
    PageMissing,
    Runtime,
)
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, PLAIN, content, keys, open_plain
from tests.sidecar_bench import daemon, space

Kv = Runtime | Client
Open = Callable[..., Kv]


@pytest.fixture(params=["embedded", "sidecar"])
def open_kv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:

        def start(options: Options = PLAIN, page_bytes: int = PAGE_BYTES) -> Kv:
            if request.param == "embedded":
                return stack.enter_context(open_plain(None, options, page_bytes))
            spaces = {"default": space(options, page_bytes)}
            served = stack.enter_context(daemon(tmp_path, spaces))
            return stack.enter_context(served.connect())

        yield start


@pytest.fixture
def kv(open_kv: Open) -> Kv:
    return open_kv()


def read_all(kv: Kv, blocks: Any) -> Any:
    found = []
    for layer in range(LAYERS):
        with kv.demand(kv.pages(blocks, layer)) as ticket:
            found.append(np.stack(ticket.views()))
    return np.stack(found, axis=1)


@pytest.mark.parametrize("page_bytes", [1_000, PAGE_BYTES])
@pytest.mark.parametrize("durability", ["durable", "fast"])
def test_what_was_put_is_read_back_exactly(open_kv: Open, page_bytes: int, durability: str) -> None:
    kv, pages = open_kv(page_bytes=page_bytes), content(BLOCKS, page_bytes)
    put = kv.put(keys(BLOCKS), pages, durability=durability)
    blocks = put.blocks
    assert (put.failures, put.refused) == ([], [])
    found = kv.find(keys(BLOCKS))
    assert np.array_equal(found.blocks, blocks)
    assert np.array_equal(found.stamps, put.stamps)
    assert np.array_equal(
        kv.lookup(np.frombuffer(b"".join(keys(2)), "u1").reshape(2, 16)), blocks[:2]
    )
    assert np.array_equal(read_all(kv, blocks), pages)
    assert np.array_equal(read_all(kv, blocks[::-1]), pages[::-1])
    outcomes = kv.stats().outcomes
    assert outcomes["miss"] + outcomes["retained"] == 2 * BLOCKS * LAYERS
    assert (kv.geometry.layers, kv.geometry.blocks, kv.page_bytes) == (LAYERS, BLOCKS, page_bytes)


def test_outcomes_and_waits_tell_how_pages_were_found(kv: Kv) -> None:
    blocks = kv.put(keys(4), content(4)).blocks
    for outcome in (Outcome.MISS, Outcome.RETAINED):
        with kv.demand(kv.pages(blocks, 1)) as ticket:
            assert ticket.outcomes.tolist() == [outcome] * 4
            assert ((ticket.waits_ns > 0) == (outcome == Outcome.MISS)).all()
            assert ticket.waits_ns.dtype == ticket.slots.dtype == np.int64


def test_views_are_read_only_and_end_with_the_ticket(kv: Kv) -> None:
    pages = content(2)
    blocks = kv.put(keys(2), pages).blocks
    held = kv.demand(kv.pages(blocks, 0))
    with pytest.raises(ValueError, match="read-only"):
        held.view(0)[0] = 1
    assert np.array_equal(held.view(1), pages[1, 0])
    held.release()
    held.release()
    with pytest.raises(ValueError, match="released"):
        held.views()


def test_pages_that_are_not_there_are_missing(kv: Kv) -> None:
    kv.put(keys(1), content(1)).wait()
    with kv.demand(np.array([0, LAYERS, 1], np.int64)) as ticket:
        assert ticket.missing.tolist() == [False, True, False]
        with pytest.raises(PageMissing, match="1 of 3 pages"):
            ticket.views()
        assert len(ticket.view(0)) == PAGE_BYTES
    found = kv.find(keys(3))
    assert len(found) == 1
    with kv.demand(kv.pages(found.blocks, 0), stamps=found.stamps + 1) as ticket:
        assert ticket.missing.all()
    with kv.demand(kv.pages(found.blocks, 0), stamps=found.stamps) as ticket:
        assert not ticket.missing.any()
    assert kv.lookup([]).tolist() == []
    with kv.demand(np.empty(0, np.int64)) as ticket:
        assert len(ticket.slots) == 0


def test_a_push_brings_the_pages_to_a_buffer(kv: Kv) -> None:
    pages = content(3)
    blocks = kv.put(keys(3), pages).blocks
    buffer = kv.buffer(4)
    with kv.demand(kv.pages(blocks, 1)) as ticket:
        ticket.push(buffer, 1).wait()
    assert np.array_equal(kv.peek(buffer, 4, PAGE_BYTES)[1:], pages[:, 1])


def test_the_callers_arrays_are_the_callers_again_at_once(kv: Kv) -> None:
    pages, ids = content(2), np.array([0, 3], np.int64)
    wanted = pages.copy()
    put = kv.put(keys(2), pages)
    pages[:] = 0
    put.wait()
    ticket = kv.demand(ids)
    ids[:] = 0
    assert ticket.pages.tolist() == [0, 3]
    assert np.array_equal(np.stack(ticket.wait().views()), wanted[:, 0])


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
def test_a_demand_that_cannot_be_met_is_refused_in_words(kv: Kv, pages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kv.demand(np.array(pages, np.int64))


def test_wrong_arguments_are_refused_in_words(kv: Kv) -> None:
    with pytest.raises(ValueError, match="keys are 16 bytes"):
        kv.put([b"short"], content(1))
    with pytest.raises(ValueError, match=r"take \(2, 3, 12288\) bytes"):
        kv.put(keys(2), content(1))
    with pytest.raises(ValueError, match="durability is one of"):
        kv.put(keys(1), content(1), durability="maybe")
    with pytest.raises(ValueError, match="time to live"):
        kv.put(keys(1), content(1), ttl_s=-1.0)
    with pytest.raises(ValueError, match="layer 3"):
        kv.pages(np.array([0]), LAYERS)
    with pytest.raises(ValueError, match="give one a page"):
        kv.demand(np.array([0, 1]), stamps=np.array([1]))
    assert kv.put([], content(0)).wait().done
    assert kv.stats().blocks_visible == 0


def test_a_full_store_says_so_in_the_same_words(open_kv: Open) -> None:
    kv = open_kv(replace(PLAIN, evict_blocks=False))
    put = kv.put(keys(BLOCKS + 2), content(BLOCKS + 2)).wait()
    assert put.blocks[-2:].tolist() == [-1, -1]
    why = f"was not stored: all {BLOCKS} blocks of the store are in use"
    assert put.failures == [f"block {place} {why}" for place in (BLOCKS, BLOCKS + 1)]


def test_what_admission_refuses_is_told(open_kv: Open) -> None:
    kv = open_kv(replace(PLAIN, admission="second-touch"))
    put = kv.put(keys(2), content(2)).wait()
    assert (put.refused, put.failures, put.blocks.tolist()) == ([0, 1], [], [-1, -1])
    assert kv.put(keys(2), content(2)).blocks.min() >= 0


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_a_demand_without_room_ends_at_its_deadline(open_kv: Open, timeout_s: float) -> None:
    kv = open_kv(replace(PLAIN, staging_bytes=4 * PAGE_BYTES))
    blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
    held = kv.demand(kv.pages(blocks[:4], 0)).wait()
    with kv.demand(kv.pages(blocks[4:6], 0), timeout_s=timeout_s) as ticket:
        assert ticket.missing.all()
    waiting = kv.demand(kv.pages(blocks[4:6], 0), timeout_s=60)
    held.release()
    assert not waiting.wait().missing.any()
    waiting.release()


def test_a_ticket_given_back_unanswered_is_answered_with_nothing(open_kv: Open) -> None:
    kv = open_kv(replace(PLAIN, staging_bytes=4 * PAGE_BYTES))
    blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
    held = kv.demand(kv.pages(blocks[:4], 0)).wait()
    ticket = kv.demand(kv.pages(blocks[4:6], 0), timeout_s=60)
    ticket.release()
    held.release()
    with kv.demand(kv.pages(blocks[4:8], 0)) as others:
        assert not others.missing.any()
    assert ticket.missing.all()


def test_hints_are_followed_by_timely_demands(open_kv: Open) -> None:
    kv = open_kv(replace(PLAIN, predictor="attention", evict="cycle"))
    blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
    kv.hint(ChainHint(1, blocks))
    kv.hint(PageHint(kv.pages(blocks[:4], 1), np.ones(4, np.float32)))
    kv.tend(0.0)
    while kv.stats().prefetch["issued"] == 0:
        kv.tend(0.0)
    with kv.demand(kv.pages(blocks[:4], 1)) as ticket:
        assert (ticket.outcomes != Outcome.RETAINED).all()
        assert not ticket.missing.any()
    kv.hint(DoneHint(1, "end_turn", blocks=blocks))
    assert kv.stats().hints_dropped == 0


def test_tickets_and_puts_can_be_awaited(open_kv: Open) -> None:
    pages = content(BLOCKS)

    async def main() -> None:
        async with open_kv() as kv:
            put = await kv.put(keys(BLOCKS), pages)
            tickets = [kv.demand(kv.pages(put.blocks, layer)) for layer in range(LAYERS)]
            for layer, ticket in enumerate(tickets):
                with await ticket as answered:
                    assert np.array_equal(np.stack(answered.views()), pages[:, layer])

    asyncio.run(main())


def test_use_after_close_is_refused_in_words(kv: Kv) -> None:
    blocks = kv.put(keys(2), content(2)).blocks
    ticket = kv.demand(kv.pages(blocks, 0)).wait()
    kv.close()
    kv.close()
    for use in (
        lambda: kv.demand(kv.pages(blocks, 1)),
        lambda: kv.put(keys(1, 4), content(1)),
        lambda: kv.hint(DoneHint(1)),
        lambda: kv.find(keys(1)),
        lambda: kv.tend(0),
        ticket.release,
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            use()
