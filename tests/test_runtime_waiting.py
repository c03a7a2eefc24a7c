"""Who waits for a runtime, and how it ends: threads, coroutines, deadlines, closing.

A thread that does not come back is what these tests are about: each is given far more time than
it needs, and no test depends on how little it takes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import EngineError, Runtime, Ticket, foreground
from prefetchd.model import Demanded, Ids
from prefetchd.predictor import Guess, Predictor
from tests.runtime_bench import (
    BLOCKS,
    HASTY,
    LAYERS,
    PAGE_BYTES,
    PLAIN,
    FaultyRuntime,
    content,
    harm_next,
    keys,
    open_plain,
    pinned,
    read_all,
)

_PATIENCE_S = 30


class Aside(threading.Thread):
    """Runs `work` in a thread; `ended` fails when it does not come back."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        self.join(_PATIENCE_S)
        assert not self.is_alive(), "it waits for ever"
        if self.error:
            raise self.error
        return self.result


def crowded(runtime: Runtime) -> tuple[Ticket, Ids]:
    """A ticket that pins all four slots, and the ids of pages for which there is no room."""
    blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).blocks
    held = runtime.demand(runtime.pages(blocks[:4], 0)).wait()
    return held, runtime.pages(blocks[4:6], 0)


def open_crowded(**options: Any) -> Runtime:
    return open_plain(None, replace(PLAIN, staging_bytes=4 * PAGE_BYTES, **options))


def test_put_and_demand_from_asyncio_are_carried_on_by_the_pump(tmp_path: Path) -> None:
    pages = content(BLOCKS)

    async def main() -> None:
        async with open_plain(tmp_path / "kv", replace(PLAIN, device="threads")) as runtime:
            put = await runtime.put(keys(BLOCKS), pages)
            tickets = [runtime.demand(runtime.pages(put.blocks, layer)) for layer in range(LAYERS)]
            for layer, ticket in enumerate(await asyncio.gather(*map(answer, tickets))):
                assert np.array_equal(np.stack(ticket.views()), pages[:, layer])
                ticket.release()

    async def answer(ticket: Ticket) -> Ticket:
        return await ticket

    asyncio.run(main())


def test_a_coroutine_that_gave_up_does_no_harm() -> None:
    pages = content(1)
    with FaultyRuntime(options=PLAIN) as runtime:
        runtime.put(keys(1), pages).wait()
        harm_next(runtime, (0, "stall"))

        async def main() -> Ticket:
            ticket = runtime.demand(np.array([0]))
            waiting = asyncio.ensure_future(wait_for(ticket))
            await asyncio.sleep(0)
            waiting.cancel()
            return ticket

        async def wait_for(ticket: Ticket) -> None:
            await ticket

        ticket = asyncio.run(main())
        runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
        assert np.array_equal(ticket.wait().view(0), pages[0, 0]), "after its loop has ended"


def test_two_threads_that_demand_at_once_get_their_own_pages(tmp_path: Path) -> None:
    pages = content(BLOCKS)
    options = replace(PLAIN, device="uring", staging_bytes=12 * PAGE_BYTES, evict="cycle")
    with open_plain(tmp_path / "kv", options) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks

        def decode(seed: int) -> int:
            random = np.random.default_rng(seed)
            for step in range(100):
                chosen, layer = random.choice(BLOCKS, 4, replace=False), step % LAYERS
                with runtime.demand(runtime.pages(blocks[chosen], layer), request=seed) as ticket:
                    assert np.array_equal(np.stack(ticket.views()), pages[chosen, layer])
            return seed

        workers = [Aside(lambda seed=seed: decode(seed)) for seed in (1, 2, 3)]  # type: ignore[misc]
        assert [worker.ended() for worker in workers] == [1, 2, 3]
        assert sum(runtime.stats().outcomes.values()) == 3 * 100 * 4


def test_a_waiter_hears_of_what_another_thread_has_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreground, "_NAP_NS", 3600 * 10**9)
    with FaultyRuntime(options=PLAIN) as runtime:
        runtime.put(keys(1), content(1)).wait()
        harm_next(runtime, (0, "stall"))
        ticket = runtime.demand(np.array([0]))
        waiter = Aside(ticket.wait)
        runtime.engine.wait(lambda: runtime.engine.foreground.count == 2)
        with runtime.engine.lock:
            runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
            runtime.engine.collect()
        waiter.ended()


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_a_demand_without_room_ends_at_its_deadline(timeout_s: float) -> None:
    with open_crowded() as runtime:
        held, others = crowded(runtime)
        with runtime.demand(others, timeout_s=timeout_s) as ticket:
            assert ticket.missing.all()
        ticket = runtime.demand(others[:1], timeout_s=timeout_s)
        with pytest.raises(prefetchd.PageMissing, match="1 of 1 pages"):
            ticket.views()
        assert (held.slots >= 0).all()
        assert runtime.stats().expired == 3


def test_an_awaited_demand_without_room_ends_at_its_deadline() -> None:
    async def main(runtime: Runtime, pages: Ids) -> Ticket:
        return await runtime.demand(pages, timeout_s=0.01)

    with open_crowded() as runtime:
        _, others = crowded(runtime)
        ticket = Aside(lambda: asyncio.run(main(runtime, others))).ended()
        assert ticket.missing.all()


def test_a_waiter_gets_room_when_another_thread_releases() -> None:
    with open_crowded() as runtime:
        held, others = crowded(runtime)
        waiter = Aside(runtime.demand(others, timeout_s=60).wait)
        held.release()
        assert not waiter.ended().missing.any()


def test_a_ticket_given_back_unanswered_lets_its_waiter_go() -> None:
    with open_crowded() as runtime:
        held, others = crowded(runtime)
        ticket = runtime.demand(others, timeout_s=3600)
        waiter = Aside(ticket.wait)
        ticket.release()
        assert waiter.ended().missing.all()
        held.release()
        assert pinned(runtime) == 0
        assert not runtime._tickets


def test_closing_ends_every_wait_in_words() -> None:
    runtime = open_crowded()
    _, others = crowded(runtime)
    ticket = runtime.demand(others, timeout_s=3600)
    thread = Aside(ticket.wait)
    runtime.engine.wait(lambda: runtime.engine.foreground.count == 2)

    async def main() -> None:
        waiting = asyncio.ensure_future(wait_for(ticket))
        await asyncio.sleep(0)
        await asyncio.to_thread(runtime.close)
        with pytest.raises(EngineError, match="closed"):
            await waiting

    async def wait_for(ticket: Ticket) -> None:
        await ticket

    Aside(lambda: asyncio.run(main())).ended()
    with pytest.raises(EngineError, match="closed"):
        thread.ended()
    with pytest.raises(EngineError, match="closed"):
        ticket.wait()


class Raises(Predictor):
    name = "raises"
    armed = False  # by the test, once its put is done: the pump may ask for a guess before that

    def predict(self, now_ns: int, limit: int) -> Guess:
        if self.armed:
            raise RuntimeError("a mistake in a predictor")
        return super().predict(now_ns, limit)


def test_a_predictor_that_raises_stops_the_engine_in_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_crowded(predictor=Raises) as runtime:
        blocks = runtime.put(keys(1), content(1)).blocks
        monkeypatch.setattr(Raises, "armed", True)
        with suppress(EngineError):  # raised here if the pump was there already
            runtime.demand(runtime.pages(blocks, 0))
        runtime.engine.wake()
        runtime.engine._pump.join(_PATIENCE_S)
        with pytest.raises(EngineError, match="a mistake in a predictor"):
            runtime.demand(runtime.pages(blocks, 0))
    assert "the pump thread has stopped" in caplog.text


def test_a_key_is_not_there_until_its_block_is_written() -> None:
    pages = content(1)
    with FaultyRuntime([(2, "stall")], PLAIN) as runtime:  # the header: payload, flush, header
        put = runtime.put(keys(1), pages)
        device: Any = runtime._parts.device
        runtime.engine.wait(lambda: device.injected["stall"] == 1)
        assert runtime.lookup(keys(1)).tolist() == []
        assert not put.done
        with runtime.demand(np.array([0])) as ticket:
            assert ticket.missing.all()
        device.release_stalled()
        assert put.blocks.tolist() == [0] == runtime.lookup(keys(1)).tolist()


def test_a_put_that_finds_no_buffer_is_given_up_in_words() -> None:
    with FaultyRuntime([(0, "stall")], replace(HASTY, write_buffers=1)) as runtime:
        put = runtime.put(keys(2), content(2))
        assert put.failures == [
            "block 1 was not stored: all write buffers are busy; the device ends no write"
        ]
        with pytest.raises(TimeoutError, match="1 blocks of a put"):
            put.wait(0.0)
        runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
        assert put.blocks.tolist() == [0, -1]


def test_closing_finishes_what_is_being_written(tmp_path: Path) -> None:
    pages = content(BLOCKS)
    with open_plain(tmp_path / "kv", replace(PLAIN, device="threads")) as runtime:
        runtime.put(keys(BLOCKS), pages)
    with open_plain(tmp_path / "kv", replace(PLAIN, device="threads")) as runtime:
        assert np.array_equal(read_all(runtime, runtime.lookup(keys(BLOCKS))), pages)


@pytest.mark.parametrize("device", ["uring", "threads"])
def test_closing_lets_go_of_every_descriptor_and_thread(device: str, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with open_plain(tmp_path / "kv", replace(PLAIN, device=device)):
        pass
    before = held()
    for _ in range(3):
        with open_plain(tmp_path / "kv", replace(PLAIN, device=device)) as runtime:
            runtime.put(keys(1), content(1)).wait()
        del runtime
    assert held() == before


def test_what_a_release_set_going_goes_on_when_the_next_event_is_refused() -> None:
    pages = content(3)
    options = replace(PLAIN, staging_bytes=PAGE_BYTES)  # one slot
    with open_plain(None, options) as runtime:
        blocks = runtime.put(keys(3), pages).blocks
        first = runtime.demand(runtime.pages(blocks[:1], 0)).wait()
        second = runtime.demand(runtime.pages(blocks[1:2], 0))
        engine = runtime.engine
        with engine.lock:
            engine._released.append(first.number)  # not acted on yet
            with pytest.raises(ValueError, match="already open"):
                engine.handle(Demanded(second.number, np.array([8]), 10**18))
        assert np.array_equal(second.wait().view(0), pages[1, 0])
        second.release()
        first._released = True
