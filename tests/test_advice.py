"""Load or recompute: the least time of all choices, from what was measured and nothing else."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import prefetchd
from prefetchd.advice import Prefill, advise
from prefetchd.read_meter import NOTHING_MEASURED, ReadMeter, ReadRate
from tests.runtime_bench import BLOCKS, LAYERS, content, keys, open_plain
from tests.sidecar_bench import daemon

SECOND = 1_000_000_000
NONE = np.zeros(0, np.int64)


def slowly(
    count: int, absent: list[int], moving: list[bool], ahead: int, rate: ReadRate, prefill: Prefill
) -> float:
    """Of loading the first `count` blocks and computing the rest, ns, one token after another."""
    load_ns = 0.0
    if any(absent[:count]) or any(moving[:count]):
        load_ns = rate.base_ns + rate.page_ns * (ahead + sum(absent[:count]))
    seconds = 0.0
    for token in range(count * prefill.block_tokens, len(absent) * prefill.block_tokens):
        seconds += 1 / prefill.tokens_s
        if prefill.pairs_s is not None:
            seconds += token / prefill.pairs_s
    return load_ns + seconds * 1e9


RATES = st.builds(
    ReadRate,
    st.sampled_from([0.0, 1e5, 1e9]),
    st.floats(0, 1e9, allow_subnormal=False),
    st.just(1 << 40),
)
PREFILLS = st.builds(
    Prefill,
    st.floats(1, 1e6),
    st.integers(1, 4),
    st.one_of(st.none(), st.floats(1, 1e9)),
)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 50),
    RATES,
    PREFILLS,
)
@example([(0, True)], 5, ReadRate(1.0, 1e9, 1 << 40), Prefill(1e6))
def test_no_other_number_of_blocks_is_faster(
    blocks: list[tuple[int, bool]], ahead: int, rate: ReadRate, prefill: Prefill
) -> None:
    absent, moving = [one[0] for one in blocks], [one[1] for one in blocks]
    found = advise(np.array(absent), np.array(moving), ahead, rate, prefill)
    times = [slowly(n, absent, moving, ahead, rate, prefill) for n in range(len(blocks) + 1)]
    assert times[found.blocks] <= min(times) * (1 + 1e-9) + 1
    words = {0: "recompute", len(blocks): "load"}.get(found.blocks, "load the first n")
    assert found.choice == words
    assert found.chosen_ns == pytest.approx(times[found.blocks], rel=1e-9, abs=2)
    assert found.recompute_ns == pytest.approx(times[0], rel=1e-9, abs=2)
    no_compute = Prefill(1e300, prefill.block_tokens)
    all_of_it = slowly(len(blocks), absent, moving, ahead, rate, no_compute)
    assert found.load_ns == pytest.approx(all_of_it, rel=1e-9, abs=2)


def test_what_is_staged_is_loaded_and_the_rest_computed_if_the_device_is_slow() -> None:
    absent, still = np.array([0, 0, 2, 2]), np.zeros(4, np.bool_)
    found = advise(absent, still, 0, ReadRate(0, 1e9, 100), Prefill(1000))
    assert (found.blocks, found.choice) == (2, "load the first n")
    assert (found.load_ns, found.recompute_ns, found.chosen_ns) == (
        4 * SECOND,
        64_000_000,
        32_000_000,
    )
    behind = advise(absent, ~still, 1000, ReadRate(0, 1e6, 10_000), Prefill(1000))
    assert behind.choice == "recompute", "all of it waits behind a thousand reads"


def test_what_was_not_measured_is_not_estimated() -> None:
    absent, still = np.full(4, 2), np.zeros(4, np.bool_)
    blind = advise(absent, still, 0, NOTHING_MEASURED, Prefill(1000))
    assert (blind.choice, blind.load_ns, blind.chosen_ns) == ("load", None, None)
    little = advise(absent, still, 0, ReadRate(1e5, 1e3, 7), Prefill(1000))
    assert (little.choice, little.load_ns, little.chosen_ns) == ("load", None, None)
    assert "far more than were measured" in little.words
    staged = advise(np.zeros(4, np.int64), still, 0, NOTHING_MEASURED, Prefill(1000))
    assert (staged.choice, staged.load_ns) == ("load", 0)
    nothing = advise(NONE, NONE.astype(bool), 9, NOTHING_MEASURED, Prefill(1000))
    assert (nothing.choice, nothing.found) == ("recompute", 0)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_make_no_sense_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Prefill(wrong)
    with pytest.raises(ValueError, match="above 0"):
        Prefill(1, pairs_s=wrong)
    with pytest.raises(ValueError, match="block_tokens"):
        Prefill(1, block_tokens=0)


# --- measuring ---


def period(meter: ReadMeter, begin_ns: int, pages: int, ns: int, *, awaited: bool = True) -> None:
    meter.begin(begin_ns)
    meter.moved(pages // 2, begin_ns + ns // 2, idle=False, awaited=awaited)
    meter.moved(pages - pages // 2, begin_ns + ns, idle=True, awaited=awaited)


def test_base_and_service_are_told_apart_and_idle_time_does_not_count() -> None:
    meter = ReadMeter()
    now = 0
    for pages in (1, 8, 2, 64, 8, 1, 32):
        period(meter, now, pages, 100_000 + 5_000 * pages)
        now += SECOND
    rate = meter.rate(now)
    assert rate.base_ns == pytest.approx(100_000)
    assert rate.page_ns == pytest.approx(5_000)
    assert 64 < rate.pages_max <= 4 * 64
    assert meter.rate(now + 61 * SECOND) == NOTHING_MEASURED


def test_periods_of_one_size_give_a_rate_and_no_base() -> None:
    meter = ReadMeter()
    for now in range(0, 5 * SECOND, SECOND):
        period(meter, now, 10, 1_000_000)
    rate = meter.rate(5 * SECOND)
    assert (rate.base_ns, rate.pages_max) == (0, 40)
    assert rate.page_ns == pytest.approx(100_000)


def test_a_device_that_gets_slower_is_followed_and_what_nobody_awaits_is_no_sample() -> None:
    meter = ReadMeter()
    rates = []
    for step in range(60):
        now = step * SECOND
        period(meter, now, 10, 1_000_000 if step < 20 else 4_000_000)
        period(meter, now + SECOND // 2, 10, SECOND // 4, awaited=False)
        rates.append(meter.rate(now).page_ns)
    assert rates[19] == pytest.approx(100_000)
    assert rates[59] == pytest.approx(400_000, rel=0.2)
    assert all(before <= after + 1e-6 for before, after in pairwise(rates))


def test_a_device_that_is_never_idle_is_measured_too() -> None:
    meter = ReadMeter()
    assert meter.rate(0) == NOTHING_MEASURED
    meter.begin(0)
    for step in range(1, 31):
        meter.moved(100, step * 10_000_000, idle=False, awaited=True)
    rate = meter.rate(300_000_000)
    assert rate.page_ns == pytest.approx(100_000)
    meter.drop()
    meter.moved(1, 99 * SECOND, idle=True, awaited=True)
    assert meter.rate(300_000_000) == rate, "what was given up is no sample"


# --- asked of a runtime, and of a daemon ---


def test_a_runtime_measures_and_advises(tmp_path: Path) -> None:
    with open_plain() as kv:
        blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
        blind = kv.advise(blocks, prefill_tokens_s=1e9)
        assert (blind.choice, blind.load_ns, blind.found) == ("load", None, BLOCKS)
        for layer in range(LAYERS):
            kv.demand(kv.pages(blocks[:4], layer)).wait().release()
        told = kv.advise(blocks, prefill_tokens_s=1e-6)
        assert told.choice == "load"
        assert told.load_ns is not None
        assert told.load_ns > 0
        assert kv.advise(blocks[:4], prefill_tokens_s=1e9).load_ns == 0
        quick = kv.advise(blocks, prefill_tokens_s=1e15)
        assert (quick.choice, quick.blocks) == ("load the first n", 4)
        gone = np.concatenate([blocks[:2], [999]])
        with pytest.raises(ValueError, match="indices below"):
            kv.advise(gone, prefill_tokens_s=1)
        assert kv.advise(NONE, prefill_tokens_s=1).choice == "recompute"


def test_a_block_that_has_gone_ends_the_prefix() -> None:
    with open_plain() as kv:
        blocks = kv.put(keys(3), content(3)).blocks
        free = np.setdiff1d(np.arange(BLOCKS), blocks)[:1]
        prefix = np.concatenate([blocks[:2], free, blocks[2:]])
        assert kv.advise(prefix, prefill_tokens_s=1).found == 2


def test_clients_are_told_the_same_and_to_recompute_while_the_daemon_is_away(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path) as served:
        kv = prefetchd.connect(served.address, namespace="default")
        blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
        assert kv.advise(blocks, prefill_tokens_s=1e9).load_ns is None
        for layer in range(LAYERS):
            kv.demand(kv.pages(blocks[:4], layer)).wait().release()
        mine = kv.advise(blocks, prefill_tokens_s=1e-6, block_tokens=4, pairs_s=2.0)
        theirs = served.runtime().advise(blocks, prefill_tokens_s=1e-6, block_tokens=4, pairs_s=2.0)
        assert mine == theirs
        with pytest.raises(ValueError, match="indices below"):
            kv.advise(np.array([999]), prefill_tokens_s=1)

        async def ask() -> prefetchd.Advice:
            async with await prefetchd.aconnect(served.address, namespace="default") as other:
                return await other.advise(
                    blocks, prefill_tokens_s=1e-6, block_tokens=4, pairs_s=2.0
                )

        assert asyncio.run(ask()) == theirs
    assert kv.demand(kv.pages(blocks, 0)).wait().missing.all()
    away = kv.advise(blocks, prefill_tokens_s=1000)
    assert (away.choice, away.recompute_ns) == ("recompute", BLOCKS * 16_000_000)
    assert kv.away, "whatever the reason is by now"
    assert away.words.startswith("recompute: ")
    kv.close()
