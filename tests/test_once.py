"""A demand that is read once leaves staging as it found it, and nobody learns from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prefetchd import Outcome
from prefetchd.model import Access, Idle
from prefetchd.predictor import Predictor
from tests.runtime_bench import BLOCKS, LAYERS, PLAIN, content, keys, open_plain, pinned

SHOWN: list[int] = []


class Watching(Predictor):
    name = "watching"

    def on_access(self, access: Access) -> None:
        SHOWN.append(len(access.pages))


def test_what_was_read_leaves_and_what_was_here_stays() -> None:
    SHOWN.clear()
    options = replace(PLAIN, predictor=Watching, staging_bytes=9 * 12_288)
    with open_plain(options=options) as runtime:
        blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).blocks
        kept = runtime.pages(blocks[:4], 0)
        with runtime.demand(kept):
            pass
        everything = runtime.pages(blocks, 0)
        for _ in range(3):
            with runtime.demand(everything, once=True) as ticket:
                misses = ticket.outcomes == Outcome.MISS
                assert misses.tolist() == [False] * 4 + [True] * 4
                bytes_read = [view.copy() for view in ticket.views()]
            assert np.array_equal(bytes_read, content(BLOCKS)[:, 0])
            assert pinned(runtime) == 0
        while runtime.engine.core.foresight.learning_due:
            runtime.engine.handle(Idle())
        assert SHOWN == [4]
        assert runtime.stats().outcomes["miss"] == 4 + 3 * 4
        runtime.engine.core.staging.check()


def test_slots_are_taken_again_in_order_so_that_neighbours_stay_neighbours() -> None:
    with open_plain(options=replace(PLAIN, staging_bytes=14 * 12_288)) as runtime:
        blocks = runtime.put(keys(BLOCKS), content(BLOCKS)).blocks[:4]
        pages = (blocks[:, None] * LAYERS + np.arange(LAYERS)).reshape(-1)
        for _ in range(3):
            with runtime.demand(pages, once=True) as ticket:
                assert (np.diff(ticket.slots.reshape(4, LAYERS), axis=1) == 1).all()
            assert pinned(runtime) == 0


def test_what_another_reads_meanwhile_stays_until_it_is_done() -> None:
    with open_plain() as runtime:
        blocks = runtime.put(keys(2), content(2)).blocks
        pages = runtime.pages(blocks, 1)
        first = runtime.demand(pages, once=True).wait()
        second = runtime.demand(pages).wait()
        first.release()
        pinned(runtime)
        assert [view.tobytes() for view in second.views()] == [
            page.tobytes() for page in content(2)[:, 1]
        ]
        second.release()
        with runtime.demand(pages) as third:
            assert third.outcomes.tolist() == [Outcome.RETAINED] * 2
