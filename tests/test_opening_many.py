"""A store of many blocks is opened after a kill by reading its headers many at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prefetchd
from prefetchd import Options, header_reads, uniform
from prefetchd.device import READ, Ops, StorageDevice
from prefetchd.devices.memory import Memory
from prefetchd.transfers import Transfer
from tests.runtime_bench import keys
from tests.tier_bench import Tier, new_image

BLOCKS = 600


@pytest.mark.parametrize(("page_bytes", "operations"), [(4096, 600 // 32 + 600 % 32), (16384, 600)])
def test_headers_are_read_into_what_will_be_staging_and_not_left_there(
    page_bytes: int, operations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(staging_bytes=BLOCKS * page_bytes, write_buffers=4, predictor="none")
    layout = uniform(1, page_bytes)
    pages = np.random.default_rng(1).integers(0, 256, (BLOCKS, 1, page_bytes), np.uint8)
    with prefetchd.open(tmp_path / "s", layout, blocks=BLOCKS, fill=False, options=options) as kv:
        assert not kv.put(keys(BLOCKS), pages).wait().failures
    batches: list[int] = []

    class Counted(Transfer):
        def __init__(self, device: StorageDevice, ops: Ops) -> None:
            batches.append(len(ops))
            assert not (ops["memory"] % 4096).any()
            super().__init__(device, ops)

    monkeypatch.setattr(header_reads, "Transfer", Counted)
    # The arena is an odd number of pages long.
    options = Options(staging_bytes=(BLOCKS - 1) * page_bytes, write_buffers=1, scan=True)
    with prefetchd.open(tmp_path / "s", read_only=True, options=options) as kv:
        assert sum(batches) == operations + 2  # and the heads of the journal's areas
        assert len(batches) < 8
        assert not kv._parts.staging.any()
        assert len(kv.lookup(keys(BLOCKS))) == BLOCKS


class NoRuns(Memory):
    """Reads nothing as a whole that is larger than a header."""

    refused = 0

    def submit(self, ops: Ops) -> int:
        ops = ops.copy()
        large = (ops["kind"] == READ) & (ops["length"] > 4096)
        self.refused += int(np.count_nonzero(large))
        ops["length"][large] -= 4096
        return super().submit(ops)


@pytest.mark.parametrize("stripes", [1, 3])
def test_what_cannot_be_read_in_a_run_is_read_alone(stripes: int) -> None:
    tier = Tier(new_image(stripes))
    for number in range(5):
        tier.put(number, durable=True)
        tier.settle()
    for device in (Memory, NoRuns):
        again = Tier([file.copy() for file in tier.device.contents], scan=True, device=device)
        assert again.stored() == tier.stored()
    assert isinstance(again.device, NoRuns)
    assert again.device.refused > 0
