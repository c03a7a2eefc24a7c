"""Large puts are copied by several threads, and what cannot be copied is not stored."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import prefetchd
from prefetchd import filling
from prefetchd.filling import fill
from prefetchd.format import page_checksum
from prefetchd.writer import Writer
from tests.runtime_bench import PLAIN, content, keys, layout, open_plain, read_all

PAGE_BYTES = 1 << 17  # of three layers: large enough for helpers


@pytest.mark.parametrize("portion_bytes", [1, 5000, 1 << 20])
def test_pages_are_copied_padded_and_hashed_whatever_the_portions(
    portion_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "_PORTION_BYTES", portion_bytes)
    pages = content(1, 2000)[0]
    payload = np.full((3, 4096), 7, np.uint8)
    checksums = fill(payload, pages, 11)
    assert (payload[:, :2000] == pages).all()
    assert (payload[:, 2000:] == 0).all()
    assert checksums.tolist() == [page_checksum(pages[n], 11, n) for n in range(3)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_several_threads_store_what_one_stores(threads: int) -> None:
    options = replace(PLAIN, staging_bytes=1 << 22, put_threads=threads, write_buffers=3)
    pages = content(12, PAGE_BYTES)
    with prefetchd.open(None, layout(PAGE_BYTES), blocks=12, options=options) as runtime:
        blocks = runtime.put([*keys(12), *keys(2)], np.concatenate([pages, pages[:2]])).blocks
        assert blocks[:12].tolist() == list(range(12)), "as they came, not as they were copied"
        assert blocks[12:].tolist() == blocks[:2].tolist()
        assert np.array_equal(read_all(runtime, blocks[:12]), pages)


class Interrupted(BaseException):
    """As a keyboard interrupt would be."""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_copy_that_fails_leaves_nothing_behind(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = content(3, PAGE_BYTES)
    plain = Writer.fill
    helped: list[bool] = []

    def failing(writer: Writer, job: Any, rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
        helped.append(threading.current_thread() is not threading.main_thread())
        if (rows == pages[0]).all():
            raise Interrupted
        return plain(writer, job, rows)

    with open_plain(None, replace(PLAIN, put_threads=threads), PAGE_BYTES) as runtime:
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "fill", failing)
            with pytest.raises(Interrupted):
                runtime.put(keys(3), pages)
        assert helped[0] == (threads == 2)
        assert len(runtime.lookup(keys(1))) == 0
        runtime.engine.wait(lambda: runtime._parts.driver.writer.in_flight == 0)
        assert runtime._puts._open == {}
        again = runtime.put(keys(3), pages)
        assert again.failures == []
        assert np.array_equal(read_all(runtime, again.blocks), pages)


def test_an_interrupt_while_a_put_waits_for_room_settles_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_plain(None, PLAIN) as runtime:
        reserved = runtime._puts._reserved
        asked = iter(range(10))

        def interrupted(*arguments: Any) -> Any:
            if next(asked) == 1:
                raise KeyboardInterrupt
            return reserved(*arguments)

        monkeypatch.setattr(runtime._puts, "_reserved", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.put(keys(3), content(3))
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        assert runtime._puts._open == {}
        assert len(runtime.lookup(keys(3))) == 1
