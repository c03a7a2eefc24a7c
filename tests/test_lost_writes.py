"""Writes that the device never ends: their puts fail in time, their buffers stay out of use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefetchd import transfers
from prefetchd.pipeline import FlushLimits
from tests.runtime_bench import PLAIN, FaultyRuntime, content, keys, read_all
from tests.tier_bench import SECOND_NS, Tier, new_image

SOON = replace(PLAIN, put_timeout_s=0.0, demand_timeout_s=60.0)


def test_a_put_whose_write_is_lost_fails_and_its_buffer_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "_CLOSE_TIMEOUT_NS", 1_000_000)
    with FaultyRuntime([(0, "lose")], replace(SOON, write_buffers=2)) as runtime:
        put = runtime.put(keys(1), content(1)).wait()
        assert put.failures == ["block 0 was not stored: ETIMEDOUT (Connection timed out)"]
        writer = runtime._parts.driver.writer
        assert (writer.in_flight, writer.given_up, runtime.stats().writes_given_up) == (0, 1, 1)
        assert runtime.lookup(keys(1)).tolist() == []
        buffer = writer._buffers[0].copy()
        pages = content(3, seed=2)
        runtime._puts._write_timeout_ns = 10**12
        blocks = runtime.put(keys(3, 5), pages).blocks
        assert np.array_equal(read_all(runtime, blocks), pages)
        assert np.array_equal(writer._buffers[0], buffer), "the device may still read it"


def test_when_every_buffer_is_lost_a_put_fails_at_once_and_a_late_end_mends_it() -> None:
    pages = content(2)
    with FaultyRuntime([(0, "stall")], replace(SOON, write_buffers=1)) as runtime:
        assert runtime.put(keys(1), pages[:1]).wait().blocks.tolist() == [-1]
        put = runtime.put(keys(1, 1), pages[1:])
        assert put.done, "not after the minute that it waits for a buffer that is only busy"
        assert "held by writes that the device never ended" in put.failures[0]
        device: Any = runtime._parts.device
        device.release_stalled()
        writer = runtime._parts.driver.writer
        runtime._puts._write_timeout_ns = 10**12
        runtime.engine.wait(lambda: writer.given_up == 0)
        blocks = runtime.lookup(keys(1))
        assert np.array_equal(read_all(runtime, blocks), pages[:1]), "it is there after all"
        assert runtime.put(keys(1, 1), pages[1:]).blocks.min() >= 0


def test_a_block_written_before_a_flush_for_others_is_flushed_with_its_own() -> None:
    tier = Tier(new_image(1), limits=FlushLimits(3, SECOND_NS))
    first = tier.put(0, durable=True)
    tier.reap()  # its payload is written, and a flush is on its way
    assert tier.put(1, durable=False) is not None  # written before the next flush
    told = [end.put for _ in range(4) for end in tier.reap()]
    assert first in told
    assert tier.commit.at_risk == 1
    tier.alone.now_ns += 2 * SECOND_NS
    tier.go()
    for _ in range(8):
        tier.reap()
    assert tier.commit.at_risk == 0, "it waits for ever"
    assert tier.writer.idle


def test_a_block_that_cannot_be_made_to_last_is_not_found_as_one_that_lasts() -> None:
    pages = content(2)
    with FaultyRuntime(options=replace(PLAIN, put_timeout_s=0.2)) as runtime:
        put = runtime.put(keys(1), pages[:1], durability="fast").wait()
        assert put.failures == []
        device: Any = runtime._parts.device
        device.broken = {0}
        again = runtime.put(keys(1), pages[:1], durability="durable").wait()
        assert len(again.failures) == 1
        device.broken = set()
        again = runtime.put(keys(1), pages[:1], durability="durable").wait()
        assert again.failures == []
        assert np.array_equal(read_all(runtime, again.blocks), pages[:1])
