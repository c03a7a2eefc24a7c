"""Puts at the same time: each gets what it would get alone if the store has room for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd.engine import Engine
from prefetchd.filling import Shift
from prefetchd.tickets import PutTicket
from prefetchd.turns import Turns
from prefetchd.writer import Writer
from tests.runtime_bench import BLOCKS, PLAIN, content, keys, open_plain, read_all


def at_once(tasks: list[Callable[[], None]]) -> None:
    barrier = threading.Barrier(len(tasks))

    def begin(task: Callable[[], None]) -> None:
        barrier.wait()
        task()

    threads = [threading.Thread(target=begin, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("scarce", ["buffer", "extent"])
def test_nobody_takes_what_a_put_has_waited_for(
    scarce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(PLAIN, write_buffers=1 if scarce == "buffer" else 4)
    pages = content(BLOCKS + 2)
    stolen: list[PutTicket] = []
    plain = Engine.wait
    with open_plain(None, options) as runtime:
        runtime.put(keys(BLOCKS, 50), pages[:BLOCKS]).wait()
        driver = runtime._parts.driver

        def wait(engine: Engine, *args: Any) -> bool:
            done = plain(engine, *args)
            free = not driver.writer.full if scarce == "buffer" else driver.catalog.has_room
            if free and not stolen:
                monkeypatch.setattr(Engine, "wait", plain)
                stolen.append(runtime.put(keys(1, 90), pages[-1:]))
                monkeypatch.setattr(Engine, "wait", wait)
            return done

        monkeypatch.setattr(Engine, "wait", wait)
        put = runtime.put(keys(1), pages[-2:-1])
        monkeypatch.setattr(Engine, "wait", plain)
        assert put.failures == []
        assert np.array_equal(read_all(runtime, put.blocks), pages[-2:-1])
        assert all(ticket.failures == [] for ticket in stolen)


@pytest.mark.parametrize("durability", ["durable", "fast"])
@pytest.mark.parametrize("size", [1, 3, 5, BLOCKS])
def test_all_of_every_put_that_fits_is_stored(size: int, durability: str) -> None:
    pages = content(size)
    failures: list[str] = []
    with open_plain(None, replace(PLAIN, write_buffers=2)) as runtime:

        def put(number: int) -> None:
            for turn in range(6):
                names = keys(size, (number * 6 + turn) * size)
                ticket = runtime.put(names, pages, durability=durability).wait()
                failures.extend(ticket.failures)

        at_once([lambda number=number: put(number) for number in range(4)])  # type: ignore[misc]
        assert failures == []
        assert runtime.stats().store_writes.blocks_admitted == 24 * size
        assert runtime._putting == {}


def test_where_readers_leave_no_room_for_two_puts_one_is_whole_and_both_are_prefixes() -> None:
    pages = content(BLOCKS)
    with open_plain(None) as runtime:
        blocks = runtime.put(keys(5, 900), pages[:5]).blocks
        with runtime.demand(runtime.pages(blocks, 0)):
            for turn in range(8):
                tickets: list[PutTicket] = []

                def put(first: int, tickets: list[PutTicket] = tickets) -> None:
                    tickets.append(runtime.put(keys(3, first), pages[:3]).wait())

                at_once([lambda at=at: put(at) for at in (turn * 6, turn * 6 + 3)])  # type: ignore[misc]
                stored = [(ticket.blocks >= 0).tolist() for ticket in tickets]
                assert [True] * 3 in stored
                assert all(one == sorted(one, reverse=True) for one in stored)


def test_of_puts_that_wait_for_one_another_the_youngest_that_holds_something_gives_way() -> None:
    with open_plain(None) as runtime:
        putting = {number: PutTicket(runtime.engine, 3) for number in (1, 2, 3)}
        turns = Turns(putting, runtime._parts.catalog, evicts=True)
        assert [turns.may_begin(number) for number in putting] == [True, True, False]
        assert not turns.waits(1), "nobody else holds anything"
        putting[1].settle(0, 0)
        putting[2].settle(0, 1)
        assert turns.waits(2), "the other may go on"
        assert turns.waits(1)
        assert turns.waits(3), "it holds nothing that the others could have"
        assert not turns.waits(2)
        turns.goes_on(1)
        assert turns.waits(2)
        del putting[1]
        assert turns.may_begin(3)


def test_a_block_that_was_not_filled_since_another_failed_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page_bytes = 1 << 17  # large enough for helpers
    pages = content(3, page_bytes)
    plain_fill, plain_do = Writer.fill, Shift.do

    class Interrupted(BaseException):
        pass

    def fill(writer: Writer, job: Any, rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
        if (rows == pages[0]).all():
            raise Interrupted
        return plain_fill(writer, job, rows)

    def do(shift: Shift, task: Callable[[], None], *, last: bool) -> None:
        for future in shift._given:
            future.exception()  # it has failed by now
        plain_do(shift, task, last=last)

    with open_plain(None, replace(PLAIN, put_threads=2), page_bytes) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "fill", fill)
            patch.setattr(Shift, "do", do)
            with pytest.raises(Interrupted):
                runtime.put(keys(3), pages)
        writer = runtime._parts.driver.writer
        assert runtime._putting == {}
        assert set(writer._writing) == {None}
        assert writer.idle
        again = runtime.put(keys(3), pages)
        assert again.failures == []
        assert np.array_equal(read_all(runtime, again.blocks), pages)
