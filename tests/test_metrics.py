"""The arithmetic of a result, and its JSON."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetchd import metrics
from prefetchd.metrics import Outcomes, ResultError
from tests.invented_replay import invented_result, invented_run

TIMES = st.lists(st.floats(0, 1e7, width=32), max_size=400)


@pytest.mark.parametrize(("p", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1_000), (0.999, 10_000)])
def test_a_percentile_needs_ten_samples_beyond_it(p: float, needed: int) -> None:
    samples = np.arange(needed)
    assert metrics.percentile(samples[1:], p) is None
    value = metrics.percentile(samples, p)
    assert value == round(p * needed) - 1  # nearest rank: a sample that occurred
    assert (samples > value).sum() == needed - round(p * needed)


def test_distribution_states_what_it_can() -> None:
    few = metrics.distribution([5.0] * 999)
    assert (few.p50, few.p99, few.p999, few.max, few.n) == (5.0, None, None, 5.0, 999)
    assert metrics.distribution([]) == metrics.Distribution()


@given(TIMES)
def test_ccdf_is_the_share_at_least_as_long(samples: list[float]) -> None:
    curve = metrics.ccdf(samples, points=10_000)
    assert curve.us == sorted({time for time in samples if time > 0})
    for time, share in zip(curve.us, curve.share, strict=True):
        assert share == pytest.approx(sum(other >= time for other in samples) / len(samples))


@given(TIMES, st.integers(2, 60))
def test_a_thinned_ccdf_keeps_both_ends_and_true_points(samples: list[float], points: int) -> None:
    whole, thin = metrics.ccdf(samples, points=10_000), metrics.ccdf(samples, points=points)
    assert len(thin.us) <= points
    true = dict(zip(whole.us, whole.share, strict=True))
    assert all(true[time] == share for time, share in zip(thin.us, thin.share, strict=True))
    if whole.us:
        assert (thin.us[0], thin.us[-1]) == (whole.us[0], whole.us[-1])


def test_a_thinned_ccdf_keeps_the_slowest() -> None:
    samples = np.random.default_rng(3).exponential(100, 50_000)
    assert metrics.ccdf(samples).us[-20:] == np.sort(samples)[-20:].tolist()


def test_ratios_survive_zero_and_unknown() -> None:
    assert metrics.ratio(1, 0) is None
    assert metrics.ratio(None, 2) is None
    assert metrics.ratio(1e308, 1e-308) is None
    assert metrics.ratio(0, 4) == 0
    assert set(metrics.rates(Outcomes()).values()) == {None}
    assert metrics.extra_share(11, 10, 14) == 0.25
    assert metrics.extra_share(11, 10, 10) is None
    unused = metrics.prefetch_figures(
        Outcomes(retained=5),
        issued=0,
        useful=0,
        late=0,
        wasted=0,
        pollution=0,
        page_bytes=4096,
        pages_read=0,
    )
    assert (unused.accuracy, unused.coverage, unused.reads_per_needed) == (None, None, 0)


def test_what_was_on_its_way_for_another_demand_is_not_covered() -> None:
    figures = metrics.prefetch_figures(
        Outcomes(timely=2, late=3, miss=3),
        issued=9,
        useful=4,
        late=2,
        wasted=0,
        pollution=0,
        page_bytes=4096,
        pages_read=16,
    )
    assert figures.coverage == 4 / 8


@given(st.tuples(*[st.integers(0, 10**6)] * 4))
def test_rates_add_up(counts: tuple[int, int, int, int]) -> None:
    outcomes = Outcomes(retained=counts[0], timely=counts[1], late=counts[2], miss=counts[3])
    shares = [share for share in metrics.rates(outcomes).values() if share is not None]
    assert not shares if not outcomes.total else math.isclose(sum(shares), 1)


def test_the_median_round_took_the_median_time() -> None:
    assert metrics.median_round([5.0, 1.0, 3.0]) == 2
    assert metrics.median_round([4.0, 2.0]) == 1  # of two the faster
    with pytest.raises(ValueError, match="no round"):
        metrics.median_round([])


def test_relate_compares_with_the_controls_that_ran() -> None:
    runs = metrics.relate([invented_run(name) for name in ("resident", "none", "attention")])
    assert (runs[0].tpot_ratio, runs[0].extra_share) == (1.0, 0.0)
    assert runs[1].extra_share == 1.0
    assert runs[2].extra_share is not None
    assert 0 < runs[2].extra_share < 1
    alone = metrics.relate(runs[2:])[0]
    assert (alone.tpot_ratio, alone.extra_share, alone.effective_latency_ratio) == (None,) * 3
    no_none = metrics.relate([runs[0], runs[2]])[1]
    assert no_none.extra_share is None
    assert no_none.tpot_ratio == runs[2].tpot_ratio


def test_a_predictor_called_none_is_not_the_control() -> None:
    imposter = msgspec.structs.replace(invented_run("attention"), name="none")
    assert metrics.find([imposter], "none") is None


def test_json_round_trip() -> None:
    result = invented_result()
    data = metrics.encode(result)
    assert metrics.decode(data) == result
    plain = msgspec.json.decode(data)
    assert plain["schema"] == "prefetchd.replay.decode/1"
    assert set(plain["runs"][0]["stall_us"]) == {"p50", "p99", "p999", "max", "n"}


def test_json_takes_numpy_numbers_and_holds_no_nan() -> None:
    run = msgspec.structs.replace(
        invented_run("none"),
        tpot_ms=np.float64(3.5),
        step_ms=np.arange(3.0),
        verified_pages=np.int64(7),
        miss_rate=float("nan"),
        achieved_depth=float("inf"),
    )
    result = msgspec.structs.replace(invented_result(), runs=[run])
    read = metrics.decode(metrics.encode(result)).runs[0]
    assert (read.tpot_ms, read.step_ms, read.verified_pages) == (3.5, [0.0, 1.0, 2.0], 7)
    assert read.miss_rate is None
    assert read.achieved_depth is None


def test_a_figure_that_must_be_there_is_not_lost_silently() -> None:
    run = msgspec.structs.replace(invented_run("none"), tpot_ms=float("nan"))
    with pytest.raises(ResultError, match=r"runs\[0\]\.tpot_ms"):
        metrics.encode(msgspec.structs.replace(invented_result(), runs=[run]))


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{}", b'{"schema": "other/2"}'])
def test_foreign_json_is_refused(data: bytes) -> None:
    with pytest.raises(ResultError, match="not a decode's result"):
        metrics.decode(data)
