"""`prefetchd bench write`: every payload is written once, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetchd.bench.ring import BenchError, has_fio
from prefetchd.bench.write import WriteSettings, bench_write


@pytest.mark.parametrize("durability", ["durable", "fast"])
def test_a_pass_writes_what_it_says(durability: str, tmp_path: Path) -> None:
    settings = WriteSettings(2, 4096, 40, 2, 0.0, "threads", durability)
    told: list[int] = []
    rates = bench_write(tmp_path / "w", settings, fio=has_fio(), tell=lambda: told.append(1))
    assert len(rates.ours) == 2
    assert (rates.ratio is not None) == has_fio()
    assert len(told) == 2 * (1 + has_fio())
    assert rates.bytes_written >= 40 * 2 * 4096
    assert not (tmp_path / "w").exists()
    with pytest.raises(BenchError, match="there already"):
        bench_write(tmp_path, settings, fio=False, tell=lambda: None)
