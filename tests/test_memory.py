"""A page costs few bytes of memory beside its place in the staging buffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefetchd.model import Geometry
from prefetchd.predictors._restraint import Sample
from tests.memory_campaign import bytes_a_page, held_by
from tests.reopen_campaign import reopen

BYTES_A_PAGE = 64
FIXED_BYTES = 1_500_000
"""What does not grow with the store: tables, samples, windows."""


@pytest.mark.parametrize("layers", [30, 32])
def test_a_runtime_takes_few_bytes_a_page(layers: int) -> None:
    less, more = 512 * layers, 2048 * layers
    small = sum(bytes_a_page(512, layers).values()) * less
    large = sum(bytes_a_page(2048, layers).values()) * more
    growth = (large - small) / (more - less)
    assert growth <= BYTES_A_PAGE
    assert small - growth * less <= FIXED_BYTES


def test_arrays_are_counted_once_and_at_their_owner() -> None:
    class Inner:
        def __init__(self) -> None:
            self.array = np.zeros(1000, np.int64)
            self.view = self.array[10:]

    Inner.__module__ = "prefetchd.inner"
    inner = Inner()
    found = held_by([inner, {1: inner.view}])
    assert found["Inner"] + found["list"] >= 8000
    assert 8000 <= sum(found.values()) < 9000


@pytest.mark.parametrize("layers", [1, 23, 24, 30, 32])
def test_a_sample_numbers_its_pages_without_gaps(layers: int) -> None:
    geometry = Geometry(layers, 7)
    sample, pages = Sample(geometry), np.arange(geometry.pages)
    mine = pages[sample.has(pages)]
    assert sample.numbers(mine).tolist() == list(range(sample.pages))


def test_the_store_that_reopening_is_timed_on_is_found_whole_both_ways(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = reopen(tmp_path / "kv", 64, 4, 1)
    assert found.blocks_found == 64
    scans = [record for record in caplog.records if "64 headers were read" in record.message]
    assert len(scans) == 2, "one after each crash, none after a clean close"
