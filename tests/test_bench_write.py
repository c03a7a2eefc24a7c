"""`prefetchd bench write`: every payload is written once, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefetchd.bench.fio import has_fio
from prefetchd.bench.ring import BenchError
from prefetchd.bench.write import WriteSettings, bench_write
from tests.replays import run_here

Capture = pytest.CaptureFixture[str]


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


def test_it_says_what_was_written_where(tmp_path: Path, capsys: Capture) -> None:
    words = ["--page-bytes", "4KiB", "--layers", "2", "--blocks", "40", "--rounds", "2"]
    folder = tmp_path / "a:[b]"  # fio takes a bare colon for the end of a name
    done = run_here(capsys, "bench", "write", folder, *words, "--idle-s", "0", "--json", "-")
    found = json.loads(done.out)
    assert found["kind"] in ("RAM", "MEASURED")
    assert found["engine"]
    assert found["payload_bytes"] == 40 * 2 * 4096
    assert len(found["payload_gb_s_rounds"]) == 2
    assert len(found["fio_gb_s_rounds"]) == 2 * has_fio()
    assert not any(tmp_path.iterdir())
    done = run_here(capsys, "bench", "write", folder, *words, "--idle-s", "0", "--no-fio")
    assert "a:[b]" in done.out
    assert f"on {found['file_system']} ({found['kind']})" in done.out
    assert "fio is not installed" not in done.err
