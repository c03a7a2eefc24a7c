"""A store of many small blocks is opened after a kill by reading its headers many at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import Options, recovery, transfers, uniform
from tests.runtime_bench import keys

BLOCKS = 600
OPTIONS = Options(staging_bytes=BLOCKS * 4096, write_buffers=4, predictor="none")


def test_headers_are_read_into_what_will_be_staging_and_not_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = np.random.default_rng(1).integers(0, 256, (BLOCKS, 1, 4096), np.uint8)
    with prefetchd.open(
        tmp_path / "s", uniform(1, 4096), blocks=BLOCKS, fill=False, options=OPTIONS
    ) as kv:
        assert not kv.put(keys(BLOCKS), pages).wait().failures
    batches: list[int] = []
    transfer = transfers.transfer

    def counted(device: Any, ops: Any) -> Any:
        batches.append(len(ops))
        return transfer(device, ops)

    monkeypatch.setattr(recovery, "transfer", counted)
    with prefetchd.open(
        tmp_path / "s", read_only=True, options=Options(staging_bytes=BLOCKS * 4096, scan=True)
    ) as kv:
        assert max(batches) == BLOCKS
        assert not kv._parts.staging.any()
        assert len(kv.lookup(keys(BLOCKS))) == BLOCKS
